"""Checks of the execution context: tracing, torch.func, and second derivatives."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_functorch: Any = getattr(torch._C, "_functorch")  # noqa: B009 - of no stub


def is_readable(tensor: Tensor) -> bool:
    """Return whether `tensor` has values that Python may branch on.

    It has none while a graph is traced (`torch.compile`, `torch.export`, `torch.jit`, capture of a
    CUDA graph), on the meta device, in a `FakeTensor`, and inside `torch.func.vmap`.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    # Look through the wrappers of `torch.func`; of these only that of `vmap` hides the values.
    while _functorch.is_functorch_wrapped_tensor(tensor):
        if _functorch.is_batchedtensor(tensor):
            return False
        tensor = _functorch.get_unwrapped(tensor)
    if tensor.is_meta or isinstance(tensor, FakeTensor):
        return False
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def is_transformed() -> bool:
    """Return whether a `torch.func` transform (`vmap`, `grad`, `jvp`, …) is active; False while
    torch.compile traces.

    Functions with hand-written gradients support one derivative of one batch. Under a transform
    they compute by their definition instead, which every transform supports.
    """
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def is_differentiated_again() -> bool:
    """Return whether the running backward pass is itself recorded (`create_graph=True`); False
    while torch.compile traces.

    (`once_differentiable` does not suffice: it raises only in a second `backward()`. Through
    `torch.autograd.grad` the gradients would be left out silently.)
    """
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def differentiate(
    definition: Callable[..., Tensor], inputs: Sequence[Tensor], grad: Tensor
) -> list[Tensor | None]:
    """Return the gradient of Σ grad · definition(*inputs) by each input, itself differentiable;
    None for an input that requires no gradient.
    """
    # Views: if one input is computed from another, the other's gradient must not include that path.
    inputs = [tensor.view_as(tensor) for tensor in inputs]
    differentiable = [tensor for tensor in inputs if tensor.requires_grad]
    output = definition(*inputs)
    grads = iter(torch.autograd.grad(output, differentiable, grad, create_graph=True))
    return [next(grads) if tensor.requires_grad else None for tensor in inputs]
