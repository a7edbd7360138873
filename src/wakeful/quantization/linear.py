"""The quantized linear layer: whole numbers and scales in place of a matrix.

Shapes: M tokens, K input channels, N output channels.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from wakeful.config.model import RotationName
from wakeful.model.attention import Flow, Heads, into_heads
from wakeful.model.turned import walsh_hadamard
from wakeful.paged import store_like
from wakeful.quantization.arithmetic import Operands, emulated_product, integer_product, pack_int4
from wakeful.quantization.schemes import Scales, Scheme
from wakeful.quantization.schemes.methods import InputStatistics

_PACKED_BITS = 4
"""Up to this many bits, two codes share a byte."""


class FixedDtypeModule(nn.Module):
    """A module whose `fixed_buffers` keep their dtype when the model is converted to another
    one.
    """

    fixed_buffers: ClassVar[tuple[str, ...]]
    holds_quantized_values: ClassVar[bool] = True
    """Marks a quantized model for packages that do not import this one."""

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> "FixedDtypeModule":
        """Apply `fn`, the conversion that `.half()` or `.to(...)` asks for, to all tensors; the
        `fixed_buffers` go to the new device and keep their dtype.
        """
        original_buffers = dict(self._buffers)
        super()._apply(fn, recurse)
        for name in self.fixed_buffers:
            original, converted = original_buffers[name], self._buffers[name]
            if original is not None and converted is not None:
                self._buffers[name] = original.to(converted.device)
        return self


class QuantizedLinear(FixedDtypeModule):
    """A quantized linear layer, ŷ = Q_out(Q_in(x) Ŵᵀ + b), with those of W, x and y quantized that
    the scheme says. Under a scheme with a rotation R, x R and W R are quantized instead.

    Buffers: `integers` are the codes, (N, K) int8, or (N, ⌈K/2⌉) uint8 with two codes of up to 4
    bits per byte; `scale` and, where the number format has a zero point, `zero` are (N, 1), (1, 1)
    or, in groups of input channels, (N, G); `outer` is the outer scale of a format with two levels
    of scales, (N, 1) or (1, 1); `bias` is (N,), as in the original layer; `input_scale` and
    `output_scale` are set where activation scales are static; `divisor` (K,) divides the inputs
    where the scheme's method does so. Scales keep their dtype when the model is converted. The
    arithmetic is float32; the output has the dtype of the input.
    """

    fixed_buffers = ("scale", "outer", "input_scale", "output_scale", "divisor")

    def __init__(self, layer: nn.Module, scheme: Scheme) -> None:
        """Create the quantized layer with the shape of a full-precision one; `set_weights` fills
        its buffers. Buffers that the scheme does not need are None.
        """
        super().__init__()
        weight, bias = weight_and_bias(layer)
        out_features, in_features = self.out_features, self.in_features = weight.shape
        self.scheme = scheme
        assert scheme.weights is not None
        grid = self.grid = scheme.weights
        self.packed = grid.bits <= _PACKED_BITS  # two codes share a byte
        columns = (in_features + 1) // 2 if self.packed else in_features
        code_type = torch.uint8 if self.packed else torch.int8
        scale_shape = outer_shape = (out_features if grid.per == "channel" else 1, 1)
        if grid.group:
            scale_shape = (out_features, -(-in_features // grid.group))
        static = scheme.scales == "static"
        for name, value in {
            "integers": torch.zeros(out_features, columns, dtype=code_type),
            "scale": grid.encode_scale(torch.ones(scale_shape)),
            "zero": None if grid.symmetric else torch.zeros(scale_shape, dtype=torch.int32),
            "outer": torch.ones(outer_shape) if grid.two_scales else None,
            "bias": None if bias is None else torch.zeros(out_features, dtype=weight.dtype),
            "input_scale": torch.ones(1, 1) if static and scheme.inputs else None,
            "output_scale": torch.ones(1, 1) if static and scheme.outputs else None,
            "divisor": torch.ones(in_features) if scheme.rounding.divides_inputs else None,
        }.items():
            self.register_buffer(name, value)
        self.to(weight.device).eval()

    integers: Tensor
    scale: Tensor
    zero: Tensor | None
    outer: Tensor | None
    bias: Tensor | None
    input_scale: Tensor | None
    output_scale: Tensor | None
    divisor: Tensor | None

    def set_weights(
        self, layer: nn.Module, integers: Tensor, scales: Scales, divisor: Tensor | None = None
    ) -> None:
        """Store the quantized weights of the full-precision `layer`, codes `integers` (N, K) with
        their scales and the divisor of inputs, and copy its bias.

        The codes lie in memory or, if the layer's weight lies in a file, in a file too.
        """
        weight, bias = weight_and_bias(layer)
        self.integers = store_like(weight, pack_int4(integers) if self.packed else integers)
        self.scale, self.zero = self.grid.encode_scale(scales.scale), scales.zero
        self.outer, self.divisor = scales.outer, divisor
        if bias is not None:
            self.bias = bias.detach().clone()

    def set_static_scales(self, statistics: InputStatistics) -> None:
        """Set the static scales from the largest |x| of inputs and outputs on calibration text."""
        channel_max = statistics.channel_max
        if self.divisor is not None:  # the scale is that of the divided inputs
            channel_max = channel_max / self.divisor
        for name, grid, largest in (
            ("input_scale", self.scheme.inputs, float(channel_max.max())),
            ("output_scale", self.scheme.outputs, statistics.output_max),
        ):
            if grid is not None:
                maximum = torch.full((1, 1), largest, device=self.scale.device)
                setattr(self, name, grid.scale_for_max(maximum))

    @property
    def operands(self) -> Operands:
        """The quantized weights, as stored, with their scales."""
        grid = self.grid
        scales = Scales(grid.decode_scale(self.scale), self.zero, self.outer, grid.group)
        return Operands(grid, self.integers, scales, self.in_features)

    @property
    def has_transformed_inputs(self) -> bool:
        """True where inputs are divided or rotated, so that Ŵ is no approximation of W."""
        return self.divisor is not None or bool(self.scheme.rotation)

    @property
    def depends_on_padding(self) -> bool:
        """True where padding tokens change a sequence's output, because a dynamic scale is shared
        by all tokens of a tensor.
        """
        shared = any(grid.per == "tensor" for _, grid in self.scheme.activations)
        return shared and self.scheme.scales == "dynamic"

    def dequantize(self) -> Tensor:
        """Return Ŵ (N, K) in float32; it multiplies inputs as `transform_inputs` returns them."""
        return self.operands.dequantize()

    def linear(self, x: Tensor) -> Tensor:
        """Return the layer's output ŷ (..., N) for inputs x (..., K), activations quantized too.

        A dynamic scale "per tensor" is computed for each sequence x[b] of x (B, L, K), so that a
        sequence's output does not depend on the others in its batch. In rows (M, K), to which a few
        models flatten a batch, all tokens share one.
        """
        rows, scales, num_sequences = self.prepare_inputs(x)
        multiply = emulated_product if self.scheme.emulated else integer_product
        y = multiply(rows, self.scheme.inputs, scales, self.operands)
        if self.bias is not None:
            y = y + self.bias.float()
        y = self.round_outputs(y, num_sequences)
        return y.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def prepare_inputs(self, x: Tensor) -> tuple[Tensor, Scales | None, int]:
        """Return three things: the rows of `transform_inputs`; their scales, None where inputs are
        not quantized; and the number of sequences in the rows.

        No gradient flows through the scales.
        """
        rows = self.transform_inputs(x)
        num_sequences = x.shape[0] if x.ndim > 2 else 1
        grid, scales = self.scheme.inputs, None
        if grid is not None:
            scales = grid.compute_scales(rows.detach(), num_sequences, self.input_scale)
        return rows, scales, num_sequences

    def transform_inputs(self, x: Tensor) -> Tensor:
        """Return inputs x (..., K) as float32 rows (M, K), divided by the layer's divisor and
        rotated, as its weights expect them.
        """
        rows = x.reshape(-1, self.in_features).float()
        if self.divisor is not None:
            rows = rows / self.divisor
        return rotate_channels(rows, self.scheme.rotation)

    def round_outputs(self, y: Tensor, num_sequences: int) -> Tensor:
        """Return outputs y (M, N) of `num_sequences` sequences, rounded if the scheme says so."""
        grid = self.scheme.outputs
        if grid is None:
            return y
        return grid.fake_quantize(y, grid.compute_scales(y, num_sequences, self.output_scale))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, scheme={self.scheme}"
        )


class QuantizedHeads(QuantizedLinear):
    """A quantized projection of our decoder into heads."""

    def __init__(self, layer: nn.Module, scheme: Scheme) -> None:
        super().__init__(layer, scheme)
        assert isinstance(layer, Heads)
        self.heads, self.norm = layer.heads, layer.norm
        self.rotary: RotationName = layer.rotary

    def forward(self, x: Tensor, flow: Flow) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return into_heads(self.linear(x), self.heads, self.norm, flow, rotary=self.rotary)


def rotate_channels(x: Tensor, size: int) -> Tensor:
    """Return x (..., K) with every `size` channels multiplied by the Hadamard matrix H/√`size`,
    which is symmetric and its own inverse; x itself for a size of 0.
    """
    if not size:
        return x
    return walsh_hadamard(x.unflatten(-1, (-1, size))).flatten(-2)


def weight_and_bias(layer: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return a linear layer's weight (N, K) and its bias (N,) or None; GPT-2's Conv1D stores its
    weight transposed.
    """
    if isinstance(layer, Conv1D):
        return layer.weight.T, layer.bias
    assert isinstance(layer, nn.Linear)
    return layer.weight, layer.bias


def quantize_layer(
    layer: nn.Module, scheme: Scheme, statistics: InputStatistics | None = None
) -> QuantizedLinear:
    """Return a quantized copy of a linear layer with finite weights.

    `statistics` of calibration text at the layer are needed by methods and by static scales.
    """
    return quantize_layer_with_schemes(layer, [scheme], statistics)[0]


@torch.no_grad()
def quantize_layer_with_schemes(
    layer: nn.Module,
    schemes: Sequence[Scheme],
    statistics: InputStatistics | None = None,
    max_weight: Tensor | None = None,
) -> list[QuantizedLinear]:
    """Return one quantized copy of a linear layer per scheme; all schemes have the same method and
    rotation.

    The method rounds for all number formats together, which saves time. `statistics` are as in
    `quantize_layer`. `max_weight` (1, 1) is the largest |W| over all layers that share an outer
    scale with this one, if there are others.
    """
    if not schemes:
        return []
    method, rotation = schemes[0].rounding, schemes[0].rotation
    assert statistics is not None or not method.divides_inputs
    divisor = layer_divisor(schemes[0], statistics)
    weight = weight_to_round(layer, schemes[0], divisor)
    kind = QuantizedHeads if isinstance(layer, Heads) else QuantizedLinear
    quantized_copies = [kind(layer, scheme) for scheme in schemes]
    grids = [quantized.grid for quantized in quantized_copies]
    if max_weight is not None:
        grids = [
            grid.with_outer_scale(grid.scale_for_max(max_weight))
            if grid.shares_outer_scale
            else grid
            for grid in grids
        ]
    gram = None if statistics is None else statistics.gram
    if gram is not None and rotation:  # (X R)ᵀ(X R), with R = Rᵀ and XᵀX symmetric
        gram = rotate_channels(rotate_channels(gram, rotation).T, rotation)
    rounded = method.round_with_grids(weight, grids, gram)
    for quantized, (integers, scales) in zip(quantized_copies, rounded, strict=True):
        quantized.set_weights(layer, integers, scales, divisor)
        if quantized.scheme.scales == "static":
            assert statistics is not None
            quantized.set_static_scales(statistics)
    return quantized_copies


def weight_to_round(layer: nn.Module, scheme: Scheme, divisor: Tensor | None) -> Tensor:
    """Return the weight (N, K) of a linear layer as a scheme rounds it: multiplied by the `divisor`
    (K,) of its inputs, if there is one, and rotated.
    """
    weight = weight_and_bias(layer)[0]
    if divisor is not None:
        weight = weight.float() * divisor
    if scheme.rotation:
        weight = rotate_channels(weight.float(), scheme.rotation)
    return weight


def layer_divisor(scheme: Scheme, statistics: InputStatistics | None) -> Tensor | None:
    """Return the divisor (K,) of a layer's inputs under a scheme; None if its method divides none.

    It is all ones for a layer that reads no norm's output, if the method leaves such layers out.
    """
    method, grid = scheme.rounding, scheme.weights
    if statistics is None or grid is None or not method.divides_inputs:
        return None
    if method.norms and not statistics.reads_norm:
        return torch.ones_like(statistics.channel_max)
    # Without a copy, layers with the same input might share a tensor, which a file stores once.
    return method.compute_divisor(statistics, grid).clone()
