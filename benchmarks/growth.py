"""How time grows with length, depth and width: the ratio to the same peer at every size.

A ratio that stays the same grows as its peer does. The seconds beside it show the growth itself.
"""

from collections.abc import Iterator

import torch

from benchmarks.models import Llama, Ours, Shape, attention_passes, random_tokens, training_step
from benchmarks.timing import Ratio, compare

LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
DEPTHS = (2, 4, 8, 16, 32)
WIDTHS = (128, 256, 512, 1024)
HEADS, HEAD_WIDTH = 8, 64
RESFORMER = 'resformer(mode="learnable")'


def ratios() -> Iterator[Ratio]:
    """Yield ratios of attention over length, and of whole training steps over all three."""
    for length in LENGTHS:
        yield _attention(length)
    for length in LENGTHS:
        yield from _steps(f"L={length}", Shape(2, 4, 256, 896, 1024, length), 1)
    for depth in DEPTHS:
        yield from _steps(f"{depth} layers", Shape(depth, 4, 256, 896, 1024, 256), 2)
    for width in WIDTHS:
        shape = Shape(4, width // 64, width, width * 7 // 2, 1024, 256)
        yield from _steps(f"width {width}", shape, 2)


def _attention(length: int) -> Ratio:
    torch.manual_seed(0)
    heads = [torch.randn(1, length, HEADS, HEAD_WIDTH, requires_grad=True) for _ in range(3)]
    ours, theirs = attention_passes(heads, torch.randn_like(heads[0]))
    return compare(f"softmax-1, L={length}", ours, "plain SDPA", theirs, rounds=_rounds(length))


def _steps(what: str, shape: Shape, batch: int) -> Iterator[Ratio]:
    tokens = random_tokens(shape, batch, shape.max_length)
    vanilla = training_step(Ours(shape), tokens)
    rounds = _rounds(shape.max_length)
    yield compare(
        f"vanilla, {what}", vanilla, "Transformers Llama",
        training_step(Llama(shape), tokens), rounds=rounds, target="<= 1.00",
    )  # fmt: skip
    resformer = training_step(Ours(shape, route=RESFORMER), tokens)
    yield compare(f"ResFormer, {what}", resformer, "our vanilla", vanilla, rounds=rounds)


def _rounds(length: int) -> int:
    return 15 if length <= 1024 else 7
