"""A stand-in for a GPU: tensors that lie on the CPU, say they are on `cuda:0`, and mix as its do.

Under `stand_in_gpu()` whole verbs run as they would on a GPU, and fail where one would: on
operations that mix devices, on numpy, on generators of another device, on kernels that CUDA lacks.
Kernels, and whatever asks for their speed, are the CPU's.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from wakeful.parts import softmax1

GPU = torch.device("cuda:0")
_CARRIER = torch.device("meta:1")
"""What torch's own C++ sees in place of `GPU`: it needs neither a driver nor threads of its own."""
_MOVES = {"copy_", "_to_copy"}
_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
_NO_SCALARS = {"cat", "stack", "mm", "bmm", "addmm", "embedding", "index_select", "gather"}
_LACKING = {"histogram", "_histogramdd_bin_edges", "linalg_eig"}
_PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "dot", "mv"}
_CUDA = {
    "synchronize": None, "mem_get_info": (2**40, 2**40), "reset_peak_memory_stats": None,
    "max_memory_allocated": 1, "get_device_name": "stand-in", "get_device_capability": (9, 0),
}  # fmt: skip
_ASKS = {"data_ptr", "untyped_storage", "storage", "is_pinned", "tolist"}


class OnGpu(Tensor):
    """A tensor on the stand-in; `inner` holds its numbers."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> "OnGpu":
        made = Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(),
            dtype=inner.dtype, device=_CARRIER,
        )  # fmt: skip
        made.inner = inner
        return made

    device = property(lambda _: GPU)
    is_cuda = property(lambda _: True)
    is_cpu = is_meta = property(lambda _: False)

    def __repr__(self, *_: Any, **__: Any) -> str:
        return f"OnGpu({self.inner!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _carry_out(func, args, kwargs or {})


class Generator(torch.Generator):
    """A generator that knows the device it was asked for."""

    def __new__(cls, device: Any = "cpu") -> "Generator":
        made = super().__new__(cls)
        made.where = torch.device(device)
        return made

    device = property(lambda self: self.where)


def _carry_out(func: Any, args: Any, kwargs: Any) -> Any:
    name = func.overloadpacket.__name__
    tensors = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
    there = [x for x in tensors if isinstance(x, OnGpu)]
    wanted = kwargs.get("device")
    on_gpu = bool(there) if wanted is None else wanted == _CARRIER
    if there and name not in _MOVES:
        _check(name, func, args, tensors, there)
    generator = kwargs.get("generator")
    if generator is not None:
        where = getattr(generator, "where", torch.device("cpu"))
        if (where.type == "cuda") != on_gpu:
            raise RuntimeError(f"{name}: a generator of {where}, its tensor elsewhere")
    inner_args, inner_kwargs = tree_map(
        lambda x: x.inner if isinstance(x, OnGpu) else x, (args, kwargs)
    )
    assert not there or not any(
        x.is_meta for x in tree_iter((inner_args, inner_kwargs)) if isinstance(x, Tensor)
    ), f"{name} mixes with the meta device"
    if wanted is not None and wanted == _CARRIER:
        inner_kwargs["device"] = torch.device("cpu")
        inner_kwargs.pop("pin_memory", None)
    found = func(*inner_args, **inner_kwargs)
    if name == "copy_":
        return args[0]
    if not on_gpu:
        return found
    known = {id(x.inner): x for x in there}

    def back(x: Any) -> Any:
        if id(x) in known:  # changed in place
            return known[id(x)]
        return OnGpu(x) if isinstance(x, Tensor) else x

    return tree_map(back, found)


def _check(name: str, func: Any, args: Any, tensors: list[Tensor], there: list[OnGpu]) -> None:
    here = [x for x in tensors if not isinstance(x, OnGpu)]
    if name in _INDEXED and isinstance(args[0], OnGpu):
        here = [x for x in tree_iter(args[2:]) if isinstance(x, Tensor)]
        here = [x for x in here if not isinstance(x, OnGpu)]
    if any(x.dim() or name in _NO_SCALARS for x in here):
        shapes = [("gpu" if isinstance(x, OnGpu) else "cpu", *x.shape) for x in tensors]
        raise RuntimeError(f"{name}: expected all tensors to be on the same device: {shapes}")
    if func._schema.is_mutable and isinstance(args[0], Tensor) and not isinstance(args[0], OnGpu):
        raise RuntimeError(f"{name}: its result lies on the CPU, its operands on the GPU")
    if name in _LACKING or (name in _PRODUCTS and not there[0].dtype.is_floating_point):
        raise NotImplementedError(f"{name} of {there[0].dtype} on the GPU")
    if name == "_int_mm":
        (rows, inner), outer = there[0].shape, there[1].shape[1]
        if rows <= 16 or inner % 8 or outer % 8:
            raise RuntimeError(f"_int_mm of {rows} x {inner} x {outer} on the GPU")


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _carry_out(func, args, kwargs or {})


def _is_gpu(x: Any) -> bool:
    if isinstance(x, str):
        return x.startswith("cuda")
    return isinstance(x, torch.device) and x.type == "cuda"


class _Function(TorchFunctionMode):
    """Writes `_CARRIER` for the GPU, and asks inner tensors about their memory."""

    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in _ASKS and isinstance(args[0], OnGpu):
            return func(args[0].inner, *args[1:], **kwargs)
        if name in ("__getitem__", "__setitem__") and isinstance(args[0], OnGpu):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            index = tuple(torch.tensor(x) if isinstance(x, list) else x for x in index)
            args = (args[0], index, *args[2:])
        if name == "new_tensor" and isinstance(args[0], OnGpu):
            return torch.tensor(args[1], dtype=args[0].dtype).to(_CARRIER)
        if name == "cuda":
            name, func, args = "to", Tensor.to, (args[0], _CARRIER)
        if func == Tensor.data.__set__ and isinstance(args[1], OnGpu):
            args[0].inner = args[1].inner
        if name == "to" and len(args) > 1 and isinstance(args[1], Tensor):
            args = (args[0], args[1].device, args[1].dtype, *args[2:])
        if name in ("tensor", "as_tensor") and _is_gpu(kwargs.get("device")):
            return torch.as_tensor(*args, **kwargs | {"device": None}).to(_CARRIER)
        if _is_gpu(kwargs.get("device")):
            kwargs["device"] = _CARRIER
        if name == "to":
            args = tuple(_CARRIER if _is_gpu(x) else x for x in args)
        return func(*args, **kwargs)


def _kernels(q: Tensor, _: Tensor | None) -> Any:
    assert q.dtype != torch.float64, "refused before a kernel is chosen"
    return softmax1._cpu_forward, softmax1._cpu_backward


@contextmanager
def stand_in_gpu() -> Iterator[torch.device]:
    """Let tensors be made on, and moved to, the device that is yielded."""
    with pytest.MonkeyPatch.context() as patch, _Function(), _Dispatch():
        patch.setattr(torch, "Generator", Generator)
        for module in [each for name, each in sys.modules.items() if name.startswith("wakeful")]:
            for name, value in (("choose_device", GPU), ("estimate_seconds", 1.0)):
                if hasattr(module, name):
                    patch.setattr(module, name, lambda *_, value=value, **__: value)
        patch.setattr(Tensor, "pin_memory", lambda self: self)  # other threads have no modes
        patch.setattr(softmax1, "_stock_kernels", _kernels)
        for name, value in _CUDA.items():
            patch.setattr(torch.cuda, name, lambda *_, value=value: value)
        mode = torch.autograd.grad_mode.inference_mode  # whose tensors take no wrapper's views
        patch.setattr(mode, "__enter__", torch.no_grad.__enter__)
        patch.setattr(mode, "__exit__", torch.no_grad.__exit__)
        yield GPU
