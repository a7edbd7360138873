"""Memory that is used again: on a processor, mapping fresh memory for a layer's weights in float32
takes several times as long as filling it.
"""

import math
import threading

import torch
from torch import Tensor


class _Buffers(threading.local):
    """A buffer of each dtype for each thread, as large as the largest that was asked for."""

    def __init__(self) -> None:
        self.of: dict[torch.dtype, Tensor] = {}


_buffers = _Buffers()


def scratch(shape: tuple[int, ...], dtype: torch.dtype, x: Tensor) -> Tensor:
    """Return memory to fill for a product with `x`; it is valid until this thread asks again.

    It is fresh where it must outlive that: where a gradient will be asked for or the call is being
    traced; and on a GPU, whose allocator keeps memory itself.
    """
    traced = type(x) is not Tensor or torch.compiler.is_compiling()
    if traced or x.device.type != "cpu" or (x.requires_grad and torch.is_grad_enabled()):
        return torch.empty(shape, dtype=dtype, device=x.device)
    size = math.prod(shape)
    buffer = _buffers.of.get(dtype)
    if buffer is None or buffer.numel() < size:
        with torch.inference_mode(False):  # outside it too, the buffer must be writable
            buffer = _buffers.of[dtype] = torch.empty(size, dtype=dtype)
    return buffer[:size].view(shape)
