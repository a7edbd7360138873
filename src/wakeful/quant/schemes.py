"""Schemes: which grid for which tensor of a linear layer, and who shares a scale.

fine       weights absmax 8-bit per output channel, inputs absmax 8-bit per token
moderate   weights and inputs absmax 8-bit per tensor
coarse     moderate, and outputs absmax 8-bit per tensor
w4         weights zeropoint 4-bit per output channel; activations untouched

(From Attention to Activation, section 5.2.) Any other is written as an expression:
`weights=absmax6/channel,inputs=absmax8/token`.
"""

import dataclasses
import re
from dataclasses import dataclass
from typing import Literal, get_args

from wakeful.errors import WakefulError
from wakeful.quant.grids import Absmax, Grid, Zeropoint
from wakeful.variants import nearest

Per = Literal["channel", "token", "tensor"]
ScaleKind = Literal["dynamic", "static"]
_ALLOWED: dict[str, tuple[Per, ...]] = {
    "weights": ("channel", "tensor"),
    "inputs": ("token", "tensor"),
    "outputs": ("token", "tensor"),
}
_GRIDS: dict[str, type[Absmax | Zeropoint]] = {"absmax": Absmax, "zeropoint": Zeropoint}


@dataclass(frozen=True)
class Rule:
    """A grid and what shares one scale: an output channel, a token or the whole tensor."""

    grid: Grid
    per: Per

    def __str__(self) -> str:
        return f"{self.grid}/{self.per}"


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """What a quantized linear layer does: ŷ of x̂ Ŵᵀ + b; None leaves a tensor as it is.

    Activation scales are `dynamic` (of the tensor at hand) or `static` (of calibration text).
    """

    weights: Rule
    inputs: Rule | None = None
    outputs: Rule | None = None
    scales: ScaleKind = "dynamic"

    def __post_init__(self) -> None:
        for part, rule in (("weights", self.weights), *self.activations):
            if rule.per not in _ALLOWED[part]:
                raise WakefulError(
                    f"{part} share a scale per {' or '.join(_ALLOWED[part])}, not per {rule.per}"
                )
        for part, rule in self.activations:
            if not isinstance(rule.grid, Absmax):
                raise WakefulError(f"{part} are quantized by absmax, not by {rule.grid}")
        if self.scales not in get_args(ScaleKind):
            raise WakefulError(f"scales must be dynamic or static, got {self.scales!r}")
        if self.scales == "static" and not self.can_be_static:
            raise WakefulError(
                f"{self.name} has nothing to calibrate: only per-tensor activation scales "
                "can be static, so use it with dynamic ones"
            )

    @property
    def activations(self) -> list[tuple[str, Rule]]:
        """The rules of inputs and outputs, where there are any."""
        rules = (("inputs", self.inputs), ("outputs", self.outputs))
        return [(part, rule) for part, rule in rules if rule is not None]

    @property
    def can_be_static(self) -> bool:
        """Whether it has activation scales and all of them are per tensor."""
        return bool(self.activations) and all(rule.per == "tensor" for _, rule in self.activations)

    @property
    def definition(self) -> str:
        """The expression that `parse_scheme` reads back, without the kind of scales."""
        return ",".join(
            f"{part}={rule}" for part, rule in (("weights", self.weights), *self.activations)
        )

    @property
    def name(self) -> str:
        """The scheme's short name where it has one, else its expression."""
        plain = dataclasses.replace(self, scales="dynamic")
        for name, scheme in SCHEMES.items():
            if scheme == plain:
                return name
        return self.definition

    def with_scales(self, scales: ScaleKind) -> "Scheme":
        """Return the same scheme with `dynamic` or `static` activation scales."""
        return dataclasses.replace(self, scales=scales)

    def __str__(self) -> str:
        return self.name if self.scales == "dynamic" else f"{self.name} {self.scales}"


_CHANNEL, _TOKEN, _TENSOR = (Rule(Absmax(8), per) for per in get_args(Per))
SCHEMES = {
    "fine": Scheme(weights=_CHANNEL, inputs=_TOKEN),
    "moderate": Scheme(weights=_TENSOR, inputs=_TENSOR),
    "coarse": Scheme(weights=_TENSOR, inputs=_TENSOR, outputs=_TENSOR),
    "w4": Scheme(weights=Rule(Zeropoint(4), "channel")),
}


def parse_scheme(text: str, scales: ScaleKind = "dynamic") -> Scheme:
    """Return the scheme of a name, or of `part=GRIDbits/per` joined by commas.

    Raises:
        WakefulError: it is neither, or what it says makes no scheme.
    """
    if text in SCHEMES:
        return SCHEMES[text].with_scales(scales)
    if "=" not in text:
        raise WakefulError(
            f"unknown scheme {text!r}{nearest(text, list(SCHEMES))}; there are "
            f"{', '.join(SCHEMES)}, and expressions such as "
            "weights=absmax8/channel,inputs=absmax8/token"
        )
    rules: dict[str, Rule] = {}
    for item in text.split(","):
        found = re.fullmatch(r"\s*(weights|inputs|outputs)=([a-z]+)(\d)/([a-z]+)\s*", item)
        if found is None or found[2] not in _GRIDS or found[4] not in get_args(Per):
            raise WakefulError(
                f"scheme part {item.strip()!r} is not PART=GRIDbits/PER with PART weights, inputs "
                "or outputs, GRID absmax or zeropoint, bits 2 to 8, PER channel, token or tensor"
            )
        if found[1] in rules:
            raise WakefulError(f"scheme {text!r} says {found[1]} twice")
        per = next(per for per in get_args(Per) if per == found[4])
        rules[found[1]] = Rule(_GRIDS[found[2]](int(found[3])), per)
    if "weights" not in rules:
        raise WakefulError(f"scheme {text!r} says nothing of weights")
    return Scheme(**rules, scales=scales)
