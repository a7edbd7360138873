"""The rotation that was chosen for a model before its layers are quantized, and why."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from wakeful.estimates import (
    Estimate,
    finite_or_none,
    format_estimate,
    format_interval,
    mean_and_error,
)


@dataclass(frozen=True)
class RotationChoice:
    """A rotation, with the measurements that chose it."""

    name: str
    """Name of the rotation, "" for none."""
    format_name: str = ""
    """Format in which the rotations were compared."""
    kl: Mapping[str, list[float]] = field(default_factory=dict)
    """KL from the full-precision model in nats per token, by rotation ("" for none), for each
    sequence of the selection text; empty if the rotation was not chosen by measuring."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Rotations that could not be tried, with the reason."""

    def difference(self, rotation: str) -> Estimate:
        """Return the KL with a rotation minus that without, paired over sequences."""
        pairs = zip(self.kl[rotation], self.kl[""], strict=True)
        return mean_and_error([rotated - plain for rotated, plain in pairs])

    @property
    def description(self) -> str:
        """Words that name the rotation, and the measurements."""
        if not self.kl:
            return f"{self.name}, as asked for"
        num_sequences = len(self.kl[""])
        trials = [
            f"; with {rotation} {format_interval(*self.difference(rotation), num_sequences, '+')}"
            for rotation in self.kl if rotation
        ]  # fmt: skip
        rule = (
            "paired, ± the 95% interval, not corrected for the number of rotations; the one with "
            "the least KL is used if the interval of its change lies below zero"
        )
        if num_sequences == 1:
            rule = "one sequence has no interval, so none is used"
        reasons = "".join(f". {name} not tried: {why}" for name, why in self.refused.items())
        return (
            f"{self.name or 'none'}. KL in {self.format_name} without a rotation "
            f"{format_estimate(mean_and_error(self.kl[''])[0])} nats per token{''.join(trials)} "
            f"(on {num_sequences} calibration sequences, {rule}){reasons}"
        )

    @property
    def summary(self) -> dict[str, Any]:
        """The choice and its measurements for summary.json; a KL that is not finite is None."""
        kl = {
            rotation or "none": [finite_or_none(value) for value in values]
            for rotation, values in self.kl.items()
        }
        return {
            "chosen": self.name or "none", "format": self.format_name, "kl": kl,
            "refused": dict(self.refused),
        }  # fmt: skip
