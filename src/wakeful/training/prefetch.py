"""Batches that are read while the device works on the one before."""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from wakeful.data.order import Batches


def read_ahead(
    batches: Batches, steps: Iterable[int], device: torch.device
) -> Iterator[torch.Tensor]:
    """Yield the batches of `steps`; for a GPU each is read while the one before it is worked on,
    into memory that the copy need not wait for.
    """
    if device.type == "cpu":
        yield from map(batches.batch, steps)
        return

    def read(step: int) -> torch.Tensor:
        batch = batches.batch(step)
        return batch.pin_memory() if device.type == "cuda" else batch

    with ThreadPoolExecutor(1) as pool:
        coming = deque[Future[torch.Tensor]]()
        for step in steps:
            coming.append(pool.submit(read, step))
            if len(coming) > 1:
                yield coming.popleft().result()
        while coming:
            yield coming.popleft().result()
