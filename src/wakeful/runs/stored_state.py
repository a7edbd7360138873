"""What a checkpoint says besides its weights, checked before anything is done by it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wakeful.errors import WakefulError

_ADAM = {"step", "exp_avg", "exp_avg_sq"}
_NEEDED: Mapping[str, set[str]] = {
    "AdamW": _ADAM, "OrthoAdam": _ADAM, "RMSprop": {"step", "square_avg"},
    "SGD": set(), "MuonAdamW": set(),
}  # fmt: skip
"""What each optimizer of ours expects of a parameter's state, once there is any."""
_OWN_SHAPE = "rotation_"
"""How the names of tensors begin whose shape differs from their parameter's."""


def read_state(path: Path) -> dict[str, Any]:
    """Return what a checkpoint's state.json says; every field that is used has its type.

    Raises:
        WakefulError: it cannot be read, or a field is missing or cannot be.
    """
    place = path / "state.json"
    try:
        state = json.loads(place.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise WakefulError(f"{place} cannot be read: {error}") from None
    if not isinstance(state, dict):
        raise WakefulError(f"{place} holds no JSON object")
    progress, packed = state.get("progress"), state.get("optimizer")
    if (
        not isinstance(packed, dict)
        or not isinstance(packed.get("state"), dict)
        or not isinstance(packed.get("param_groups"), list)
    ):
        raise WakefulError(f"{place} holds no state of an optimizer")
    if not isinstance(state.get("kind"), str) or not isinstance(state.get("cut", {}), dict):
        raise WakefulError(f"{place} does not say of which optimizer, or how tensors are cut")
    if not isinstance(progress, dict) or not _tells_how_far(progress):
        raise WakefulError(f"{place} does not say how far the run had come")
    if path.name != f"step-{progress['step']:08d}":
        raise WakefulError(
            f"{path} is the checkpoint of step {progress['step']} by its state.json: give the "
            "folder its own name back"
        )
    return state


def _tells_how_far(progress: Mapping[str, Any]) -> bool:
    seconds = progress.get("seconds")
    if not isinstance(seconds, int | float) or not 0 <= seconds < 2**53:
        return False
    counts = (progress.get("step"), progress.get("tokens"))
    return all(type(count) is int and 0 <= count < 2**63 for count in counts)


def check_optimizer_state(
    place: Path, packed: dict[str, Any], optimizer: torch.optim.Optimizer
) -> None:
    """Raise `WakefulError` unless a packed state is one that this optimizer could have saved.

    Its options are the optimizer's own, but for the learning rate, which every step sets; those
    that it does not name are added.
    """
    fresh = json.loads(json.dumps(optimizer.state_dict()["param_groups"]))
    saved = packed["param_groups"]
    if len(saved) != len(fresh) or not all(isinstance(group, dict) for group in saved):
        raise WakefulError(f"{place} is of an optimizer with other groups of parameters")
    saved[:] = [ours | theirs for ours, theirs in zip(fresh, saved, strict=True)]
    for theirs, ours in zip(json.loads(json.dumps(saved)), fresh, strict=True):
        for key in ours.keys() & theirs.keys() - {"lr", "initial_lr", "rotations"}:
            if theirs[key] != ours[key]:
                raise WakefulError(
                    f"{place} is of an optimizer whose {key} is {theirs[key]!r}, and the "
                    f"configuration's is {ours[key]!r}"
                )
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, state in packed["state"].items():
        if not 0 <= index < len(parameters):
            raise WakefulError(f"{place} has the state of a parameter {index} that is not there")
        _check_entry(f"{place}: parameter {index}", state, parameters[index], type(optimizer))


def _check_entry(
    title: str, state: dict[str, Any], parameter: Tensor, kind: type[torch.optim.Optimizer]
) -> None:
    if kind.__name__ not in _NEEDED:  # a user's own, which alone knows its state
        return
    needed = _NEEDED[kind.__name__]
    if kind.__name__ == "MuonAdamW" and "momentum_buffer" not in state:
        needed = _ADAM
    missing = sorted(needed - state.keys())
    if missing:
        raise WakefulError(f"{title} has no {missing[0]} in the optimizer's state")
    for key, value in state.items():
        if not isinstance(value, Tensor) or key.startswith(_OWN_SHAPE):
            continue
        if value.shape != parameter.shape and not (key == "step" and value.numel() == 1):
            raise WakefulError(
                f"{title}: {key} has shape {tuple(value.shape)}, and the parameter "
                f"{tuple(parameter.shape)}"
            )
