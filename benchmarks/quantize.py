"""Times of quantised layers against float32, at SmolLM2's shapes: whole texts and single tokens."""

from collections.abc import Iterator

import torch
from torch import nn

from benchmarks.timing import Ratio, compare
from wakeful.quant import SCHEMES
from wakeful.quant.linear import quantised

SHAPES = ((576, 1536), (1536, 576))
TOKENS = (512, 1)


@torch.inference_mode()
def ratios() -> Iterator[Ratio]:
    """Compare the integer path of each scheme with the full-precision layer."""
    torch.manual_seed(0)
    for tokens in TOKENS:
        layers = [nn.Linear(*shape, bias=False) for shape in SHAPES]
        inputs = [torch.randn(1, tokens, shape[0]) for shape in SHAPES]
        for name, scheme in SCHEMES.items():
            small = [quantised(layer, scheme, "integer") for layer in layers]

            def run(chosen: list[nn.Module], inputs: list[torch.Tensor] = inputs) -> None:
                for layer, x in zip(chosen, inputs, strict=True):
                    layer(x)

            yield compare(
                f"{name}, {tokens} tokens",
                lambda small=small: run(small),
                "float32",
                lambda layers=layers: run(layers),
                rounds=25,
            )
