"""What a cure costs SmolLM2 as it runs: a rotation online, a stored prefix, learned sinks."""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.timing import Ratio, compare
from wakeful.loading.load import load
from wakeful.model.decoder import Decoder
from wakeful.surgery import learned_sinks, rotate, store_prefix

LENGTHS = (512, 1)


@torch.inference_mode()
def ratios() -> Iterator[Ratio]:
    """Compare each cured forward with the uncured model's: of a text, and of one token."""
    torch.manual_seed(0)
    plain = load("smollm2", device=torch.device("cpu"), dtype=torch.float32).decoder()
    rows = torch.randint(plain.config.vocab_size, (1, 64))
    folded = rotate(plain, "hadamard")
    cures: dict[str, Callable[[], Decoder]] = {
        "rotation of the stream": lambda: folded,
        "rotations of stream and inner channels": partial(rotate, plain, "hadamard", inner=True),
        "stored BOS": partial(store_prefix, plain, [1]),
        "learned sinks": partial(learned_sinks, plain, 1, rows),
    }
    for name, make in cures.items():
        cured = make()
        for length in LENGTHS:
            text = torch.randint(plain.config.vocab_size, (1, length))
            yield compare(
                f"SmolLM2, {name}, tokens at once: {length}",
                partial(cured, text),
                "uncured",
                partial(plain, text),
                rounds=9,
                target="<= 1.05",
            )
