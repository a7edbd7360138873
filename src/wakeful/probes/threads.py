"""Heads side by side, a thread each: a decomposition gains little from a second thread."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

_T = TypeVar("_T")


def at_once(do: Callable[[int], _T], heads: Iterable[int], device: torch.device) -> list[_T]:
    """Return what `do` finds of each head, in order; on a processor as many at a time as torch has
    threads, elsewhere one by one.
    """
    heads, threads = list(heads), torch.get_num_threads() if device.type == "cpu" else 1
    if threads == 1 or len(heads) < 2:
        return [do(head) for head in heads]
    inference, graph = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    def one(head: int) -> _T:
        # A thread begins with torch's own modes and as many threads as torch may have.
        torch.set_num_threads(1)
        with torch.inference_mode(inference), torch.set_grad_enabled(graph):
            return do(head)

    with ThreadPoolExecutor(min(threads, len(heads))) as pool:
        try:
            return list(pool.map(one, heads))
        finally:
            torch.set_num_threads(threads)  # what threads yet to come begin with
