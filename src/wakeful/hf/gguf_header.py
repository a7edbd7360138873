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
        WakefulError: it is not a GGUF file, is cut off, or claims what its bytes cannot hold.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _header(_Reader(path, data))
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise WakefulError(f"{path} cannot be read as GGUF: {reason}") from None


class _Reader:
    """A place in the file that cannot move past its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.place = 0

    def fail(self, problem: str) -> WakefulError:
        return WakefulError(f"{self.path} is not a sound GGUF file: {problem}")

    def take(self, count: int) -> int:
        """Move on by `count` bytes and return where they begin."""
        start = self.place
        if count > len(self.data) - start:
            raise self.fail(f"byte {start} announces {count:,} more than the file has")
        self.place += count
        return start

    def number(self, code: str) -> int | float | bool:
        start = self.take(struct.calcsize(f"<{code}"))
        return struct.unpack_from(f"<{code}", self.data, start)[0]

    def count(self, code: str) -> int:
        return int(self.number(code))

    def text(self) -> str:
        size = self.count("Q")
        start = self.take(size)
        # Vocabularies hold pieces of letters, but names are text.
        return self.data[start : start + size].decode("utf-8", "replace")


def _header(reader: _Reader) -> GGUFHeader:
    if reader.data[:4] != b"GGUF":
        raise reader.fail("it does not begin with GGUF")
    reader.take(4)
    version = reader.count("I")
    if version not in _VERSIONS:
        raise reader.fail(f"its version is {version}, and 2 and 3 can be read")
    num_tensors, num_values = reader.count("Q"), reader.count("Q")
    header = GGUFHeader({}, {}, {})
    for _ in range(num_values):
        key = reader.text()
        if key in header.values or key in header.array_lengths:
            raise reader.fail(f"it has {key!r} twice")
        kind = reader.count("I")
        if kind == _ARRAY:
            header.array_lengths[key] = _skip_array(reader, key)
        elif kind == _STRING:
            header.values[key] = reader.text()
        elif kind in _SCALARS:
            header.values[key] = reader.number(_SCALARS[kind])
        else:
            raise reader.fail(f"{key!r} has the unknown type {kind}")
    for _ in range(num_tensors):
        name = reader.text()
        if name in header.tensors:
            raise reader.fail(f"it has the tensor {name!r} twice")
        header.tensors[name] = _tensor(reader, name)
    _check_data(reader, header)
    _check_sizes(reader, header)
    return header


def _skip_array(reader: _Reader, key: str) -> int:
    kind, length = reader.count("I"), reader.count("Q")
    if kind == _STRING:
        for _ in range(length):  # each takes eight bytes or more, so this ends with the file
            reader.take(reader.count("Q"))
    elif kind in _SCALARS:
        reader.take(length * struct.calcsize(f"<{_SCALARS[kind]}"))
    else:
        raise reader.fail(f"{key!r} is an array of the unknown type {kind}")
    return length


def _tensor(reader: _Reader, name: str) -> GGUFTensor:
    num_dimensions = reader.count("I")
    if not 1 <= num_dimensions <= _MOST_DIMENSIONS:
        raise reader.fail(f"the tensor {name!r} has {num_dimensions} dimensions")
    shape = tuple(reader.count("Q") for _ in range(num_dimensions))
    kind, offset = reader.count("I"), reader.count("Q")
    try:
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except ValueError:
        raise reader.fail(f"the tensor {name!r} has the unknown type {kind}") from None
    numbers = math.prod(shape)
    if numbers == 0 or shape[0] % block:
        raise reader.fail(f"the tensor {name!r} cannot have the shape {shape}")
    return GGUFTensor(shape, offset, numbers // block * size)


def _check_data(reader: _Reader, header: GGUFHeader) -> None:
    alignment = header.values.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise reader.fail(f"general.alignment is {alignment!r} and must be a power of two")
    begin = -(-reader.place // alignment) * alignment
    for name, tensor in header.tensors.items():
        end = begin + tensor.offset + tensor.num_bytes
        if end > len(reader.data):
            raise reader.fail(
                f"the tensor {name!r} ends {end:,} bytes into a file of {len(reader.data):,}: it "
                "is cut off or damaged"
            )


def _check_sizes(reader: _Reader, header: GGUFHeader) -> None:
    """Hold what a model's shapes come from to the shapes that are there."""
    widths = {width for tensor in header.tensors.values() for width in tensor.shape}
    allowed = dict.fromkeys(_SIZES, widths) | {"block_count": range(1, len(header.tensors) + 1)}
    for key, value in header.values.items():
        fit = allowed.get(key.rsplit(".", 1)[-1])
        if fit is not None and not (type(value) is int and value in fit):
            raise reader.fail(f"{key!r} = {value!r} does not fit its tensors")
