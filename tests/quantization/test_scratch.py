"""Memory used again for weights: no product sees another's."""

import threading

import pytest
import torch
from torch import nn

from wakeful.quantization import SCHEMES
from wakeful.quantization.arithmetic import scratch
from wakeful.quantization.linear import quantized


def layers(count: int = 2) -> list[nn.Module]:
    return [quantized(nn.Linear(9, 9), SCHEMES["w4"], "integer") for _ in range(count)]


def dense(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(x, layer.dequantized(), layer.bias)  # pyright: ignore


def test_memory_is_used_again_where_nothing_keeps_it() -> None:
    x = torch.zeros(1)
    places = {scratch((3, 5), torch.float32, x).data_ptr() for _ in range(3)}
    assert len(places) == 1
    with torch.inference_mode():
        assert scratch((2,), torch.float32, x).data_ptr() in places
    larger = scratch((4, 5), torch.float32, x)
    assert scratch((3, 5), torch.float32, x).data_ptr() == larger.data_ptr()
    assert scratch((3, 5), torch.uint8, x).dtype == torch.uint8


def test_it_is_fresh_for_a_gradient_a_trace_and_each_thread() -> None:
    x = torch.zeros(1)
    kept = scratch((3,), torch.float32, x)
    wanted = scratch((3,), torch.float32, x.clone().requires_grad_())
    other: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: other.append(scratch((3,), torch.float32, x)))
    thread.start()
    thread.join()
    traced = torch.zeros(1, device="meta")
    assert len({t.data_ptr() for t in (kept, wanted, *other)}) == 3
    assert scratch((3,), torch.float32, traced).device.type == "meta"


def test_gradients_pass_through_layers_in_a_row() -> None:
    first, second = layers()
    x = torch.randn(4, 9, requires_grad=True)
    (grad,) = torch.autograd.grad(second(first(x)).square().sum(), x)
    (wanted,) = torch.autograd.grad(dense(second, dense(first, x)).square().sum(), x)
    torch.testing.assert_close(grad, wanted)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_layers_in_a_row_and_in_two_modes(mode: type) -> None:
    first, second = layers()
    x = torch.randn(4, 9)
    wanted = dense(second, dense(first, x))
    with mode():
        torch.testing.assert_close(second(first(x)), wanted)
    torch.testing.assert_close(second(first(x)), wanted)
    with torch.inference_mode():
        torch.testing.assert_close(second(first(x)), wanted)
