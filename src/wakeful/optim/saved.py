"""What a saved state must hold of each parameter, by the optimizer's class."""

from collections.abc import Mapping

_ADAM = {"step", "exp_avg", "exp_avg_sq"}
_NEEDED: Mapping[str, set[str]] = {
    "AdamW": _ADAM, "OrthoAdam": _ADAM, "RMSprop": {"step", "square_avg"},
    "SGD": set(), "MuonAdamW": set(),
}  # fmt: skip


def missing(kind: str, state: Mapping[str, object]) -> list[str] | None:
    """Return what a parameter's state lacks for an optimizer of the class `kind`, sorted.

    None for a class that is not listed, which alone knows its state.
    """
    if kind not in _NEEDED:
        return None
    needed = _NEEDED[kind]
    if kind == "MuonAdamW" and "momentum_buffer" not in state:
        needed = _ADAM
    return sorted(needed - state.keys())
