"""The quantized linear layer: whole numbers and scales in place of a matrix.

Shapes: M tokens, K input channels, N output channels.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from wakeful.config.model import RotationName
from wakeful.model.attention import Flow, Heads, into_heads
from wakeful.paged import store_like
from wakeful.quantization.arithmetic import LINEARS, Arithmetic, Operands, emulated, pack
from wakeful.quantization.schemes import Scales, Scheme
from wakeful.quantization.schemes.methods import InputStatistics

_PACKED_BITS = 4
"""Up to this many bits, two numbers share a byte."""


class KeepsBuffers(nn.Module):
    """A module some of whose buffers stay as they are whatever the model is converted to."""

    fixed_buffers: ClassVar[tuple[str, ...]]
    holds_quantized_values: ClassVar[bool] = True
    """Tells rooms below this one that a model is quantized."""

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> "KeepsBuffers":
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name in self.fixed_buffers:
            buffer, now = before[name], self._buffers[name]
            if buffer is not None and now is not None:
                self._buffers[name] = buffer.to(now.device)
        return self


class QuantizedLinear(KeepsBuffers):
    """ŷ = Q_out(Q_in(x) Ŵᵀ + b), with what of it the scheme quantizes.

    Buffers: `integers` (N, K) int8, or (N, ⌈K/2⌉) uint8 with two 4-bit numbers a byte, which are
    the codes of a format that is not whole numbers; `scale` and, where the grid has one, `zero`,
    both (N, 1) or (1, 1), of groups (N, G); `outer` (N, 1) or (1, 1) where scales have two levels;
    `bias` (N,) as it was; `input_scale`, `output_scale` where they are static; and `divisor` (K,)
    of the inputs, where the scheme's method has one. Scales stay as they are whatever the model is
    converted to. The arithmetic is float32; the output has the dtype of the input.
    """

    fixed_buffers = ("scale", "outer", "input_scale", "output_scale", "divisor")

    def __init__(self, layer: nn.Module, scheme: Scheme, arithmetic: Arithmetic) -> None:
        """Take the place of a linear layer, to be filled with whole numbers."""
        super().__init__()
        weight, bias = matrix(layer)
        out_features, in_features = self.out_features, self.in_features = weight.shape
        self.scheme = scheme
        self.arithmetic: Arithmetic = arithmetic
        assert scheme.weights is not None
        grid = self.grid = scheme.weights
        self.packed = grid.bits <= _PACKED_BITS
        columns = (in_features + 1) // 2 if self.packed else in_features
        kind = torch.uint8 if self.packed else torch.int8
        scale_shape = shared = (out_features if grid.per == "channel" else 1, 1)
        if grid.group:
            scale_shape = (out_features, -(-in_features // grid.group))
        static = scheme.scales == "static"
        for name, value in {
            "integers": torch.zeros(out_features, columns, dtype=kind),
            "scale": grid.encode_scale(torch.ones(scale_shape)),
            "zero": None if grid.symmetric else torch.zeros(scale_shape, dtype=torch.int32),
            "outer": torch.ones(shared) if grid.two_scales else None,
            "bias": None if bias is None else torch.zeros(out_features, dtype=weight.dtype),
            "input_scale": torch.ones(1, 1) if static and scheme.inputs else None,
            "output_scale": torch.ones(1, 1) if static and scheme.outputs else None,
            "divisor": torch.ones(in_features) if scheme.rounding.divides else None,
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

    def fill(
        self, layer: nn.Module, integers: Tensor, scales: Scales, divisor: Tensor | None = None
    ) -> None:
        """Take over the codes (N, K) and scales that a layer's matrix was rounded to, and its bias.

        The codes' memory is of the matrix's kind.
        """
        weight, bias = matrix(layer)
        self.integers = store_like(weight, pack(integers) if self.packed else integers)
        self.scale, self.zero = self.grid.encode_scale(scales.scale), scales.zero
        self.outer, self.divisor = scales.outer, divisor
        if bias is not None:
            self.bias = bias.detach().clone()

    def calibrate(self, statistics: InputStatistics) -> None:
        """Set the static scales from the largest |x| of inputs and outputs on calibration text."""
        channels = (
            statistics.channels if self.divisor is None else statistics.channels / self.divisor
        )
        for name, grid, largest in (
            ("input_scale", self.scheme.inputs, float(channels.max())),
            ("output_scale", self.scheme.outputs, statistics.outputs),
        ):
            if grid is not None:
                bound = torch.full((1, 1), largest, device=self.scale.device)
                setattr(self, name, grid.shared_scale(bound))

    @property
    def operands(self) -> Operands:
        """The weights as they are stored, with their scales."""
        grid = self.grid
        scales = Scales(grid.decode_scale(self.scale), self.zero, self.outer, grid.group)
        return Operands(grid, self.integers, scales, self.in_features)

    @property
    def sees_padding(self) -> bool:
        """True where padding changes a sequence's output: a dynamic scale "per tensor" sees it."""
        shared = any(grid.per == "tensor" for _, grid in self.scheme.activations)
        return shared and self.scheme.scales == "dynamic"

    def dequantized(self) -> Tensor:
        """Return Ŵ (N, K) in float32."""
        return self.operands.dequantized()

    def linear(self, x: Tensor) -> Tensor:
        """Return ŷ (..., N) of x (..., K).

        A dynamic scale "per tensor" is of one sequence, x[b] of x (B, L, K): what a sequence gives
        does not depend on those beside it, nor does it in an x (B · L, K) inside of `by_sequence`.
        """
        rows, scales, sequences = self._read(x)
        inputs, outputs = self.scheme.inputs, self.scheme.outputs
        arithmetic = self.arithmetic
        if inputs is None and outputs is not None:
            arithmetic = "reference"  # rounding the output needs the definition's last bit
        multiply = emulated if self.scheme.emulated else LINEARS[arithmetic]
        y = multiply(rows, inputs, scales, self.operands)
        if self.bias is not None:
            y = y + self.bias.float()
        if outputs is not None:
            y = outputs.fake_quantize(y, outputs.scales_of(y, sequences, self.output_scale))
        return y.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def _read(self, x: Tensor) -> tuple[Tensor, Scales | None, int]:
        """Return inputs in rows, their scales where they are quantized, and how many sequences."""
        rows = x.reshape(-1, self.in_features).float()
        if self.divisor is not None:
            rows = rows / self.divisor
        sequences = x.shape[0] if x.ndim > 2 else _batch.sequences_of(len(rows))
        grid = self.scheme.inputs
        return (
            rows,
            None if grid is None else grid.scales_of(rows, sequences, self.input_scale),
            sequences,
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, scheme={self.scheme}, arithmetic={self.arithmetic}"
        )


class _Batch(threading.local):
    """The shape (B, L) of the tokens that a model is reading in this thread, (1, 0) for none."""

    shape: tuple[int, int] = (1, 0)

    def sequences_of(self, rows: int) -> int:
        """Return B where that many rows are all tokens, one sequence after another; else 1."""
        batch, length = self.shape
        return batch if rows == batch * length else 1


_batch = _Batch()


def by_sequence(model: nn.Module) -> nn.Module:
    """Note each batch's shape, so that a dynamic scale per tensor is one a sequence even in layers
    that get a batch flattened into rows (OPT's feed-forward networks, experts that all share);
    return the model, changed in place.
    """
    model.register_forward_pre_hook(_begin, with_kwargs=True)
    model.register_forward_hook(_end, always_call=True)
    return model


def _begin(_model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    candidates = (*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds"))
    tokens = next((value for value in candidates if isinstance(value, Tensor)), None)
    if tokens is not None and tokens.ndim == (3 if tokens.is_floating_point() else 2):
        _batch.shape = (tokens.shape[0], tokens.shape[1])


def _end(_model: nn.Module, _args: tuple, _output: object) -> None:
    _batch.shape = (1, 0)


class QuantizedHeads(QuantizedLinear):
    """A quantized projection of our decoder into heads."""

    def __init__(self, layer: Heads, scheme: Scheme, arithmetic: Arithmetic) -> None:
        super().__init__(layer, scheme, arithmetic)
        self.heads, self.norm = layer.heads, layer.norm
        self.rotary: RotationName = layer.rotary

    def forward(self, x: Tensor, flow: Flow) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return into_heads(self.linear(x), self.heads, self.norm, flow, rotary=self.rotary)


def matrix(layer: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return a linear layer's (N, K) matrix and its bias; GPT-2's Conv1D keeps it transposed."""
    if isinstance(layer, Conv1D):
        return layer.weight.T, layer.bias
    assert isinstance(layer, nn.Linear)
    return layer.weight, layer.bias


def quantized(
    layer: nn.Module,
    scheme: Scheme,
    arithmetic: Arithmetic,
    statistics: InputStatistics | None = None,
) -> QuantizedLinear:
    """Return the quantized form of a linear layer whose weights are finite, by what calibration
    showed of it.
    """
    return quantized_forms(layer, [scheme], arithmetic, statistics)[0]


@torch.no_grad()
def quantized_forms(
    layer: nn.Module,
    schemes: Sequence[Scheme],
    arithmetic: Arithmetic,
    statistics: InputStatistics | None = None,
    largest: Tensor | None = None,
) -> list[QuantizedLinear]:
    """Return a layer's forms under schemes of one method, which rounds them together.

    `largest` is the largest |W| of all matrices that share an outer scale, (1, 1), where some do.
    """
    if not schemes:
        return []
    weight, method = matrix(layer)[0], schemes[0].rounding
    assert statistics is not None or not method.divides
    divisor = divisor_of(schemes[0], statistics)
    if divisor is not None:
        weight = weight.float() * divisor
    forms = [empty(layer, scheme, arithmetic) for scheme in schemes]
    grids = [
        form.grid if largest is None or not form.grid.two_scales
        else form.grid.under(form.grid.shared_scale(largest)) for form in forms
    ]  # fmt: skip
    products = None if statistics is None else statistics.products
    rounded = method.round_all(weight, grids, products)
    for form, (integers, scales) in zip(forms, rounded, strict=True):
        form.fill(layer, integers, scales, divisor)
        if form.scheme.scales == "static":
            assert statistics is not None
            form.calibrate(statistics)
    return forms


def empty(layer: nn.Module, scheme: Scheme, arithmetic: Arithmetic) -> QuantizedLinear:
    """Return the quantized form of a linear layer, to be filled with whole numbers."""
    if isinstance(layer, Heads):
        return QuantizedHeads(layer, scheme, arithmetic)
    return QuantizedLinear(layer, scheme, arithmetic)


def divisor_of(scheme: Scheme, statistics: InputStatistics | None) -> Tensor | None:
    """Return what a layer's inputs are divided by, (K,); None is 1."""
    method, grid = scheme.rounding, scheme.weights
    if statistics is None or grid is None or not method.divides:
        return None
    if method.norms and not statistics.of_norm:
        return torch.ones_like(statistics.channels)
    return method.divisor(
        statistics, grid
    ).clone()  # which layers of one input share: a file would too
