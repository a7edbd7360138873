"""The tensors of a Transformers folder, read one at a time from its memory-mapped files."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from wakeful.errors import WakefulError

ONE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"\w[\w.-]*\.safetensors")


class Shards(Mapping[str, Tensor]):
    """Tensors by name. One is read when it is asked for; on the CPU its pages are the file's own,
    copied only where they are written to.
    """

    def __init__(self, folder: Path) -> None:
        """Open every file of the folder.

        Raises:
            WakefulError: a file is missing or damaged, or there are no safetensors files.
        """
        self.folder = folder
        self._files = ExitStack()
        self._places: dict[str, safe_open] = {}
        self.num_bytes = 0
        """Bytes of all the files."""
        for path in _paths(folder):
            try:
                file = self._files.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise WakefulError(f"{path} is not a whole safetensors file: {error}") from None
            self.num_bytes += path.stat().st_size
            for name in file.keys():  # noqa: SIM118
                self._places[name] = file

    def __enter__(self) -> "Shards":
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def __getitem__(self, name: str) -> Tensor:
        return self._places[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _paths(folder: Path) -> list[Path]:
    if (folder / ONE).is_file():
        return [folder / ONE]
    index = folder / INDEX
    if not index.is_file():
        pickled = sorted(path.name for path in folder.glob("*.bin"))
        found = f": it has {pickled[0]}, and pickled weights are never read" if pickled else ""
        raise WakefulError(f"{folder} has no {ONE} and no {INDEX}{found}")
    try:
        files = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        paths = [folder / file for file in files]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise WakefulError(f"{index} is not an index of shards; fetch it again") from None
    for file, path in zip(files, paths, strict=True):
        if not _SHARD.fullmatch(file):
            raise WakefulError(f"{index} names {file!r}, which is not a shard beside it")
        if not path.is_file():
            raise WakefulError(f"the shard {path} is missing; fetch it again")
    return paths


def read_floats(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """Return a tensor of numbers.

    Raises:
        WakefulError: it is stored in integers: the checkpoint is quantized.
    """
    tensor = tensors[name]
    if not tensor.is_floating_point() or tensor.dtype.itemsize < torch.float16.itemsize:
        raise WakefulError(
            f"the tensor {name} is stored as {tensor.dtype}: quantized checkpoints cannot be read"
        )
    return tensor
