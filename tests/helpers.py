"""Small models and the list of every variant, for all tests."""

import copy
import importlib
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from packaging.version import Version
from torch import Tensor

from wakeful.config.model import ModelConfig
from wakeful.model.decoder import Decoder
from wakeful.model.initialize import initialize
from wakeful.optim.axes import Line
from wakeful.variants import variants_by_name

FIELD = {
    "routes": "route",
    "depth": "depth",
    "normalizers": "normalizer",
    "norms": "norm",
    "placements": "placement",
    "embeddings": "embedding",
}
"""The field of `ModelConfig` that names a variant of each folder."""

EXAMPLES = [
    (folder, expression)
    for folder in FIELD
    for kind in variants_by_name(folder).values()
    for expression in kind.examples
]
NEUTRALS = [
    (folder, kind.neutral)
    for folder in FIELD
    for kind in variants_by_name(folder).values()
    if kind.neutral is not None
]


@contextmanager
def rivals() -> Iterator[None]:
    """Make variants of the files in `tests/rivals`, whose folders are called as the package's."""
    place = Path(__file__).parent / "rivals"
    packages = [importlib.import_module(f"wakeful.{folder.name}") for folder in place.iterdir()]
    paths = [list(package.__path__) for package in packages]
    for package in packages:
        package.__path__.append(str(place / package.__name__.rpartition(".")[2]))
    variants_by_name.cache_clear()
    try:
        yield
    finally:
        for package, path in zip(packages, paths, strict=True):
            package.__path__[:] = path
        for name, module in list(sys.modules.items()):
            if str(place) in str(getattr(module, "__file__", "")):
                del sys.modules[name]
        variants_by_name.cache_clear()


def tiny_config(**overrides: Any) -> ModelConfig:
    """Four layers, grouped heads (H = 4, G = 2) and weights large enough to matter."""
    defaults: dict[str, Any] = {
        "vocab_size": 29,
        "max_length": 24,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "width": 16,
        "head_width": 8,
        "mlp_width": 20,
        "init_std": 0.4,
    }
    return ModelConfig(**(defaults | overrides))


def tiny_decoder(
    *, dtype: torch.dtype = torch.float64, noise: float = 0.2, seed: int = 0, **overrides: Any
) -> Decoder:
    """Return a decoder whose every parameter, a route's own included, is off its start.

    `noise` 0 leaves the parameters where their definitions start them.
    """
    decoder = initialize(Decoder(tiny_config(**overrides)), seed).to(dtype)
    if noise:
        generator = torch.Generator().manual_seed(seed + 1)
        with torch.no_grad():
            for parameter in decoder.parameters():
                drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(drawn.to(dtype), alpha=noise)
    return decoder


def some_tokens(batch: int, length: int, *, vocab_size: int = 29, seed: int = 3) -> Tensor:
    """Return token ids (batch, length)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (batch, length), generator=generator)


def exact_loss(decoder: Decoder, tokens: Tensor) -> Tensor:
    """Return the mean next-token loss from all logits at once, in the decoder's own precision."""
    logits = decoder(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def gradients(decoder: Decoder, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Return the next-token loss and its gradient by every parameter."""
    decoder.zero_grad(set_to_none=True)
    loss = exact_loss(decoder, tokens)
    loss.backward()
    found = {
        name: None if p.grad is None else p.grad.clone() for name, p in decoder.named_parameters()
    }
    return loss.detach(), found


EIGHT_BITS = "scheme(weights=absmax(bits=8, per='channel'))"


@torch.no_grad()
def with_eight_bits(decoder: Decoder, layers: Iterable[str]) -> Decoder:
    """Return a copy whose layers have the nearest multiples of max|w| / 127 in each row w."""
    made = copy.deepcopy(decoder)
    for name in layers:
        weight = made.get_parameter(f"{name}.weight")
        step = weight.abs().amax(1, keepdim=True) / 127
        weight.copy_(torch.round(weight / step) * step)
    return made


WRITERS = (".attention.out.weight", ".mlp.down.weight", "norm.up", "embedding.first.weight")
"""Ends of the names of matrices that write to the residual stream."""


def assert_rotated_along(width: int, line: Line, entry: list[dict[str, Any]]) -> None:
    """Assert what OrthoAdam rotates of a decoder's parameter, by its name and shape alone.

    What writes to the stream is rotated on axis 0, every other matrix on axis 1, and what is not as
    wide as the stream there (gates of some channels, tables of values, coefficients) not at all. No
    other width may be the stream's. Checkpoints were written so.
    """
    axis = int(not line.name.endswith(WRITERS))
    rotated = len(line.shape) == 2 and line.shape[axis] == width
    assert line.axes == ((axis,) if rotated else ()), line
    rotation = {"kind": "hadamard", "seed": 0, "name": line.name, "axis": axis, "width": width}
    assert entry == [rotation] * rotated


def since(version: str, what: str) -> pytest.MarkDecorator:
    """Skip a test where Transformers is older than the version that does what it asks for."""
    old = Version(transformers.__version__) < Version(version)
    return pytest.mark.skipif(old, reason=f"Transformers before {version}: {what}")
