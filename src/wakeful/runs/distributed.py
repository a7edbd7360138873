"""Several processes as one run: who each is, what they tell each other, how they end together.

`torchrun` starts the processes and says in the environment who each is; a process started without
it is alone, and nothing here does anything. Control messages and CPU tensors go over gloo, tensors
of a GPU over NCCL.
"""

import contextlib
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from wakeful.digests import json_digest
from wakeful.errors import WakefulError

T = TypeVar("T")

SILENCE = timedelta(minutes=10)
"""Time after which a collective counts the other processes as lost."""
_LONGEST_WAIT = timedelta(days=2)
"""Time that processes wait for work that one of them does for all."""
_LONGEST_PAUSE = 0.5
"""Seconds at most between two looks at whether such work is done."""
_SECONDS_FOR_MESSAGE = 2.0
"""Seconds before a silent process ends: torchrun ends all the others when one does."""
_LOST_PEER_MESSAGES = ("gloo", "Connection closed", "Connection reset", "Broken pipe", "NCCL")
"""Torch's messages, in errors of no special type, when another process does not answer."""


@dataclass(frozen=True)
class World:
    """The processes of a run, seen from one of them: `rank` of `size`, and `local_rank` on its
    machine.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    store: dist.Store | None = None

    @property
    def first(self) -> bool:
        """True for the process that writes the run directory and the terminal."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the tensor summed over processes, which all must call it."""
        if self.size > 1:
            tensor = tensor.clone()
            dist.all_reduce(tensor)
        return tensor

    def share_weights(self, model: nn.Module) -> None:
        """Overwrite a model's weights on every process by those of the first; all must call it."""
        if self.size > 1:
            for tensor in model.state_dict().values():
                dist.broadcast(tensor, 0)

    def gather(self, value: Any) -> list[Any]:
        """Return every process's value, which JSON must be able to hold, in the order of ranks.

        All processes must call it, and wait for each other. It also serves as a barrier: the value
        is then a mere label.
        """
        if self.size == 1:
            return [value]
        # Collectives send tensors: the JSON's bytes.
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(text)]))
        longest = max(int(length) for length in lengths)
        padded = torch.cat([text, text.new_zeros(longest - len(text))])  # all_gather needs one size
        texts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(texts, padded)
        return [
            json.loads(bytes(text_bytes[: int(length)].numpy()))
            for text_bytes, length in zip(texts, lengths, strict=True)
        ]

    def leader_first(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, which every process calls: the first one before all others,
        then the first of each other machine, then the rest.

        A file that `work` leaves, such as prepared text, is thus made by one process per machine;
        the others find it on their disk. All processes must call this.
        """
        if self.store is None:
            return work()
        # All processes make these calls in the same order, so a turn's number names one call.
        store, turn, machine = self.store, next(_turns), os.environ.get("GROUP_RANK", "0")
        # Keys that the first process, and the first of this machine, set when they are done.
        first_key, machine_key = f"wakeful/{turn}/first", f"wakeful/{turn}/{machine}"
        if not self.first:
            awaited_key = first_key if self.local_rank == 0 else machine_key
            _wait_until(lambda: store.check([awaited_key]))
        result = work()
        if self.first:
            store.set(first_key, "")
        if self.local_rank == 0:
            store.set(machine_key, "")
        return result

    def meet(self) -> None:
        """Wait until all processes have called this, up to two days; a collective operation would
        give up after `SILENCE`.

        Raises:
            WakefulError: another process failed meanwhile.
        """
        if self.store is None:
            return
        # All processes make these calls in the same order, so a turn's number names one call.
        store, key = self.store, f"wakeful/{next(_turns)}/met"
        store.add(key, 1)

        def num_arrived() -> int:
            return store.add(key, 0)  # adding nothing returns the count

        _wait_until(lambda: num_arrived() == self.size or store.check([_FAILED]))
        if num_arrived() < self.size:
            raise WakefulError(lost_message(_AGAIN))

    def check_same(self, value: Any, otherwise: str) -> None:
        """Raise `WakefulError(otherwise)` on all processes unless all have the same value.

        All must call it, with a value that JSON can hold.
        """
        digest = json_digest(value)
        self.meet()  # waits for slow processes, for which `gather` would give up
        if any(other_digest != digest for other_digest in self.gather(digest)):
            raise WakefulError(otherwise)

    def reports_failure(self) -> bool:
        """Return True if this process is the first failed one that calls this: it alone prints the
        error. The failure is recorded for the processes that wait.
        """
        if self.store is None:
            return True
        try:
            return self.store.add(_FAILED, 1) == 1
        except RuntimeError:  # the machine that keeps count is gone
            return True


ALONE = World()


class _Terminated(KeyboardInterrupt):
    """SIGTERM: torchrun sends it when it is stopped, and to the other processes when one ends."""


@contextlib.contextmanager
def join_processes() -> Iterator[World]:
    """Join the processes that torchrun started and leave them at the end; nested calls do nothing.

    Without torchrun, yield `ALONE`. An error inside ends this process, and with it the others: at
    once on one machine, else within `SILENCE`. Only the process that failed first raises it; the
    others exit with status 1.

    Raises:
        WakefulError: torchrun's environment is incomplete, or another process was lost.
    """
    if _joined:
        yield _joined[-1]
        return
    if started_as() == (0, 1):
        yield ALONE
        return
    world = _init_world()
    _joined.append(world)
    final_handler = set_signal_handler(signal.SIGTERM, _terminate)
    try:
        yield world
    except (Exception, KeyboardInterrupt) as error:
        # When one process ends, torchrun sends the others SIGTERM: it must not cut off a message.
        final_handler = signal.SIG_IGN
        set_signal_handler(signal.SIGTERM, final_handler)
        if not world.reports_failure():
            time.sleep(_SECONDS_FOR_MESSAGE)  # until the process that reports it has done so
            sys.exit(1)
        if is_lost(error):
            raise WakefulError(lost_message(_AGAIN)) from error
        if isinstance(error, _Terminated):
            raise WakefulError(
                "stopped by SIGTERM: torchrun was told to stop, or another process of this run is "
                f"gone (killed, out of memory, or its machine failed); {_AGAIN}"
            ) from error
        raise
    finally:
        set_signal_handler(signal.SIGTERM, final_handler)
        _joined.clear()
        dist.destroy_process_group()


_FAILED = "wakeful/failed"
_AGAIN = "start it again with the same torchrun command"
_joined: list[World] = []
_turns = itertools.count()


def started_as() -> tuple[int, int]:
    """Return this process's rank and the number of processes, from torchrun's environment
    variables; (0, 1) without them.

    Raises:
        WakefulError: they contradict each other.
    """
    try:
        size = int(os.environ.get("WORLD_SIZE", "1"))
        return (int(os.environ["RANK"]), size) if size > 1 else (0, 1)
    except (KeyError, ValueError):
        raise WakefulError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']!r} but RANK is "
            f"{os.environ.get('RANK', 'not set')!r}: start several processes with torchrun, or "
            "unset WORLD_SIZE"
        ) from None


def end_process(status: int) -> NoReturn:
    """End this process with an exit status; all its files must be written before.

    One of several processes ends without Python's own shutdown: during that, a native thread that
    asks for the interpreter's lock aborts the process, and torchrun would report a finished run as
    a failure.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def is_lost(error: BaseException) -> bool:
    """Return whether an error, by its type or its message, says that another process does not
    answer.
    """
    return isinstance(error, dist.DistError) or (
        type(error) is RuntimeError and any(text in str(error) for text in _LOST_PEER_MESSAGES)
    )


def lost_message(cure: str) -> str:
    """Return the message that another process is gone, with what to do (`cure`)."""
    return (
        "another process of this run is gone (killed, out of memory, or its machine or network "
        f"failed); {cure}"
    )


def _init_world() -> World:
    """Join torchrun's process group and return this process's place in it.

    Raises:
        WakefulError: torchrun's environment is incomplete, or the others cannot be reached.
    """
    rank, size = started_as()
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    try:
        store, rank, size = next(dist.rendezvous("env://", timeout=SILENCE))
        group_store = dist.PrefixStore("group", store)
        dist.init_process_group(
            backend, store=group_store, rank=rank, world_size=size, timeout=SILENCE
        )
    except (ValueError, RuntimeError) as error:
        line = str(error).splitlines()[0]
        raise WakefulError(
            f"process {rank} of {size} could not join the others: {line}; start them with torchrun"
        ) from error
    return World(rank, size, int(os.environ.get("LOCAL_RANK", rank)), store)


def _wait_until(condition: Callable[[], bool]) -> None:
    """Check a condition at growing intervals until it holds.

    Raises:
        WakefulError: it does not hold within two days: another process must be lost.
    """
    # The store has a function that waits, but SIGTERM would have no effect until it returns.
    deadline, pause = time.monotonic() + _LONGEST_WAIT.total_seconds(), 0.001
    while not condition():
        if time.monotonic() > deadline:
            raise WakefulError(lost_message(_AGAIN))
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def set_signal_handler(number: signal.Signals, handler: Any) -> Any:
    """Set a signal's handler and return the previous one.

    Only the main thread can do so: in another one nothing is set, and `handler` is returned.
    """
    try:
        return signal.signal(number, handler)
    except ValueError:  # not the main thread
        return handler


def _terminate(number: int, frame: Any) -> None:
    raise _Terminated
