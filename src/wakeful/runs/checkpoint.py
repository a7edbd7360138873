"""Checkpoints: written whole or not at all, verified when read.

    step-00000200/
      model.safetensors      the decoder's parameters, tied ones once
      optimizer.safetensors  the optimizer's tensors
      state.json             the step, the optimizer's numbers, the tokens and seconds so far
      manifest.json          size and SHA-256 of each of the files above

The first process writes them, with the shards of all gathered, so that any number of processes
reads them. Nothing here is ever unpickled.
"""

import contextlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from wakeful.config.model import ModelConfig
from wakeful.config.tables import to_table
from wakeful.digests import file_sha256
from wakeful.errors import WakefulError, first_line
from wakeful.guard import wrap_errors
from wakeful.model.initialize import build_on_meta, check_shapes
from wakeful.optim.saved import from_json, state_to_json
from wakeful.optim.sharding import full_tensor
from wakeful.paths import check_readable, temporary_path_beside
from wakeful.runs.distributed import ALONE, World
from wakeful.runs.run import disk_errors, read_record, save_tensors

_NAME = re.compile(r"step-(\d{8,})")
_FILES = ("model.safetensors", "optimizer.safetensors", "state.json")


@dataclass(frozen=True)
class RunProgress:
    """Steps, tokens and position in the data that a run has reached."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    """Of training alone."""

    def __post_init__(self) -> None:
        if not (0 <= self.step < 2**63 and 0 <= self.tokens < 2**63 and 0 <= self.seconds < 2**53):
            raise WakefulError(f"a checkpoint does not say how far the run had come: {self}")


@dataclass(frozen=True, kw_only=True)
class CheckpointState:
    """state.json: what a checkpoint says besides its tensors."""

    progress: RunProgress
    kind: str
    """The optimizer's class."""
    state_dict: dict[str, Any]
    """The optimizer's `state_dict()` with names in place of tensors (`optim.saved`)."""


@dataclass(frozen=True, kw_only=True)
class ManifestEntry:
    """The entry of a file in manifest.json."""

    bytes: int
    sha256: str


def save_checkpoint(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: RunProgress,
    *,
    keep: int,
    world: World = ALONE,
) -> Path:
    """Write the checkpoint step-NNNNNNNN into `folder`, then remove all but the `keep` newest;
    return the checkpoint's path.

    All processes of `world` must call it; the first one writes, and the others wait for it.

    Raises:
        WakefulError: the disk is full; older checkpoints are kept.
    """
    final = folder / f"step-{progress.step:08d}"
    optimizer_tensors: dict[str, Tensor] = {}  # filled by `state_to_json`
    state_dict = state_to_json(optimizer.state_dict(), optimizer_tensors)
    state = CheckpointState(progress=progress, kind=type(optimizer).__name__, state_dict=state_dict)
    weights = _gather_shards(unique_state(model), world)
    optimizer_tensors = _gather_shards(optimizer_tensors, world)
    if world.first:
        _write_files(final, weights, optimizer_tensors, state)
        prune_checkpoints(folder, keep=keep)
    world.meet()  # writing may take longer than other collectives wait
    return final


def _gather_shards(tensors: dict[str, Tensor], world: World) -> dict[str, Tensor]:
    """Return the tensors by name, with shards joined and moved to the CPU; return {} in all but the
    first process.

    Every process must call it: joining shards is a collective operation.
    """
    gathered: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        full = full_tensor(tensor)
        if world.first:
            gathered[name] = full.cpu() if isinstance(tensor, DTensor) else full
    return gathered


def _write_files(
    final: Path,
    weights: dict[str, Tensor],
    optimizer_tensors: dict[str, Tensor],
    state: CheckpointState,
) -> None:
    """Write a checkpoint's files into a temporary folder, and rename it to `final` once all files
    are on the disk. A checkpoint of the same name is replaced, and temporary folders that killed
    processes left are removed.
    """
    part = temporary_path_beside(final)
    try:
        with disk_errors(final):
            final.parent.mkdir(parents=True, exist_ok=True)
            _remove_incomplete(final.parent)
            part.mkdir()
            save_tensors(weights, part / "model.safetensors")
            save_tensors(optimizer_tensors, part / "optimizer.safetensors")
            (part / "state.json").write_text(json.dumps(to_table(state)))
            manifest = {
                name: ManifestEntry(
                    bytes=(part / name).stat().st_size, sha256=file_sha256(part / name)
                )
                for name in _FILES
            }
            (part / "manifest.json").write_text(json.dumps(to_table(manifest), indent=2))
            paths = [part / name for name in (*_FILES, "manifest.json")]
            for path in [*paths, part]:
                _flush_to_disk(path)
            if final.exists():
                shutil.rmtree(final)
            part.rename(final)
            _flush_to_disk(final.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def prune_checkpoints(folder: Path, *, keep: int) -> None:
    """Remove all checkpoints in a folder but the `keep` newest, and the temporary folders that
    killed processes left.
    """
    _remove_incomplete(folder)
    with disk_errors(folder):
        for old in steps(folder)[:-keep]:
            shutil.rmtree(folder / f"step-{old:08d}")


def _remove_incomplete(folder: Path) -> None:
    for leftover in folder.glob(".step-*.part"):
        shutil.rmtree(leftover, ignore_errors=True)


def steps(folder: Path) -> list[int]:
    """Return the steps that have a checkpoint, ascending."""
    matches = (_NAME.fullmatch(entry.name) for entry in folder.glob("step-*"))
    return sorted(int(match[1]) for match in matches if match)


def newest_checkpoint(folder: Path) -> Path:
    """Return the path of the checkpoint of the highest step in a folder of checkpoints.

    Raises:
        WakefulError: there is none.
    """
    saved_steps = steps(folder)
    if not saved_steps:
        raise WakefulError(f"{folder} holds no checkpoint")
    return folder / f"step-{saved_steps[-1]:08d}"


def load_model(path: Path, model: nn.Module, world: World = ALONE) -> None:
    """Fill a model, or this process's part of it, with the weights of a checkpoint.

    All processes of `world` must call it; the first one verifies the checkpoint's files before.

    Raises:
        WakefulError: a file is damaged, or the model has other parameters or shapes.
    """
    if world.first:
        verify_checkpoint(path)
    world.meet()  # nothing is read before the files are verified
    parameters = unique_state(model)
    file = _StoredTensors(path / "model.safetensors")
    check_shapes(parameters, file.shapes, path)
    with torch.no_grad():
        for name, tensor in parameters.items():
            tensor.copy_(file.read(name, tensor))


def check_description(path: Path, config: ModelConfig) -> None:
    """Raise `WakefulError` unless a checkpoint's tensors have the names and shapes of the
    configured model.

    This is fast: only the files' headers are read, and the model is built on the meta device. If
    they differ, the files are verified too.
    """
    verify_checkpoint(path, digests=False)
    try:
        shapes = _StoredTensors(path / "model.safetensors").shapes
        parameters = unique_state(build_on_meta(config, len(shapes), path))
        check_shapes(parameters, shapes, path)
    except WakefulError:
        verify_checkpoint(path)  # a damaged file is the better explanation: it raises here
        raise


def load_optimizer(path: Path, optimizer: torch.optim.Optimizer) -> RunProgress:
    """Fill an optimizer from a checkpoint, whose files were verified before (`load_model`); return
    the progress stored with it.

    Raises:
        WakefulError: the checkpoint is of another step than its folder's name, or of an optimizer
            with another class, other parameters or other groups.
    """
    state = read_record(CheckpointState, path / "state.json")
    if path.name != f"step-{state.progress.step:08d}":
        raise WakefulError(
            f"{path} is the checkpoint of step {state.progress.step} by its state.json: give the "
            "folder its own name back"
        )
    if state.kind != type(optimizer).__name__:
        raise WakefulError(
            f"{path} was written with the optimizer {state.kind}, not "
            f"{type(optimizer).__name__}: optimizer.name has changed; start a new run"
        )
    file = _StoredTensors(path / "optimizer.safetensors")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def read(name: str) -> Tensor:
        """Return the tensor of this name.

        A tensor of a parameter's state, such as "state.3.exp_avg", is sharded over processes as the
        parameter with index 3 is. A tensor outside the state is moved to the parameters' device.
        """
        part, index, *_ = [*name.split("."), ""]
        owner = parameters[int(index)] if part == "state" and index.isdecimal() else parameters[0]
        # Clone it: in its file a tensor may begin at any byte, and the last bit of a product
        # depends on how its memory is aligned.
        tensor = file.read(name, owner).clone()
        return tensor if part == "state" else tensor.to(owner.device)

    try:
        saved = from_json(state.state_dict, read)
        saved["param_groups"] = _merge_groups(saved["param_groups"], optimizer)
        optimizer.load_state_dict(saved)
        # `load_state_dict` casts tensors to their parameter's dtype, and copies of strings come out
        # changed: put the saved values back.
        for index, entry in saved["state"].items():
            loaded = optimizer.state[parameters[index] if isinstance(index, int) else index]
            for key, value in entry.items():
                if not isinstance(value, Tensor):
                    loaded[key] = value
                elif loaded[key].dtype != value.dtype:
                    loaded[key] = value.to(loaded[key].device)
    except WakefulError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise WakefulError(
            f"{path} holds no state that {state.kind} can go on from: {first_line(error)}"
        ) from None
    return state.progress


def _merge_groups(
    saved: list[dict[str, Any]], optimizer: torch.optim.Optimizer
) -> list[dict[str, Any]]:
    """Return the optimizer's groups of parameters, updated with the entries of `saved` that are
    state; other entries, such as the learning rate, keep the optimizer's own values.

    For torch's optimizers and ours, the state is the names and rotations, which `load_state_dict`
    compares. For an optimizer of another package, every entry is: it may be a count of steps.

    Raises:
        WakefulError: the groups have other numbers of parameters.
    """
    own_groups = optimizer.state_dict()["param_groups"]
    if [len(group["params"]) for group in saved] != [len(group["params"]) for group in own_groups]:
        raise WakefulError("the checkpoint is of an optimizer with other groups of parameters")
    package = type(optimizer).__module__.split(".")[0]
    if package not in ("torch", "wakeful"):
        return [own | group for own, group in zip(own_groups, saved, strict=True)]
    state_keys = ("rotations", "param_names")
    return [
        own | {key: value for key, value in group.items() if key in state_keys}
        for own, group in zip(own_groups, saved, strict=True)
    ]


class _StoredTensors:
    """The tensors of one safetensors file of a checkpoint."""

    def __init__(self, path: Path) -> None:
        """Open the file and read the tensors' shapes.

        Raises:
            WakefulError: it is missing or damaged.
        """
        self.path = path
        with wrap_errors(f"{path} cannot be read"):
            check_readable(path)
            self._file = safe_open(path, framework="pt")
            names: list[str] = self._file.keys()
            self.shapes = {name: tuple(self._file.get_slice(name).get_shape()) for name in names}

    def read(self, name: str, owner: Tensor) -> Tensor:
        """Return the tensor of this name. If `owner` is sharded and has the tensor's shape, return
        this process's shard, laid out as that of `owner`.
        """
        with wrap_errors(f"{self.path} cannot be read"):
            tensor = self._file.get_tensor(name)
        if isinstance(owner, DTensor) and owner.shape == tensor.shape:
            # Without a source rank nothing is sent: every process takes its part of the file.
            return distribute_tensor(
                tensor, owner.device_mesh, owner.placements, src_data_rank=None
            )
        return tensor


def verify_checkpoint(path: Path, *, digests: bool = True) -> None:
    """Check a checkpoint's files against its manifest; without `digests` only their sizes.

    Raises:
        WakefulError: a file is missing, cut short or changed.
    """
    cure = f"delete {path} to resume from the checkpoint before it"
    manifest: dict[str, ManifestEntry] = {}
    with contextlib.suppress(WakefulError):
        manifest = read_record(dict[str, ManifestEntry], path / "manifest.json")
    if manifest.keys() != {*_FILES}:
        raise WakefulError(f"{path} has no readable manifest.json; {cure}")
    for name, entry in manifest.items():
        file = path / name
        if not file.is_file():
            raise WakefulError(f"{file} is missing; {cure}")
        if file.stat().st_size != entry.bytes:
            raise WakefulError(
                f"{file} has {file.stat().st_size} bytes instead of {entry.bytes}: it is cut "
                f"short; {cure}"
            )
        if digests and file_sha256(file) != entry.sha256:
            raise WakefulError(f"{file} is corrupt: its SHA-256 is not the manifest's; {cure}")


def unique_state(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name, a tied tensor under its first name."""
    entry_by_id: dict[int, tuple[str, Tensor]] = {}
    # With keep_vars a tied tensor is one object under each of its names.
    for name, tensor in model.state_dict(keep_vars=True).items():
        entry_by_id.setdefault(id(tensor), (name, tensor))
    return {name: tensor.detach() for name, tensor in entry_by_id.values()}


def _flush_to_disk(path: Path) -> None:
    """Wait until a file's bytes, or a folder's entries, are on the disk."""
    with contextlib.ExitStack() as stack:
        descriptor = os.open(path, os.O_RDONLY)
        stack.callback(os.close, descriptor)
        os.fsync(descriptor)
