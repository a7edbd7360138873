"""The header of a GGUF file, checked against the file before anything is built from it.

A count or a length in the header is a number somebody wrote; what reads it later allocates or loops
by it. Here every one of them has to fit into the file's bytes. Without this, a file of 80 bytes
whose array announces 2⁶⁰ numbers keeps `GGUFReader` (gguf 0.19.0) in a loop without end; a
`block_count` of 2³¹ has Transformers (5.23.0) build layers for as long as memory lasts, and a
`feed_forward_length` of 2³¹ asks for terabytes.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from wakeful.errors import WakefulError

_VERSIONS = (2, 3)
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4
_SIZES = ("embedding_length", "feed_forward_length")
"""Keys that determine the shapes of a model that is built from the header."""


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor's shape, fastest axis first, and where its bytes are in the file's data."""

    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class GGUFHeader:
    """Header of a GGUF file; of arrays only the length is read."""

    values: dict[str, int | float | bool | str]
    array_lengths: dict[str, int]
    tensors: dict[str, GGUFTensor]


def read_gguf_header(path: Path) -> GGUFHeader:
    """Return the header of a GGUF file (versions 2 and 3).

    Raises:
        WakefulError: the file cannot be read, is not a GGUF file, is cut off, or has a header whose
            counts and sizes do not fit the file.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read_header(_Reader(path, data))
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise WakefulError(f"{path} cannot be read as GGUF: {reason}") from None


class _Reader:
    """A position in a GGUF file, from which values are read and which cannot pass the end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.position = 0

    def damage_error(self, problem: str) -> WakefulError:
        return WakefulError(f"{self.path} is not a sound GGUF file: {problem}")

    def skip_bytes(self, count: int) -> int:
        """Move on by `count` bytes; return the position where they begin.

        Raises:
            WakefulError: the file has fewer bytes left.
        """
        start = self.position
        if count > len(self.data) - start:
            rest = len(self.data) - start
            raise self.damage_error(
                f"{count:,} bytes are announced from byte {start} on, of which {rest:,} exist"
            )
        self.position += count
        return start

    def read_number(self, code: str) -> int | float | bool:
        """Read a little-endian number; `code` is its format character in `struct`."""
        start = self.skip_bytes(struct.calcsize(f"<{code}"))
        return struct.unpack_from(f"<{code}", self.data, start)[0]

    def read_integer(self, code: str) -> int:
        return int(self.read_number(code))

    def read_text(self) -> str:
        """Read a string: its length in bytes (uint64), then UTF-8."""
        size = self.read_integer("Q")
        start = self.skip_bytes(size)
        # A token of a vocabulary may be a part of a character, which is no UTF-8.
        return self.data[start : start + size].decode("utf-8", "replace")


def _read_header(reader: _Reader) -> GGUFHeader:
    """Read the header from the start of a file, and check it against the file's size.

    Raises:
        WakefulError: the header is unsound.
    """
    if reader.data[:4] != b"GGUF":
        raise reader.damage_error("it does not begin with GGUF")
    reader.skip_bytes(4)
    version = reader.read_integer("I")
    if version not in _VERSIONS:
        raise reader.damage_error(f"its version is {version}, and 2 and 3 can be read")
    num_tensors, num_values = reader.read_integer("Q"), reader.read_integer("Q")
    header = GGUFHeader(values={}, array_lengths={}, tensors={})
    for _ in range(num_values):
        key = reader.read_text()
        if key in header.values or key in header.array_lengths:
            raise reader.damage_error(f"it has {key!r} twice")
        value_type = reader.read_integer("I")
        if value_type == _ARRAY:
            header.array_lengths[key] = _skip_array(reader, key)
        elif value_type == _STRING:
            header.values[key] = reader.read_text()
        elif value_type in _SCALARS:
            header.values[key] = reader.read_number(_SCALARS[value_type])
        else:
            raise reader.damage_error(f"{key!r} has the unknown type {value_type}")
    for _ in range(num_tensors):
        name = reader.read_text()
        if name in header.tensors:
            raise reader.damage_error(f"it has the tensor {name!r} twice")
        header.tensors[name] = _read_tensor_entry(reader, name)
    _check_data(reader, header)
    _check_sizes(reader, header)
    return header


def _skip_array(reader: _Reader, key: str) -> int:
    """Skip the array under a metadata key; return its length.

    Raises:
        WakefulError: the array is longer than the file, or has an unknown type.
    """
    item_type, length = reader.read_integer("I"), reader.read_integer("Q")
    if item_type == _STRING:
        # However large `length` is: each string takes at least eight bytes of the file.
        for _ in range(length):
            reader.skip_bytes(reader.read_integer("Q"))
    elif item_type in _SCALARS:
        reader.skip_bytes(length * struct.calcsize(f"<{_SCALARS[item_type]}"))
    else:
        raise reader.damage_error(f"{key!r} is an array of the unknown type {item_type}")
    return length


def _read_tensor_entry(reader: _Reader, name: str) -> GGUFTensor:
    """Read a tensor's shape, type and offset from the header.

    Raises:
        WakefulError: the type is unknown, or no tensor of it has this shape.
    """
    num_dimensions = reader.read_integer("I")
    if not 1 <= num_dimensions <= _MOST_DIMENSIONS:
        raise reader.damage_error(f"the tensor {name!r} has {num_dimensions} dimensions")
    shape = tuple(reader.read_integer("Q") for _ in range(num_dimensions))
    ggml_type, offset = reader.read_integer("I"), reader.read_integer("Q")
    try:
        block_length, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(ggml_type)]
    except ValueError:
        raise reader.damage_error(f"the tensor {name!r} has the unknown type {ggml_type}") from None
    count = math.prod(shape)
    if count == 0 or shape[0] % block_length:  # a row consists of whole blocks
        raise reader.damage_error(f"the tensor {name!r} cannot have the shape {shape}")
    return GGUFTensor(shape, offset, count // block_length * block_bytes)


def _check_data(reader: _Reader, header: GGUFHeader) -> None:
    """Raise `WakefulError` where a tensor's bytes would lie past the end of the file, or the
    alignment of the tensors' data is no power of two.
    """
    alignment = header.values.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise reader.damage_error(f"general.alignment is {alignment!r} and must be a power of two")
    data_start = math.ceil(reader.position / alignment) * alignment  # behind the header
    for name, tensor in header.tensors.items():
        end = data_start + tensor.offset + tensor.num_bytes
        if end > len(reader.data):
            raise reader.damage_error(
                f"the tensor {name!r} ends {end:,} bytes into a file of {len(reader.data):,}: it "
                "is cut off or damaged"
            )


def _check_sizes(reader: _Reader, header: GGUFHeader) -> None:
    """Raise `WakefulError` where the metadata has a width that no tensor has, or a number of layers
    above that of tensors: a model built from it might not fit into memory.
    """
    widths = {width for tensor in header.tensors.values() for width in tensor.shape}
    allowed = dict.fromkeys(_SIZES, widths) | {"block_count": range(1, len(header.tensors) + 1)}
    for key, value in header.values.items():
        # Keys are such as "llama.block_count".
        allowed_values = allowed.get(key.rsplit(".", 1)[-1])
        if allowed_values is None:
            continue
        if type(value) is not int or value not in allowed_values:
            raise reader.damage_error(f"{key!r} = {value!r} does not fit its tensors")
