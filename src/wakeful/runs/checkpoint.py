"""Checkpoints: written whole or not at all, verified when read.

    step-00000200/
      model.safetensors      the decoder's parameters, tied ones once
      optimizer.safetensors  the optimizer's tensors
      state.json             the step, the optimizer's numbers, the tokens and seconds so far
      manifest.json          size and SHA-256 of each of the files above

Where each of K processes has a part of a tensor, each writes its own: `model-00000-of-0000K
.safetensors` and so on, and state.json says along which dimension a tensor is cut. Any number of
processes reads either form. Nothing here is ever unpickled.
"""

import contextlib
import functools
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from wakeful.config.model import ModelConfig
from wakeful.config.tables import to_table
from wakeful.digests import file_sha256
from wakeful.errors import WakefulError, first_line
from wakeful.model.initialize import build_on_meta, check_shapes
from wakeful.optim.saved import (
    BUILT,
    CHANGING,
    from_json,
    keeps_options,
    missing_state,
    options_of_group,
    restore_type,
    to_json,
)
from wakeful.optim.schedule_free import evaluation_weights, restore_weights
from wakeful.paths import temporary_path_beside
from wakeful.runs import shards
from wakeful.runs.distributed import ALONE, World
from wakeful.runs.run import disk_errors, read_record, save_tensors

_NAME = re.compile(r"step-(\d{8,})")
_FILE = re.compile(r"(model|optimizer)(-\d{5}-of-\d{5})?\.safetensors|state\.json")
_OWN_SHAPE = "rotation_"
"""Prefix of tensors whose shape differs from their parameter's."""


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
class Numbers:
    """The parts of an optimizer's state but tensors, and where these belong (`optim.saved`)."""

    state: dict[str, dict[str, Any]]
    """By the parameter's number; a tensor called "3.exp_avg" is an entry of the third's too."""
    param_groups: tuple[dict[str, Any], ...]
    others: dict[str, Any] = field(default_factory=dict)
    """The rest of the optimizer's state_dict, and under "state" its state of no parameter."""
    trained: tuple[Any, ...] = ()
    """The training weights, where the model has separate evaluation weights."""


@dataclass(frozen=True, kw_only=True)
class CheckpointState:
    """state.json: what a checkpoint says besides its tensors."""

    progress: RunProgress
    kind: str
    """The optimizer's class."""
    optimizer: Numbers
    cut: dict[str, dict[str, shards.Along]]
    """Cuts of the tensors of "model" and "optimizer" that are stored in parts."""


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
    full: bool = False,
) -> Path:
    """Write the checkpoint step-NNNNNNNN, then remove all but the `keep` newest; return its path.

    All processes of `world` call it. With `full` the first process writes the gathered weights to
    one model.safetensors, which other tools can read; otherwise each writes its shards.

    Raises:
        WakefulError: the disk is full; older checkpoints are kept.
    """
    final = folder / f"step-{progress.step:08d}"
    # The first process's temporary folder, which is renamed when all files are in it.
    part = folder / world.gather(temporary_path_beside(final).name)[0]
    packed = optimizer.state_dict()
    try:
        # Some optimizers evaluate other weights than they train: the files hold those, and
        # `trained` has the training weights.
        with disk_errors(final), evaluation_weights(optimizer) as trained:
            weights = unique_state(model)
            tensors, numbers = _pack_optimizer(packed, trained)
            cut = {"model": {} if full else _cuts(weights), "optimizer": _cuts(tensors)}
            kind = type(optimizer).__name__
            state = CheckpointState(progress=progress, kind=kind, optimizer=numbers, cut=cut)
            if world.first:
                folder.mkdir(parents=True, exist_ok=True)
                _sweep(folder)
                part.mkdir()
            world.gather("there is a folder")  # no process writes before
            manifest = {
                **_write_tensors(weights, part, "model", cut["model"], world),
                **_write_tensors(tensors, part, "optimizer", cut["optimizer"], world),
            }
            if world.first:
                (part / "state.json").write_text(json.dumps(to_table(state)))
                manifest["state.json"] = _entry(part / "state.json")
            written = world.gather(manifest)
            if world.first:
                manifest = {name: entry for entries in written for name, entry in entries.items()}
                (part / "manifest.json").write_text(json.dumps(manifest, indent=2))
                # All is on the disk before the folder gets its name.
                for name in ("state.json", "manifest.json"):
                    _sync(part / name)
                _sync(part)
                if final.exists():
                    shutil.rmtree(final)
                part.rename(final)
                _sync(folder)
    finally:
        if world.first:
            shutil.rmtree(part, ignore_errors=True)
    if world.first:
        prune_checkpoints(folder, keep=keep)
    return final


def _write_tensors(
    tensors: dict[str, Tensor], folder: Path, kind: str, cut: dict[str, shards.Along], world: World
) -> dict[str, dict[str, Any]]:
    """Write this process's safetensors file; return its entry in the manifest, {} for no file.

    `kind` is "model" or "optimizer". With tensors in `cut`, whose names and sharded dimensions it
    holds, each shard of them is written by a process that has it, and the other tensors by the
    first process. Otherwise the first process alone writes all tensors, gathered from all.
    """
    name, writes = f"{kind}.safetensors", world.first
    if cut:
        sharded = cast(DTensor, tensors[next(iter(cut))])  # all are divided over the same processes
        number, count, writes = shards.share_of(sharded)
        name = shards.part_name(kind, number, count)
        tensors = {key: shards.local(t) for key, t in tensors.items() if world.first or key in cut}
    elif any(isinstance(tensor, DTensor) for tensor in tensors.values()):
        tensors = {key: _gather_tensor(tensor, keep=world.first) for key, tensor in tensors.items()}
    if not writes:
        return {}
    save_tensors(tensors, folder / name)
    _sync(folder / name)
    return {name: _entry(folder / name)}


def _gather_tensor(tensor: Tensor, *, keep: bool) -> Tensor:
    """Return the whole tensor on the CPU, or an empty one without `keep`.

    A collective operation: every process must call it.
    """
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.cpu() if keep else full.new_empty(0)


def _cuts(tensors: dict[str, Tensor]) -> dict[str, shards.Along]:
    """Return the sharded dimension of each sharded tensor, by name."""
    cuts = {name: shards.cut_of(tensor) for name, tensor in tensors.items()}
    return {name: shards.Along(cut.dim) for name, cut in cuts.items() if cut is not None}


def prune_checkpoints(folder: Path, *, keep: int) -> None:
    """Remove files that killed processes left incomplete, and all but the `keep` newest."""
    _sweep(folder)
    with disk_errors(folder):
        for old in steps(folder)[:-keep]:
            shutil.rmtree(folder / f"step-{old:08d}")


def _sweep(folder: Path) -> None:
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
    """Fill a model, or this process's part of it, after verifying the checkpoint's files.

    Raises:
        WakefulError: a file is damaged, or the model has other parameters or shapes.
    """
    verify_checkpoint(path, world)
    world.gather("the files are whole")  # each process has verified some of them
    parameters = unique_state(model)
    stored = shards.StoredTensors(path, "model", read_state(path).cut)
    check_shapes(parameters, stored.shapes, path)
    with torch.no_grad():
        for name, tensor in parameters.items():
            shards.local(tensor).copy_(stored.read(name, shards.cut_of(tensor)))


def check_description(path: Path, config: ModelConfig) -> None:
    """Raise `WakefulError` unless a checkpoint's shapes are those of the configuration.

    Only the files' headers are read, and the model is built on the meta device.
    """
    verify_checkpoint(path, digests=False)
    try:
        stored = shards.StoredTensors(path, "model", read_state(path).cut)
        parameters = unique_state(build_on_meta(config, len(stored.shapes), path))
        check_shapes(parameters, stored.shapes, path)
    except WakefulError:
        verify_checkpoint(path)  # a file that has changed is the better explanation
        raise


def read_state(path: Path) -> CheckpointState:
    """Return a checkpoint's state.json.

    Raises:
        WakefulError: it cannot be read, or a field is missing or cannot be.
    """
    state = read_record(CheckpointState, path / "state.json")
    if path.name != f"step-{state.progress.step:08d}":
        raise WakefulError(
            f"{path} is the checkpoint of step {state.progress.step} by its state.json: give the "
            "folder its own name back"
        )
    return state


def load_optimizer(path: Path, optimizer: torch.optim.Optimizer) -> RunProgress:
    """Fill an optimizer from a (verified) checkpoint; return the progress stored with it.

    Raises:
        WakefulError: the checkpoint is of another optimizer, of other options or of other
            parameters, or lacks a part of the state.
    """
    state = read_state(path)
    if state.kind != type(optimizer).__name__:
        raise WakefulError(
            f"{path} was written with the optimizer {state.kind}, not "
            f"{type(optimizer).__name__}: optimizer.name has changed; start a new run"
        )
    stored = shards.StoredTensors(path, "optimizer", state.cut)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    packed_state = state.optimizer
    read_names: set[str] = set()

    def read(owner: Tensor, name: str, moved: bool = False) -> Tensor:
        """Return the stored tensor of the parameter `owner`, sharded like it if of its shape."""
        read_names.add(name)
        # Cloned: in its file a tensor may begin at any byte, and the last bit of a product depends
        # on how its memory is aligned.
        if isinstance(owner, DTensor) and owner.shape == stored.shapes[name]:
            return _distribute_like(owner, stored.read(name, shards.cut_of(owner)).clone())
        tensor = stored.read(name).clone()
        return tensor.to(owner.device) if moved else tensor

    def restore(value: Any, owner: Tensor, *, moved: bool = False) -> Any:
        """Return a value from its JSON; `moved` moves its tensors to the device of `owner`."""
        return from_json(value, functools.partial(read, owner, moved=moved))

    try:
        entries = {
            int(index): restore(packed_state.state[index], parameters[int(index)])
            for index in packed_state.state
        }
        groups = _restore_groups(path, packed_state.param_groups, optimizer, restore)
        constants = {
            key: restore(value, parameters[0]) for key, value in packed_state.others.items()
        }
        trained = [
            restore(value, owner)
            for value, owner in zip(packed_state.trained, parameters, strict=False)
        ]
        # JSON does not mention tensors that are entries of a parameter's state: "3.exp_avg".
        for name in stored.shapes.keys() - read_names:
            index, key = name.split(".", 1)
            entries.setdefault(int(index), {})[key] = read(parameters[int(index)], name)
        for index, entry in entries.items():
            if not 0 <= index < len(parameters):
                raise WakefulError(f"{path} has the state of a parameter {index} that is not there")
            _check_entry(f"{path}: parameter {index}", entry, parameters[index], type(optimizer))
        everything = {**entries, **constants.pop("state", {})}
        optimizer.load_state_dict({"state": everything, "param_groups": groups, **constants})
        # load_state_dict has given tensors their parameter's dtype: give them their own back.
        for index, entry in entries.items():
            live = optimizer.state[parameters[index]]
            live.update(
                {key: restore_type(live[key], entry[key]) for key in live.keys() & entry.keys()}
            )
        restore_weights(optimizer, trained)
    except WakefulError:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:
        raise WakefulError(
            f"{path} holds no state that {state.kind} can go on from: {first_line(error)}"
        ) from None
    return state.progress


def _restore_groups(
    path: Path,
    saved: tuple[dict[str, Any], ...],
    optimizer: torch.optim.Optimizer,
    restore: Callable[..., Any],
) -> list[dict[str, Any]]:
    """Return the optimizer's groups of parameters with the saved state, if their options agree.

    An entry of a group is either an option, fixed when the optimizer is built, or state, which
    changes. In another package's optimizer every entry that differs from its value when built is
    state; what it was built with is the entry `BUILT`. In torch's and ours, and in older
    checkpoints without that entry, only those in `CHANGING` are state, such as the learning rate.

    `restore(value, parameter, moved=True)` returns an entry's value from its JSON, with tensors on
    the parameter's device.

    Raises:
        WakefulError: the number of groups or an option differs.
    """
    never_changes_options = keeps_options(type(optimizer))
    fresh = optimizer.state_dict()["param_groups"]
    if len(saved) != len(fresh):
        raise WakefulError(f"{path} is of an optimizer with other groups of parameters")
    groups: list[dict[str, Any]] = []
    for saved_group, fresh_group, live in zip(saved, fresh, optimizer.param_groups, strict=True):
        options = saved_group
        if not never_changes_options:
            options = saved_group.get(BUILT, saved_group)
        options_here = fresh_group.get(BUILT) or options_of_group(fresh_group)
        for key in options_here.keys() & options.keys() - CHANGING:
            if options[key] != options_here[key]:
                raise WakefulError(
                    f"{path} is of an optimizer whose {key} is {options[key]!r}, and the "
                    f"configuration's is {options_here[key]!r}"
                )
        # The saved state: entries that may change, are no option here, or have changed.
        changed = {
            key: restore(value, live["params"][0], moved=True)
            for key, value in saved_group.items()
            if key != BUILT
            and (key in CHANGING or key not in options_here or value != options.get(key))
        }
        groups.append(fresh_group | changed)
    return groups


def _check_entry(title: str, state: dict[str, Any], parameter: Tensor, kind: type) -> None:
    """Raise `WakefulError` if a parameter's state lacks an entry or has one of a wrong shape.

    `title` names the parameter in errors; `kind` is the optimizer's class, of which a class that is
    not known here is not checked.
    """
    missing = missing_state(kind, state)
    if missing is None:
        return
    if missing:
        raise WakefulError(f"{title} has no {missing[0]} in the optimizer's state")
    for key, value in state.items():
        if not isinstance(value, Tensor) or key.startswith(_OWN_SHAPE):
            continue  # not a tensor, or not of the parameter's shape
        is_step_count = key == "step" and value.numel() == 1
        if value.shape != parameter.shape and not is_step_count:
            raise WakefulError(
                f"{title}: {key} has shape {tuple(value.shape)}, and the parameter "
                f"{tuple(parameter.shape)}"
            )


def _distribute_like(owner: DTensor, part: Tensor) -> DTensor:
    """Return a DTensor of this process's `part`, laid out over processes as `owner` is."""
    return DTensor.from_local(
        part.to(owner.device), owner.device_mesh, owner.placements, run_check=False,
        shape=owner.shape, stride=owner.stride(),
    )  # fmt: skip


def verify_checkpoint(path: Path, world: World = ALONE, *, digests: bool = True) -> None:
    """Check a checkpoint's files against its manifest, divided among the processes.

    Without `digests` only the files' sizes are checked.

    Raises:
        WakefulError: a file is missing, cut short or changed.
    """
    cure = f"delete {path} to resume from the checkpoint before it"
    manifest: dict[str, ManifestEntry] = {}
    with contextlib.suppress(WakefulError):
        manifest = read_record(dict[str, ManifestEntry], path / "manifest.json")
    is_whole = "state.json" in manifest and all(
        shards.is_complete(set(manifest), kind) for kind in ("model", "optimizer")
    )
    if not is_whole or not all(_FILE.fullmatch(name) for name in manifest):
        raise WakefulError(f"{path} has no readable manifest.json; {cure}")
    for number, (name, entry) in enumerate(manifest.items()):
        file = path / name
        if not file.is_file():
            raise WakefulError(f"{file} is missing; {cure}")
        if file.stat().st_size != entry.bytes:
            raise WakefulError(
                f"{file} has {file.stat().st_size} bytes instead of {entry.bytes}: it is cut "
                f"short; {cure}"
            )
        if digests and number % world.size == world.rank and file_sha256(file) != entry.sha256:
            raise WakefulError(f"{file} is corrupt: its SHA-256 is not the manifest's; {cure}")


def _pack_optimizer(
    packed: dict[str, Any], trained: list[Tensor]
) -> tuple[dict[str, Tensor], Numbers]:
    """Return an optimizer's state_dict and trained weights as tensors by name and as JSON.

    The tensors are called "3.exp_avg" (of parameter 3), "groups...", "others..." or "trained...".
    """
    tensors: dict[str, Tensor] = {}
    entries: dict[str, dict[str, Any]] = {}
    own_state: dict[str, Any] = {}  # of no parameter: its keys are not parameters' numbers
    for index, entry in packed["state"].items():
        if not isinstance(index, int):
            own_state[index] = entry
            continue
        for key, value in entry.items():
            json_value = to_json(value, f"{index}.{key}", tensors)
            # A tensor's name says all of it, unless its dimensions have another order in memory.
            if not isinstance(value, Tensor) or json_value["order"]:
                entries.setdefault(str(index), {})[key] = json_value
    groups = [
        {
            # An option of another package's optimizer may be a value that no file can hold.
            key: to_json(
                value, f"groups.{number}.{key}", tensors, option=key in group.get(BUILT, ())
            )
            for key, value in group.items()
        }
        for number, group in enumerate(packed["param_groups"])
    ]
    others = {key: value for key, value in packed.items() if key != "param_groups"}
    others = to_json({**others, "state": own_state}, "others", tensors)
    weights = [to_json(weight, f"trained.{n}", tensors) for n, weight in enumerate(trained)]
    numbers = Numbers(
        state=entries, param_groups=tuple(groups), others=others, trained=tuple(weights)
    )
    return _copy_shared_tensors(tensors), numbers


def _copy_shared_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors, copied where they share memory with an earlier one, which safetensors
    refuses to write.
    """
    storages: set[int] = set()
    tensors_alone: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        address = shards.local(tensor).untyped_storage().data_ptr()
        tensors_alone[name] = tensor.clone() if address in storages else tensor
        storages.add(address)
    return tensors_alone


def unique_state(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name, a tied tensor under its first name."""
    first: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        first.setdefault(id(tensor), (name, tensor))
    return {name: tensor.detach() for name, tensor in first.values()}


def _entry(path: Path) -> dict[str, Any]:
    return to_table(ManifestEntry(bytes=path.stat().st_size, sha256=file_sha256(path)))


def _sync(path: Path) -> None:
    with contextlib.ExitStack() as stack:
        descriptor = os.open(path, os.O_RDONLY)
        stack.callback(os.close, descriptor)
        os.fsync(descriptor)
