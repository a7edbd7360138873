"""Several processes as one run: who each is, what they tell each other, how they end together.

`torchrun` starts the processes and says in the environment who each is; a process started without
it is alone, and nothing here does anything. Control messages and CPU tensors go over gloo, tensors
of a GPU over NCCL.
"""

import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from wakeful.errors import WakefulError

T = TypeVar("T")

SILENCE = timedelta(minutes=10)
"""How long a process waits for the others in a collective before it takes them for lost."""
_WORK_OF_ONE = timedelta(days=2)
"""How long the others wait while one process prepares data."""
_LET_IT_SPEAK = 2.0
"""Seconds before a silent process ends: torchrun ends all the others when one does."""
_DEAD_PEER = ("gloo", "Connection closed", "Connection reset", "Broken pipe", "NCCL")
"""What torch says, in errors of no special type, when another process does not answer."""


@dataclass(frozen=True)
class World:
    """The processes of a run, seen from one of them: `rank` of `size`, `local_rank` of `local_size`
    on its machine.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    store: dist.Store | None = None

    @property
    def first(self) -> bool:
        """Whether this is the process that writes the run directory and speaks."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the tensor summed over processes, which all must call it."""
        if self.size > 1:
            tensor = tensor.clone()
            dist.all_reduce(tensor)
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """Return every process's value, in order; values are what JSON can hold.

        All must call it, so it is also a place where they wait for each other.
        """
        if self.size == 1:
            return [value]
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(text)]))
        longest = max(int(length) for length in lengths)
        padded = torch.cat([text, text.new_zeros(longest - len(text))])
        texts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(texts, padded)
        return [
            json.loads(bytes(found[: int(length)].numpy()))
            for found, length in zip(texts, lengths, strict=True)
        ]

    def leader_first(self, work: Callable[[], T]) -> T:
        """Return what `work` returns: done by the first process, then by the first of each other
        machine, then by all others, so that what it leaves on a disk is made once a disk.
        """
        if self.store is None:
            return work()
        turn, machine = next(_turns), os.environ.get("GROUP_RANK", "0")
        begun, ready = f"wakeful/{turn}/begun", f"wakeful/{turn}/{machine}"
        if not self.first:
            self.store.wait([ready if self.local_rank else begun], _WORK_OF_ONE)
        found = work()
        for key, done in ((begun, self.first), (ready, self.local_rank == 0)):
            if done:
                self.store.set(key, "")
        return found

    def speaks_of_failure(self) -> bool:
        """Whether this process, of those that failed, is to say why: the first that asks."""
        if self.store is None:
            return True
        try:
            return self.store.add("wakeful/failed", 1) == 1
        except RuntimeError:  # the machine that keeps count is gone
            return True


ALONE = World()


@contextlib.contextmanager
def joined() -> Iterator[World]:
    """Give the world this process was started in; entered again inside, it gives the same.

    An error raised inside ends this process, and so, within `SILENCE` and on one machine at once,
    all others; only the one that failed first raises it, the others exit with status 1.

    Raises:
        WakefulError: the environment is not what torchrun makes, or another process was lost.
    """
    if _joined:
        yield _joined[-1]
        return
    if started_as() == (0, 1):
        yield ALONE
        return
    world = _join()
    _joined.append(world)
    try:
        yield world
    except (Exception, KeyboardInterrupt) as error:
        if not world.speaks_of_failure():
            time.sleep(_LET_IT_SPEAK)
            sys.exit(1)
        if is_lost(error):
            raise WakefulError(lost("start it again with the same torchrun command")) from error
        raise
    finally:
        _joined.clear()
        dist.destroy_process_group()


_joined: list[World] = []
_turns = itertools.count()


def started_as() -> tuple[int, int]:
    """Return this process's rank and the number of processes, as the environment has them."""
    try:
        size = int(os.environ.get("WORLD_SIZE", "1"))
        return (int(os.environ["RANK"]), size) if size > 1 else (0, 1)
    except (KeyError, ValueError):
        raise WakefulError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']!r} but RANK is "
            f"{os.environ.get('RANK', 'not set')!r}: start several processes with torchrun, or "
            "unset WORLD_SIZE"
        ) from None


def is_lost(error: BaseException) -> bool:
    """Whether an error says that another process does not answer."""
    return isinstance(error, dist.DistError) or (
        type(error) is RuntimeError and any(sign in str(error) for sign in _DEAD_PEER)
    )


def lost(cure: str) -> str:
    """Return the line for a process that is gone, with what to do."""
    return (
        "another process of this run is gone (killed, out of memory, or its machine or network "
        f"failed); {cure}"
    )


def _join() -> World:
    rank, size = started_as()
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        store, rank, size = next(dist.rendezvous("env://", timeout=SILENCE))
        dist.init_process_group(
            backend, store=dist.PrefixStore("group", store), rank=rank, world_size=size,
            timeout=SILENCE,
        )  # fmt: skip
    except (ValueError, RuntimeError) as error:
        line = str(error).splitlines()[0]
        raise WakefulError(
            f"process {rank} of {size} could not join the others: {line}; start them with torchrun"
        ) from error
    local_rank, local_size = (
        int(os.environ.get(name, default))
        for name, default in (("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", size))
    )
    return World(rank, size, local_rank, local_size, store)
