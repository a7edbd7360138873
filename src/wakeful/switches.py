"""Torch's global modes and defaults as our functions need them, whatever their caller has set."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

_AUTOCAST = ("cpu", "cuda")


@contextmanager
def default_torch_state() -> Iterator[None]:
    """Set torch's global state to its defaults within a context: gradients are recorded, new
    tensors are float32 on the CPU, and there is no inference mode, `no_grad` or autocast.

    Afterwards the caller's state is back, that of the CPU's random numbers too. The context
    decorates every public function: so `torch.inference_mode()` around a call neither stops what
    needs gradients, such as GPTQ's weights of tokens, nor changes a measured number.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        for kind in _AUTOCAST:
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        callers_dtype = torch.get_default_dtype()
        if callers_dtype != torch.float32:
            torch.set_default_dtype(torch.float32)
            stack.callback(torch.set_default_dtype, callers_dtype)
        yield
