"""Schemes: the number format of each tensor of a linear layer."""

import copy
from dataclasses import fields
from typing import Literal, get_args

from wakeful.errors import WakefulError
from wakeful.quantization.schemes.gptq import Gptq
from wakeful.quantization.schemes.grids import (
    E4M3,
    Absmax,
    Grid,
    MxE2M1,
    NvE2M1,
    Per,
    Scales,
    Zeropoint,
)
from wakeful.quantization.schemes.methods import Method, Smooth
from wakeful.variants import FieldVariant, Variant, build, variant_name

__all__ = ["NAMED", "SCHEMES", "Absmax", "Grid", "Scales", "Scheme", "Zeropoint", "parse_scheme"]

ScaleKind = Literal["dynamic", "static"]
_ALLOWED: dict[str, tuple[Per, ...]] = {
    "weights": ("channel", "tensor"),
    "inputs": ("token", "tensor"),
    "outputs": ("token", "tensor"),
    "cache": ("token", "head", "tensor"),
}


class Scheme(FieldVariant):
    """Number formats of a quantized linear layer, ŷ = Q_out(Q_in(x) Ŵᵀ + b); None leaves a tensor
    in full precision.

    Activation scales are `dynamic`, computed from the current tensor, or `static`, from calibration
    text. A `method` uses calibration text too. `cache` is the format of the keys and values that
    attention reads, with a scale for each head of each token, or from calibration text a scale per
    head or per tensor of a layer.

    With a `rotation` of n channels, every n inputs are multiplied by the Hadamard matrix H/√n
    before they are rounded, and so is each row of W: (x R)(W R)ᵀ = x Wᵀ, R = diag(H, H, …)/√n.
    Outliers then spread over n channels (MR-GPTQ, 2509.23202).

    Two schemes are equal if all of these are; `str` prefers a short name.
    """

    weights: Grid | None = None
    inputs: Grid | None = None
    outputs: Grid | None = None
    scales: ScaleKind = "dynamic"
    method: Method | None = None
    cache: Grid | None = None
    rotation: int = 0

    def __post_init__(self) -> None:
        """Raise `WakefulError` if the number formats do not go together."""
        cache_alone = self.cache is not None and not self.activations and self.method is None
        if self.weights is None and not cache_alone:
            raise WakefulError("a scheme has weights, or a cache and nothing else")
        for part, grid in (("weights", self.weights), *self.activations, ("cache", self.cache)):
            if grid is not None and grid.per not in _ALLOWED[part]:
                raise WakefulError(
                    f"{part} share a scale per {' or '.join(_ALLOWED[part])}, not per {grid.per}"
                )
        for part, grid in self.activations:
            if not grid.symmetric:
                raise WakefulError(f"{part} take a grid without a zero point, not {grid}")
        if self.cache is not None and self.cache.group and self.cache.per != "token":
            raise WakefulError(f"a cache has groups of a token's channels, not {self.cache}")
        if self.rotation:
            self._check_rotation()
        if self.scales not in get_args(ScaleKind):
            raise WakefulError(f"scales must be dynamic or static, got {self.scales!r}")
        if self.scales == "static" and not self.can_be_static:
            raise WakefulError(
                f"{self.with_scales('dynamic')} has nothing to calibrate: only per-tensor "
                "activation scales can be static, so use it with dynamic ones"
            )

    def _check_rotation(self) -> None:
        """Raise `WakefulError` unless the rotation has a Hadamard matrix and goes with the rest."""
        if self.rotation < 2 or self.rotation & (self.rotation - 1):
            raise WakefulError(
                f"rotation takes a number of channels that is a power of two, or 0 for none, not "
                f"{self.rotation}"
            )
        if self.weights is None:
            raise WakefulError("a rotation needs weights: it does not act on a cache")
        if self.scales == "static" and self.inputs is not None:
            raise WakefulError(
                "calibration text gives no scales of rotated inputs: leave static out, or rotation "
                "(a format that is saved with static scales only, such as nvfp4, cannot be saved "
                "with a rotation)"
            )

    @property
    def activations(self) -> list[tuple[str, Grid]]:
        """The formats of inputs and outputs that are quantized: ("inputs", grid) and so on."""
        grids = (("inputs", self.inputs), ("outputs", self.outputs))
        return [(part, grid) for part, grid in grids if grid is not None]

    @property
    def can_be_static(self) -> bool:
        """True where activations are quantized and calibration text can give their scales: each has
        one per tensor, or of two levels of scales the outer one is per tensor.
        """
        return bool(self.activations) and all(
            grid.per == "tensor" and (grid.two_scales or not grid.group)
            for _, grid in self.activations
        )

    @property
    def rounding(self) -> Method:
        """The method by which weights are rounded; by default to nearest."""
        return self.method or Method()

    @property
    def calibrated(self) -> bool:
        """True where the scheme needs calibration text."""
        return self.scales == "static" or self.method is not None or self.calibrates_cache

    @property
    def calibrates_cache(self) -> bool:
        """True where the cache's scales come from calibration text: all but those per token."""
        return self.cache is not None and self.cache.per != "token"

    @property
    def emulated(self) -> bool:
        """True where dequantized numbers are multiplied because there is no kernel for the codes:
        if a format is floating-point, or if activations are quantized and any tensor has a scale
        for each group of channels.
        """
        grids = [grid for grid in (self.weights, self.inputs, self.outputs) if grid is not None]
        grouped = bool(self.activations) and any(grid.group for grid in grids)
        return grouped or any(grid.emulated for grid in grids)

    @property
    def expression(self) -> str:
        """The expression from which `parse_scheme` makes this scheme, such as
        "w4a16(method=gptq)"; `str` may give another one's short name, which is equal.
        """
        return Variant.__str__(self)

    @property
    def definition(self) -> str:
        """The expression that spells out every number format, without the kind of scales."""
        names = (field.name for field in fields(Scheme) if field.name != "scales")
        return Scheme(**{name: getattr(self, name) for name in names}).expression

    def with_scales(self, scales: ScaleKind) -> "Scheme":
        """Return the same scheme with `dynamic` or `static` activation scales.

        Raises:
            WakefulError: scales are to be static, and the scheme has none that can be.
        """
        copied = copy.copy(self)
        copied.scales = scales
        copied.__post_init__()  # which checks it
        return copied

    def __str__(self) -> str:
        """Return the short name of an equal scheme if there is one, else the expression; "static"
        is added for static scales: "moderate", "moderate static".
        """
        dynamic = self.with_scales("dynamic")
        name = dynamic.expression
        if name not in NAMED:  # the scheme may still equal a named one
            equal_names = (short for short, scheme in NAMED.items() if scheme == dynamic)
            name = next(equal_names, name)
        return name if self.scales == "dynamic" else f"{name} {self.scales}"

    def __eq__(self, value: object) -> bool:
        """Tell whether another scheme, of any name, has equal fields."""
        return (
            isinstance(value, Scheme)
            and self.scales == value.scales
            and self.definition == value.definition
        )

    def __hash__(self) -> int:
        return hash((self.definition, self.scales))


class StatedScheme(Scheme):
    """Any number formats: `scheme(weights=absmax(bits=6, per="channel"))`."""

    name = "scheme"
    examples = ("scheme(weights=absmax(bits=6, per='tensor'), inputs=absmax(bits=8, per='token'))",)


class Fine(Scheme):
    """Weights absmax 8-bit per output channel, inputs absmax 8-bit per token."""

    examples = ("fine",)
    weights: Grid | None = Absmax(bits=8, per="channel")
    inputs: Grid | None = Absmax(bits=8, per="token")


class Moderate(Scheme):
    """Weights and inputs absmax 8-bit per tensor."""

    examples = ("moderate",)
    weights: Grid | None = Absmax(bits=8, per="tensor")
    inputs: Grid | None = Absmax(bits=8, per="tensor")


class Coarse(Moderate):
    """Moderate, and outputs absmax 8-bit per tensor."""

    examples = ("coarse", "coarse(scales='static')")
    outputs: Grid | None = Absmax(bits=8, per="tensor")


class W4(Scheme):
    """Weights zeropoint 4-bit per output channel; activations untouched."""

    examples = ("w4",)
    weights: Grid | None = Zeropoint(bits=4, per="channel")


class W4G128(Scheme):
    """Weights zeropoint 4-bit in groups of 128 input channels; activations untouched."""

    examples = ("w4g128",)
    weights: Grid | None = Zeropoint(bits=4, per="channel", group=128)


class W4G128GPTQ(W4G128):
    """The same with GPTQ, by calibration text."""

    name = "w4g128_gptq"
    examples = ("w4g128_gptq",)
    method: Method | None = Gptq()


class SmoothQuant(Moderate):
    """Moderate, with SmoothQuant's division of inputs, by calibration text (its setting O2)."""

    examples = ("smoothquant", "smoothquant(scales='static')")
    method: Method | None = Smooth()


class W8A8(Fine):
    """W8A8 of other tools: the same as fine."""

    examples = ("w8a8",)


class W4A16(Scheme):
    """W4A16 of other tools: weights absmax 4-bit in groups of 128; activations untouched."""

    examples = ("w4a16", "w4a16(method=gptq)")
    weights: Grid | None = Absmax(bits=4, per="channel", group=128)


class W4A8(W4A16):
    """The same with inputs absmax 8-bit per token."""

    examples = ("w4a8",)
    inputs: Grid | None = Absmax(bits=8, per="token")


class W4A4(W4A16):
    """The same with inputs absmax 4-bit per token."""

    examples = ("w4a4", "w4a4(inputs=absmax(bits=4, per='token', clip=0.9))")
    inputs: Grid | None = Absmax(bits=4, per="token")


class FP8(Scheme):
    """Weights fp8 (e4m3) per output channel, inputs fp8 per token; emulated."""

    examples = ("fp8",)
    weights: Grid | None = E4M3(per="channel")
    inputs: Grid | None = E4M3(per="token")


class MXFP4(Scheme):
    """Weights and inputs 4-bit floats in groups of 32 under powers of two; emulated."""

    examples = ("mxfp4", "mxfp4(method=gptq, rotation=32)")
    weights: Grid | None = MxE2M1(per="channel")
    inputs: Grid | None = MxE2M1(per="token")


class NVFP4(Scheme):
    """Weights and inputs 4-bit floats in groups of 16 under fp8 scales; emulated."""

    examples = ("nvfp4", "nvfp4(scales='static')")
    weights: Grid | None = NvE2M1(per="tensor")
    inputs: Grid | None = NvE2M1(per="tensor")


class KV8(Scheme):
    """Keys and values absmax 8-bit per head and token; all else untouched; emulated."""

    examples = ("kv8",)
    cache: Grid | None = Absmax(bits=8, per="token")


class KV4(Scheme):
    """Keys and values absmax 4-bit per head and token; all else untouched; emulated."""

    examples = ("kv4",)
    cache: Grid | None = Absmax(bits=4, per="token")


SCHEMES: dict[str, Scheme] = {variant_name(kind): kind() for kind in (Fine, Moderate, Coarse, W4)}
"""The schemes of From Attention to Activation, section 5.2, by name."""
NAMED: dict[str, Scheme] = {
    variant_name(kind): kind()
    for kind in [*globals().values()]
    if isinstance(kind, type) and issubclass(kind, Scheme) and kind not in (Scheme, StatedScheme)
}
"""All schemes of this file that have a name."""


def parse_scheme(
    expression: str | Scheme, scales: ScaleKind | None = None, *, imports: bool = False
) -> Scheme:
    """Return the scheme that an expression describes, or the given scheme, optionally with another
    kind of scales.

    An expression is a name ("fine"), `scheme(weights=absmax(bits=6, per="channel"))`, or
    `my_module:MyScheme(...)`. Such a module is imported only if `imports` is true: set that only
    for what the user wrote.

    Raises:
        WakefulError: the expression does not parse, or it describes something else than a scheme.
    """
    scheme = expression
    if isinstance(expression, str):
        scheme = build("quantization.schemes", expression, imports=imports)
    if not isinstance(scheme, Scheme):
        raise WakefulError(
            f"{expression} is a number format; a scheme says of which tensor: "
            f"scheme(weights={expression})"
        )
    return scheme if scales is None else scheme.with_scales(scales)
