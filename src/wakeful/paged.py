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
"""Most elements of a matrix to work on at a time, where each takes several intermediate ones."""
_aten = torch.ops.aten
_DONT_NEED = getattr(mmap, "MADV_DONTNEED", None)


class Paged(Tensor):
    """A read-only tensor whose numbers stay in a mapped file, and are cast to `dtype` on use.

    Every operation gets an ordinary tensor that is made for it alone; afterwards the file's pages
    are released from memory. Views are `Paged` too. Writing to one raises RuntimeError.
    """

    stored: Tensor
    """The file's pages, in the type that they have there."""

    @staticmethod
    def __new__(cls, stored: Tensor, dtype: torch.dtype) -> "Paged":
        """Return a tensor of `dtype` whose numbers are those of `stored`, a mapped file's."""
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
        """Run an ATen operation with an ordinary tensor in place of each `Paged` one, and release
        the files' pages afterwards. A view, and a cast to the stored type, are `Paged` again.

        Raises:
            RuntimeError: the operation writes to a `Paged` tensor.
        """
        kwargs = kwargs or {}
        first, *rest = args
        if func.is_view and func._can_decompose():  # a `reshape` or `to`, which may copy
            return func.decompose(*args, **kwargs)
        if func.is_view:
            result = func(first.stored, *rest, **kwargs)
            # Autograd wants a view to be an inference tensor if its base is one.
            with torch.inference_mode(first.is_inference()):
                return tree_map_only(Tensor, lambda part: cls(part, first.dtype), result)
        if func is _aten._to_copy.default and _asks_for_stored_type(first, kwargs):
            return cls(first.stored, first.stored.dtype)
        if any(isinstance(argument, cls) for argument in _written_arguments(func, args, kwargs)):
            raise RuntimeError("weights that stay in their files cannot be written to")
        used = [argument for argument in tree_leaves((args, kwargs)) if isinstance(argument, cls)]
        try:
            if func is _aten.embedding.default:  # cast the few rows, not the large table
                return func(first.stored, *rest, **kwargs).to(first.dtype)
            args, kwargs = tree_map_only(cls, to_plain_tensor, (args, kwargs))
            return func(*args, **kwargs)
        finally:
            for argument in used:
                release_pages(argument.stored)


def to_memory(tensor: Tensor) -> Tensor:
    """Return a tensor in memory: the tensor itself, or a copy of a `Paged` one."""
    return tensor.clone() if isinstance(tensor, Paged) else tensor


def to_plain_tensor(tensor: Tensor) -> Tensor:
    """Return an ordinary tensor of the same numbers; of a `Paged` tensor without a cast it is the
    mapped file itself, whose pages are not released.
    """
    return tensor.stored.to(tensor.dtype) if isinstance(tensor, Paged) else tensor


def split_rows(matrix: Tensor) -> Sequence[Tensor]:
    """Split a matrix into groups of rows of at most `AT_ONCE` elements, to work on in turn."""
    return matrix.split(max(1, AT_ONCE // matrix[0].numel()))


def is_finite(tensor: Tensor) -> bool:
    """Return True if all numbers of a tensor are finite.

    Only the minimum and maximum of each part are tested: a NaN in a part makes both NaN.
    """
    if not tensor.numel():  # aminmax takes no empty tensor
        return True
    wide = torch.float32 if tensor.element_size() == 1 else tensor.dtype  # aminmax takes no float8
    for part in split_rows(tensor) if tensor.ndim > 1 else (tensor,):
        minimum, maximum = to_memory(part).to(wide).aminmax()
        if not (minimum.isfinite() and maximum.isfinite()):
            return False
    return True


def _written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """Yield the arguments of an ATen operation that it writes to, by its schema."""
    for number, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[number] if number < len(args) else kwargs.get(argument.name)


def _asks_for_stored_type(tensor: Any, requested: dict[str, Any]) -> bool:
    """Return True if `tensor.to(**requested)` asks for the type that a `Paged` tensor has in its
    file, on the CPU: the result can then stay in the file.
    """
    device = requested.get("device")
    return (
        isinstance(tensor, Paged)
        and requested.get("dtype") == tensor.stored.dtype
        and (device is None or device.type == "cpu")
        and tensor.stored.is_contiguous()
    )


def stored_tensor(tensor: Tensor) -> Tensor:
    """Return a `Paged` tensor's numbers in the type of its file; another tensor as it is."""
    return tensor.stored if isinstance(tensor, Paged) else tensor


def release_pages(tensor: Tensor) -> None:
    """Release the memory pages of a tensor that lies in a mapped file; they are read again on use.

    The tensor must lie in a file and not be written to: other memory would be cleared.
    """
    if _DONT_NEED is None or not tensor.numel():
        return
    begin = tensor.data_ptr()
    # The offset of the last element, for strides that may leave gaps.
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    end = begin + (last + 1) * tensor.element_size()
    begin -= begin % mmap.PAGESIZE  # madvise wants the beginning of a page
    _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _DONT_NEED)


_libc = ctypes.CDLL(None) if _DONT_NEED is not None else cast(Any, None)


def _return_free_memory() -> None:
    """Return free memory to the system; glibc would keep gigabytes between blocks in use."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


def copy_to_file(tensor: Tensor) -> Paged:
    """Copy a tensor to a file in the cache folder that is deleted when nothing uses it any more.

    Raises:
        WakefulError: the disk is full.
    """
    size = max(tensor.numel() * tensor.element_size(), 1)
    folder = default_cache_dir() / "scratch"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder)
        try:
            os.posix_fallocate(handle, 0, size)  # else writing to a full disk ends the process
            storage = torch.UntypedStorage.from_file(name, shared=True, nbytes=size)
        finally:
            os.close(handle)
            Path(name).unlink()  # the mapping keeps the file until nothing uses it
    except OSError as error:
        raise WakefulError(
            f"{folder}, where weights lie that do not fit memory, has no room for {size:,} bytes "
            f"more ({error.strerror}): free some, or name another disk in WAKEFUL_CACHE"
        ) from None
    tensor_view = torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape)  # pyright: ignore
    tensor_view.copy_(tensor)
    release_pages(tensor_view)
    _return_free_memory()
    return Paged(tensor_view, tensor.dtype)


def store_like(source: Tensor, result: Tensor) -> Tensor:
    """Return `result`, computed from the weight `source`, in the kind of storage that the weight
    has.

    Of a weight in memory it is returned as it is. Of a `Paged` weight it is moved to a file, in
    which floats are rounded to the type that the weight has in its own file.
    """
    if not isinstance(source, Paged):
        return result
    stored_dtype = source.stored.dtype
    is_rounded = stored_dtype.is_floating_point and result.is_floating_point()
    file_copy = copy_to_file(result.to(stored_dtype) if is_rounded else result)
    return Paged(file_copy.stored, result.dtype)


def load_weights(model: nn.Module) -> None:
    """Replace a model's `Paged` weights, which stay in files, by copies in memory that require
    gradients, in place.
    """
    copies: dict[int, nn.Parameter] = {}  # by the weight's id: a tied weight has one copy
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if isinstance(parameter, Paged):
                if id(parameter) not in copies:
                    copies[id(parameter)] = nn.Parameter(to_memory(parameter.detach()))
                module._parameters[name] = copies[id(parameter)]


def replace_parameter(module: nn.Module, name: str, values: Tensor) -> None:
    """Replace a module's parameter by `values`, with the dtype, the kind of storage (memory or a
    file) and `requires_grad` of the old one.
    """
    old = module.get_parameter(name)
    tensor = store_like(old, values.to(old.dtype))
    setattr(module, name, nn.Parameter(tensor, requires_grad=old.requires_grad))


def page_matrices(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Make the matrices of a loaded model `Paged`, in place, so that they stay in their files;
    return the model.

    They are cast to `dtype` on use. Everything else is cast now: vectors, buffers, weights that lie
    in memory, and weights that `dtype` cannot hold exactly. Weights require no gradients then.
    """
    files = _mapped_files()
    replaced: dict[int, nn.Parameter] = {}  # by the old one's id: a tied weight stays tied
    for module in model.modules():
        for name, buffer in module._buffers.items():
            # Buffers that are not saved were computed, such as RoPE's tables in float32.
            is_computed = name in module._non_persistent_buffers_set
            if buffer is not None and buffer.is_floating_point() and not is_computed:
                module._buffers[name] = buffer.to(dtype)
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_floating_point():
                continue
            if id(parameter) not in replaced:
                tensor = parameter.detach()
                is_widened = torch.promote_types(tensor.dtype, dtype) == dtype
                stays_in_file = tensor.ndim > 1 and is_widened and _lies_in(tensor, files)
                tensor = Paged(tensor, dtype) if stays_in_file else tensor.to(dtype)
                replaced[id(parameter)] = nn.Parameter(tensor, requires_grad=False)
            module._parameters[name] = replaced[id(parameter)]
    return model


def _mapped_files() -> Sequence[tuple[int, int]]:
    """Return the ranges of addresses (begin, end) at which files are mapped into this process."""
    mappings: list[tuple[int, int]] = []
    with contextlib.suppress(OSError):  # a system without /proc: nothing is known to be mapped
        for line in Path("/proc/self/maps").read_text("utf-8", "replace").splitlines():
            # begin-end, permissions, offset, device, and the inode, which is 0 without a file.
            match = re.match(r"([0-9a-f]+)-([0-9a-f]+) r\S+ \S+ \S+ ([1-9]\d*) ", line)
            if match:
                mappings.append((int(match[1], 16), int(match[2], 16)))
    return mappings


def _lies_in(tensor: Tensor, files: Sequence[tuple[int, int]]) -> bool:
    """Tell whether a contiguous tensor's memory lies within one of the ranges of addresses."""
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()
    return any(low <= begin and end <= high for low, high in files)


@contextlib.contextmanager
def parameters_in_memory(*modules: nn.Module) -> Iterator[None]:
    """Replace the parameters of modules by copies in memory, which may be written to in the context
    and require no gradients.

    The copies stay afterwards, except that those of `Paged` parameters go back to files, rounded to
    the type that the parameters had there. After an exception in the context they stay in memory
    too.
    """
    parts = [part for module in modules for part in module.modules()]
    originals: dict[int, Tensor] = {}  # by the copy's id
    copies: dict[int, nn.Parameter] = {}  # by the original's id: a tied parameter has one copy
    for part in parts:
        for name, parameter in part._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in copies:
                copied = nn.Parameter(parameter.detach().clone(), requires_grad=False)
                copies[id(parameter)] = copied
                originals[id(copied)] = parameter
            part._parameters[name] = copies[id(parameter)]
    yield
    in_files: dict[int, nn.Parameter] = {}  # by the copy's id
    for part in parts:
        for name, parameter in part._parameters.items():
            original = None if parameter is None else originals.get(id(parameter))
            if isinstance(original, Paged):
                if id(parameter) not in in_files:
                    tensor = store_like(original, cast(nn.Parameter, parameter).detach())
                    in_files[id(parameter)] = nn.Parameter(tensor, requires_grad=False)
                part._parameters[name] = in_files[id(parameter)]
