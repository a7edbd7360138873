"""Weights that stay in files: each is read as it is used, and leaves memory after that.

A model of 8 billion parameters has 16 GB of files and, in float32, 32 GB of weights. Its tensors
here are the files' own pages, widened for one operation at a time, so that whatever runs a model
runs this one with the same numbers and with room for its largest matrix alone. What is made of such
weights goes to files without a name, which are gone when nothing uses them.
"""

import contextlib
import ctypes
import mmap
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from wakeful.errors import WakefulError
from wakeful.paths import default_cache_dir

AT_ONCE = 2**24
"""Elements of a matrix to work on at a time, where each takes several numbers on the way."""
_aten = torch.ops.aten
_DONT_NEED = getattr(mmap, "MADV_DONTNEED", None)


class Paged(Tensor):
    """A tensor whose numbers lie in a file; it shows them in `dtype`, which holds all of them.

    An operation gets an ordinary tensor, made for it alone. Views are `Paged` too. It is not for
    writing to: RuntimeError.
    """

    stored: Tensor
    """The file's pages, in the type that they have there."""

    @staticmethod
    def __new__(cls, stored: Tensor, dtype: torch.dtype) -> "Paged":
        wrapper = torch.Tensor._make_wrapper_subclass(  # pyright: ignore
            cls, stored.shape, strides=stored.stride(), storage_offset=stored.storage_offset(),
            dtype=dtype, device=stored.device,
        )  # fmt: skip
        wrapper.stored = stored
        return wrapper

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore

    @classmethod
    def __torch_dispatch__(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, (first, *rest) = kwargs or {}, args
        if func.is_view and func._can_decompose():  # a `reshape` or `to` may copy
            return func.decompose(*args, **kwargs)
        if func.is_view:
            result = func(first.stored, *rest, **kwargs)
            with torch.inference_mode(first.is_inference()):  # as autograd asks of a view
                return tree_map_only(Tensor, lambda part: cls(part, first.dtype), result)
        if func is _aten._to_copy.default and _is_as_stored(first, kwargs):
            return cls(first.stored, first.stored.dtype)
        if any(isinstance(argument, cls) for argument in _written(func, args, kwargs)):
            raise RuntimeError("weights that stay in their files cannot be written to")
        used = [argument for argument in tree_leaves((args, kwargs)) if isinstance(argument, cls)]
        try:
            if func is _aten.embedding.default:  # a few rows of a large table
                return func(first.stored, *rest, **kwargs).to(first.dtype)
            args, kwargs = tree_map_only(cls, to_plain_tensor, (args, kwargs))
            return func(*args, **kwargs)
        finally:
            for argument in used:
                release_pages(argument.stored)


def to_memory(tensor: Tensor) -> Tensor:
    """Return a tensor whose numbers lie in memory: itself, or a copy of a `Paged` one."""
    return tensor.clone() if isinstance(tensor, Paged) else tensor


def to_plain_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor of the same numbers that is not `Paged`, whose pages nobody lets go of."""
    return tensor.stored.to(tensor.dtype) if isinstance(tensor, Paged) else tensor


def split_rows(matrix: Tensor) -> Sequence[Tensor]:
    """Return a matrix as parts of some rows each, to work on one after another."""
    return matrix.split(max(1, AT_ONCE // matrix[0].numel()))


def is_finite(tensor: Tensor) -> bool:
    """Tell whether all numbers are finite, from each part's minimum and maximum, which a NaN makes
    NaN.
    """
    if not tensor.numel():
        return True
    wide = torch.float32 if tensor.element_size() == 1 else tensor.dtype  # aminmax takes no float8
    for part in split_rows(tensor) if tensor.ndim > 1 else (tensor,):
        if not all(bool(end.isfinite()) for end in to_memory(part).to(wide).aminmax()):
            return False
    return True


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """Yield what an operation writes to."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[number] if number < len(args) else kwargs.get(argument.name)


def _is_as_stored(tensor: Any, requested: dict[str, Any]) -> bool:
    """Tell whether a requested copy has the stored type and lies on the CPU."""
    device = requested.get("device")
    return (
        isinstance(tensor, Paged)
        and requested.get("dtype") == tensor.stored.dtype
        and (device is None or device.type == "cpu")
        and tensor.stored.is_contiguous()
    )


def stored_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor in the type that it is stored in, which is its own unless it is `Paged`."""
    return tensor.stored if isinstance(tensor, Paged) else tensor


def release_pages(tensor: Tensor) -> None:
    """Take a file's pages out of memory; they are read again when they are used again.

    Only for tensors that lie in a file and are not written to: other memory would be cleared.
    """
    if _DONT_NEED is None or not tensor.numel():
        return
    begin = tensor.data_ptr()
    far = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    end = begin + (far + 1) * tensor.element_size()
    begin -= begin % mmap.PAGESIZE
    _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _DONT_NEED)


_libc = ctypes.CDLL(None) if _DONT_NEED is not None else cast(Any, None)


def _trim() -> None:
    """Give free memory back, which glibc keeps between what is still used: gigabytes in the end."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


def copy_to_file(tensor: Tensor) -> Paged:
    """Return a copy of a tensor in a file without a name, in the folder of the cache.

    Raises:
        WakefulError: the disk is full.
    """
    size = max(tensor.numel() * tensor.element_size(), 1)
    folder = default_cache_dir() / "scratch"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder)
        try:
            os.posix_fallocate(handle, 0, size)  # or a full disk ends the process as it is written
            storage = torch.UntypedStorage.from_file(name, shared=True, nbytes=size)
        finally:
            os.close(handle)
            Path(name).unlink()
    except OSError as error:
        raise WakefulError(
            f"{folder}, where weights lie that do not fit memory, has no room for {size:,} bytes "
            f"more ({error.strerror}): free some, or name another disk in WAKEFUL_CACHE"
        ) from None
    tensor_view = torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape)  # pyright: ignore
    tensor_view.copy_(tensor)
    release_pages(tensor_view)
    _trim()
    return Paged(tensor_view, tensor.dtype)


def store_like(source: Tensor, result: Tensor) -> Tensor:
    """Store a tensor computed from a weight where the weight lies: in memory, or in a file, rounded
    to the type that the file has.
    """
    if not isinstance(source, Paged):
        return result
    kind = source.stored.dtype
    rounds = kind.is_floating_point and result.is_floating_point()
    return Paged(copy_to_file(result.to(kind) if rounds else result).stored, result.dtype)


def load_weights(model: nn.Module) -> None:
    """Read the weights of a model that stay in files into memory, in place."""
    parameters: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if isinstance(parameter, Paged):
                copied = parameters.get(id(parameter)) or nn.Parameter(
                    to_memory(parameter.detach())
                )
                module._parameters[name] = parameters[id(parameter)] = copied


def replace_parameter(module: nn.Module, name: str, values: Tensor) -> None:
    """Replace a module's parameter by values, in its type and on its device."""
    old = module.get_parameter(name)
    parameter = store_like(old, values.to(old.dtype))
    setattr(module, name, nn.Parameter(parameter, requires_grad=old.requires_grad))


def page_matrices(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Let the matrices of a model stay in the files that they were read from; return the model.

    They show themselves in `dtype`. What lies in memory, or is a vector, is converted.
    """
    files = _files()
    parameters: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            computed = name in module._non_persistent_buffers_set
            if buffer is not None and buffer.is_floating_point() and not computed:
                module._buffers[name] = buffer.to(dtype)
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_floating_point():
                continue
            if id(parameter) not in parameters:
                there = parameter.detach()
                fits = torch.promote_types(there.dtype, dtype) == dtype
                paged = there.ndim > 1 and fits and _lies_in(there, files)
                copy = Paged(there, dtype) if paged else there.to(dtype)
                parameters[id(parameter)] = nn.Parameter(copy, requires_grad=False)
            module._parameters[name] = parameters[id(parameter)]
    return model


def _files() -> Sequence[tuple[int, int]]:
    """Return from where to where files lie in the memory of this process, ascending."""
    mappings: list[tuple[int, int]] = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text("utf-8", "replace").splitlines():
            match = re.match(r"([0-9a-f]+)-([0-9a-f]+) r\S+ \S+ \S+ ([1-9]\d*) ", line)
            if match:
                mappings.append((int(match[1], 16), int(match[2], 16)))
    return mappings


def _lies_in(tensor: Tensor, files: Sequence[tuple[int, int]]) -> bool:
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()
    return any(low <= begin and end <= high for low, high in files)


@contextlib.contextmanager
def parameters_in_memory(*modules: nn.Module) -> Iterator[None]:
    """Let the parameters of modules be copies in memory that may be written to, for a while.

    Afterwards those of `Paged` ones are in files again, rounded to the type that they had there.
    """
    parts = [part for module in modules for part in module.modules()]
    tensors: dict[int, Tensor] = {}
    own: dict[int, nn.Parameter] = {}
    for part in parts:
        for name, parameter in part._parameters.items():
            if parameter is not None:
                if id(parameter) not in own:
                    copied = nn.Parameter(parameter.detach().clone(), requires_grad=False)
                    own[id(parameter)], tensors[id(copied)] = copied, parameter
                part._parameters[name] = own[id(parameter)]
    yield
    parameters: dict[int, nn.Parameter] = {}
    for part in parts:
        for name, parameter in part._parameters.items():
            source = None if parameter is None else tensors.get(id(parameter))
            if isinstance(source, Paged):
                if id(parameter) not in parameters:
                    copy = store_like(source, cast(nn.Parameter, parameter).detach())
                    parameters[id(parameter)] = nn.Parameter(copy, requires_grad=False)
                part._parameters[name] = parameters[id(parameter)]
