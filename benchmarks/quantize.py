"""Times of quantized models and layers against float32: whole texts and single tokens.

A layer alone stays in the processor's cache; the layers of a model do not, so that a token costs
what reading its weights costs, and small ones are read sooner.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel

from benchmarks.models import greedy
from benchmarks.timing import Ratio, compare
from wakeful.loading.load import load
from wakeful.quantization import SCHEMES
from wakeful.quantization.convert import quantize_module
from wakeful.quantization.linear import quantize_layer

SHAPES = ((576, 1536), (1536, 576))
TOKENS = (512, 1)
NEW = 24


@torch.inference_mode()
def ratios() -> Iterator[Ratio]:
    """Compare each scheme's integer path with full precision: SmolLM2, then its widest layers."""
    torch.manual_seed(0)
    yield from models()
    for tokens in TOKENS:
        layers = [nn.Linear(*shape, bias=False) for shape in SHAPES]
        inputs = [torch.randn(1, tokens, shape[0]) for shape in SHAPES]
        for name, scheme in SCHEMES.items():
            small = [quantize_layer(layer, scheme) for layer in layers]

            def run(chosen: Sequence[nn.Module], inputs: list[torch.Tensor] = inputs) -> None:
                for layer, x in zip(chosen, inputs, strict=True):
                    layer(x)

            yield compare(
                f"a layer, {name}, {tokens} tokens",
                lambda small=small: run(small),
                "float32",
                lambda layers=layers: run(layers),
                rounds=25,
            )


def models() -> Iterator[Ratio]:
    """Yield SmolLM2's forward pass over a text, and its generation, quantized over not."""
    whole = load("smollm2", device=torch.device("cpu"), dtype=torch.float32).module
    assert isinstance(whole, PreTrainedModel)
    text = torch.randint(whole.config.vocab_size, (1, TOKENS[0]))
    for name, scheme in SCHEMES.items():
        small = quantize_module(whole, scheme)
        for what, run in (
            (f"a text of {TOKENS[0]} tokens", lambda model: model(text, use_cache=False)),
            (f"{NEW} tokens one by one", lambda model: greedy(model, text[:, :16], NEW)),
        ):
            yield compare(
                f"SmolLM2, {name}, {what}",
                partial(run, small),
                "float32",
                partial(run, whole),
                rounds=7,
                target="<= 1.00",
            )
