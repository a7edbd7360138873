"""Heads side by side: what each finds, in order, under the caller's modes and thread counts."""

import threading

import pytest
import torch

from wakeful.probes.rank import map_heads

CPU = torch.device("cpu")


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("inference", [True, False])
def test_results_come_in_order_under_the_callers_modes(threads: int, inference: bool) -> None:
    def see(head: int) -> tuple[int, bool, bool, int]:
        modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
        return head, *modes, torch.get_num_threads()

    with torch.inference_mode(inference), torch.set_grad_enabled(not inference):
        found = map_heads(see, range(5, 12), CPU)
    assert found == [(head, inference, not inference, 1) for head in range(5, 12)]
    assert torch.get_num_threads() == threads
    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert later == [threads]


def test_an_error_of_one_head_is_the_callers_and_threads_are_given_back(threads: int) -> None:
    def fail(head: int) -> int:
        if head == 2:
            raise ValueError("head 2")
        return head

    with pytest.raises(ValueError, match="head 2"):
        map_heads(fail, range(4), CPU)
    assert torch.get_num_threads() == threads
    assert map_heads(fail, [], CPU) == []
    assert map_heads(fail, [3], CPU) == [3]
