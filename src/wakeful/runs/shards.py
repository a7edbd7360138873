"""Tensors of which each process has a part: which part, and how files of parts are read again.

A tensor is cut along one dimension into as many parts as there are processes, the first ones of
⌈n / processes⌉ rows each, as `torch.chunk` does. The files of all processes together hold it.
"""

import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from wakeful.errors import WakefulError, first_line
from wakeful.paths import check_readable

_PART = re.compile(r"(model|optimizer)-(\d{5})-of-(\d{5})\.safetensors")


class Cut(NamedTuple):
    """The part of a tensor between two places of one dimension."""

    dim: int
    start: int
    stop: int


@dataclass(frozen=True)
class Along:
    """Along which dimension a stored tensor is cut."""

    dim: int

    def __post_init__(self) -> None:
        if self.dim < 0:
            raise WakefulError(f"a tensor is cut along dimension {self.dim}")


def cut_of(tensor: Tensor) -> Cut | None:
    """Return the part of a tensor that this process has; None where it has the whole."""
    if not isinstance(tensor, DTensor):
        return None
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            length, num_parts = tensor.shape[placement.dim], tensor.device_mesh.size(axis)
            rows_per_part = -(-length // num_parts)  # rounded up, as torch.chunk does
            start = tensor.device_mesh.get_local_rank(axis) * rows_per_part
            return Cut(placement.dim, min(start, length), min(start + rows_per_part, length))
    return None


def share_of(tensor: DTensor) -> tuple[int, int, bool]:
    """Return the number of this process's part of a sharded tensor, the number of parts, and
    whether this process writes it: of several processes with equal parts, the first does.
    """
    mesh = tensor.device_mesh
    (axis,) = (n for n, placement in enumerate(tensor.placements) if isinstance(placement, Shard))
    replica_ranks = [mesh.get_local_rank(n) for n in range(mesh.ndim) if n != axis]
    return mesh.get_local_rank(axis), mesh.size(axis), not any(replica_ranks)


def local(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part_name(kind: str, rank: int, size: int) -> str:
    """Return the name of the file with one process's parts."""
    return f"{kind}-{rank:05d}-of-{size:05d}.safetensors"


def is_complete(names: "set[str]", kind: str) -> bool:
    """Tell whether file names hold all tensors of a kind, "model" or "optimizer": one file, or
    every part.
    """
    if f"{kind}.safetensors" in names:
        return True
    matches = [match for name in names if (match := _PART.fullmatch(name)) and match[1] == kind]
    numbers = {int(match[2]) for match in matches}
    totals = {int(match[3]) for match in matches}
    return len(totals) == 1 and numbers == set(range(totals.pop()))


class StoredTensors:
    """The tensors of one checkpoint, "model" or "optimizer", however many files they are in."""

    def __init__(self, folder: Path, kind: str, cut: Mapping[str, Mapping[str, Along]]) -> None:
        """Open the files of `kind` and read the names and whole shapes of their tensors.

        `cut` is state.json's entry of that name: by kind and tensor, the sharded dimension.

        Raises:
            WakefulError: `cut` or a file is damaged.
        """
        full_file = folder / f"{kind}.safetensors"
        paths = (
            [full_file]
            if full_file.is_file()
            else sorted(folder.glob(f"{kind}-*-of-*.safetensors"))
        )
        self.folder = folder
        with self._reading():
            self._cut = {name: along.dim for name, along in cut.get(kind, {}).items()}
            for path in paths:
                check_readable(path)
            self._files = [safe_open(path, framework="pt") for path in paths]
            self._names = [set(file.keys()) for file in self._files]
            self.shapes = {name: self._shape(name) for name in sorted(set().union(*self._names))}

    def read(self, name: str, cut: Cut | None = None) -> Tensor:
        """Return a tensor, or its part `cut`, reading no other parts where possible."""
        with self._reading():
            dim = self._cut.get(name)
            if dim is None:  # stored whole, in the first file
                tensor = self._files[0].get_tensor(name)
            elif cut is not None and cut.dim == dim:
                return self._between(name, dim, cut.start, cut.stop)
            else:
                tensor = self._between(name, dim, 0, self.shapes[name][dim])
            return (
                tensor if cut is None else tensor.narrow(cut.dim, cut.start, cut.stop - cut.start)
            )

    def _between(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """Return the rows [start, stop) along `dim`, joined from the files' parts."""
        pieces: list[Tensor] = []
        offset = 0
        for file in self._files:
            part = file.get_slice(name)
            length = part.get_shape()[dim]
            low, high = max(start - offset, 0), min(stop - offset, length)
            if low < high:
                pieces.append(part[(slice(None),) * dim + (slice(low, high),)])
            offset += length
        if not pieces:  # no rows are asked for: an empty tensor of the right shape and type
            return self._files[0].get_tensor(name).narrow(dim, 0, 0)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)

    def _shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape as a whole: along its cut, the sum of the files' parts."""
        full_shape = self._files[0].get_slice(name).get_shape()
        if (dim := self._cut.get(name)) is not None:
            full_shape[dim] = sum(file.get_slice(name).get_shape()[dim] for file in self._files)
        return tuple(full_shape)

    @contextlib.contextmanager
    def _reading(self):
        """Raise `WakefulError` in place of the errors that damaged files cause."""
        try:
            yield
        except (
            SafetensorError, OSError, LookupError, TypeError, ValueError, AttributeError,
            RuntimeError,
        ) as error:  # fmt: skip
            raise WakefulError(f"{self.folder} cannot be read: {first_line(error)}") from None
