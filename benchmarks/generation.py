"""Generation of SmolLM2 with our cache against Transformers' `generate`, greedy, on one prompt."""

import dataclasses
from collections.abc import Iterator

import torch
from transformers import AutoModelForCausalLM

from benchmarks.models import greedy
from benchmarks.timing import Ratio, compare
from wakeful.config.model import ModelConfig
from wakeful.hf import as_transformers
from wakeful.hf.checkpoint_reader import smollm2_folder
from wakeful.loading.load import read_decoder
from wakeful.model.decoder import Decoder
from wakeful.model.generate import generate_tokens

PROMPT, NEW = 128, 32


@torch.inference_mode()
def ratios() -> Iterator[Ratio]:
    """Yield the time a token takes against Transformers' Llama, and the bytes of each cache."""
    folder = smollm2_folder()
    decoder = read_decoder(folder).decoder()
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    shell = as_transformers(decoder)
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(decoder.config.vocab_size, (1, PROMPT), generator=generator)

    def ours() -> list[int]:
        return list(generate_tokens(decoder, prompt[0].tolist(), num_tokens=NEW, temperature=0))

    def through(model: torch.nn.Module) -> list[int]:
        return greedy(model, prompt, NEW)[0].tolist()

    assert ours() == through(theirs) == through(shell)
    for name, run in (("our loop", ours), ("generate() of our class", lambda: through(shell))):
        yield compare(
            name, run, "Transformers' Llama", lambda: through(theirs), rounds=7, target="<= 1.00"
        )
    yield from _bytes(decoder.config)


def _bytes(config: ModelConfig) -> Iterator[Ratio]:
    """Yield the bytes of live caches of this shape against the vanilla one (its "seconds")."""
    layers = config.num_layers
    vanilla = _cache_bytes(config)
    for route, wanted in (("svformer", (layers + 1) / (2 * layers)), ("cla", 0.5)):
        size = _cache_bytes(dataclasses.replace(config, route=route))
        ratio = size / vanilla
        yield Ratio(
            name=f"cache of {route}, bytes",
            peer="vanilla",
            ratio=ratio,
            low=ratio,
            high=ratio,
            seconds=size,
            peer_seconds=vanilla,
            target=f"= {wanted:.3f}",
        )


def _cache_bytes(config: ModelConfig) -> int:
    with torch.device("meta"):
        model = as_transformers(Decoder(config))
    return model.to_empty(device="cpu").new_cache(1, PROMPT + NEW).num_bytes
