"""Checkpoints: written whole or not at all, verified when read.

    step-00000200/
      model.safetensors      the decoder's parameters, tied ones once
      optimizer.safetensors  the optimizer's tensors
      state.json             the step, the optimizer's numbers, the tokens and seconds so far
      manifest.json          size and SHA-256 of each of the files above

Nothing here is ever unpickled.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from wakeful.errors import WakefulError
from wakeful.run import disk_errors

_NAME = re.compile(r"step-(\d{8,})")
_FILES = ("model.safetensors", "optimizer.safetensors", "state.json")


def save(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: dict[str, Any],
    *,
    keep: int,
) -> Path:
    """Write the checkpoint of a step, then remove all but the `keep` newest.

    Raises:
        WakefulError: the disk is full; the older checkpoints are untouched.
    """
    final = folder / f"step-{step:08d}"
    part = folder / f".{final.name}.{os.getpid()}.part"
    tensors, numbers = _pack(optimizer)
    kind = type(optimizer).__name__
    state = {"step": step, "progress": progress, "kind": kind, "optimizer": numbers}
    try:
        with disk_errors(final):
            folder.mkdir(parents=True, exist_ok=True)
            _sweep(folder)
            part.mkdir()
            _save_tensors(_unique(model), part / "model.safetensors")
            _save_tensors(tensors, part / "optimizer.safetensors")
            (part / "state.json").write_text(json.dumps(state))
            manifest = {name: _entry(part / name) for name in _FILES}
            (part / "manifest.json").write_text(json.dumps(manifest, indent=2))
            for name in (*_FILES, "manifest.json"):
                _sync(part / name)
            _sync(part)
            if final.exists():
                shutil.rmtree(final)
            part.rename(final)
            _sync(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    prune(folder, keep=keep)
    return final


def prune(folder: Path, *, keep: int) -> None:
    """Remove what killed processes left half written, and all but the `keep` newest."""
    _sweep(folder)
    with disk_errors(folder):
        for old in steps(folder)[:-keep]:
            shutil.rmtree(folder / f"step-{old:08d}")


def _sweep(folder: Path) -> None:
    for left in folder.glob(".step-*.part"):
        shutil.rmtree(left, ignore_errors=True)


def steps(folder: Path) -> list[int]:
    """Return the steps that have a checkpoint, ascending."""
    if not folder.is_dir():
        return []
    matches = (_NAME.fullmatch(entry.name) for entry in folder.iterdir())
    return sorted(int(match[1]) for match in matches if match)


def newest(folder: Path) -> Path:
    """Return the newest checkpoint."""
    found = steps(folder)
    if not found:
        raise WakefulError(f"{folder} holds no checkpoint")
    return folder / f"step-{found[-1]:08d}"


def load_model(path: Path, model: nn.Module) -> None:
    """Fill a model from a checkpoint after verifying the checkpoint's files."""
    verify(path)
    own = _unique(model)
    stored = _load_tensors(path / "model.safetensors")
    if stored.keys() != own.keys():
        odd = sorted(stored.keys() ^ own.keys())
        raise WakefulError(f"{path} is of another model: {odd[0]!r} is in only one of the two")
    with torch.no_grad():
        for name, tensor in own.items():
            if stored[name].shape != tensor.shape:
                raise WakefulError(
                    f"{path} is of another model: {name!r} has shape "
                    f"{tuple(stored[name].shape)} there and {tuple(tensor.shape)} here"
                )
            tensor.copy_(stored[name])


def load_optimizer(path: Path, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Fill an optimizer from a (verified) checkpoint; return the progress stored with it."""
    state = json.loads((path / "state.json").read_text())
    tensors = _load_tensors(path / "optimizer.safetensors")
    if state["kind"] != type(optimizer).__name__:
        raise WakefulError(
            f"{path} was written with the optimizer {state['kind']}, not "
            f"{type(optimizer).__name__}: optimizer.name has changed; start a new run"
        )
    numbers = state["optimizer"]
    entries: dict[int, dict[str, Any]] = {
        int(index): dict(values) for index, values in numbers.pop("state").items()
    }
    for name, tensor in tensors.items():
        index, key = name.split(".", 1)
        entries.setdefault(int(index), {})[key] = tensor
    optimizer.load_state_dict({**numbers, "state": entries})
    return state["progress"]


def verify(path: Path) -> None:
    """Check every file of a checkpoint against its manifest.

    Raises:
        WakefulError: a file is missing, cut short or changed.
    """
    cure = f"delete {path} to resume from the checkpoint before it"
    try:
        manifest = json.loads((path / "manifest.json").read_text("utf-8"))
        expected = {name: (manifest[name]["bytes"], manifest[name]["sha256"]) for name in _FILES}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise WakefulError(f"{path} has no readable manifest.json; {cure}") from None
    for name, (size, digest) in expected.items():
        file = path / name
        if not file.is_file():
            raise WakefulError(f"{file} is missing; {cure}")
        if file.stat().st_size != size:
            raise WakefulError(
                f"{file} has {file.stat().st_size} bytes instead of {size}: it is cut short; {cure}"
            )
        if _digest(file) != digest:
            raise WakefulError(f"{file} is corrupt: its SHA-256 is not the manifest's; {cure}")


def _pack(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    packed = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    others: dict[str, dict[str, Any]] = {}
    for index, entry in packed.pop("state").items():
        for key, value in entry.items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{key}"] = value.detach().contiguous()
            else:
                others.setdefault(str(index), {})[key] = value
    return tensors, {**packed, "state": others}


def _unique(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name, a tied tensor under its first name."""
    seen: set[int] = set()
    unique: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            unique[name] = tensor.detach()
    return unique


def _save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def _load_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise WakefulError(f"{path} cannot be read: {error}") from None


def _entry(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": _digest(path)}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    with contextlib.ExitStack() as stack:
        descriptor = os.open(path, os.O_RDONLY)
        stack.callback(os.close, descriptor)
        os.fsync(descriptor)
