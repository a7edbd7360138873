"""Peak memory of `inherit` and `quantize` at 1B over the weights, each in its own process."""

import dataclasses
import subprocess
import sys
from collections.abc import Iterator

import torch

from benchmarks.resident import forget_peak, resident
from benchmarks.timing import Ratio
from wakeful.config.model import ModelConfig
from wakeful.inheritance.blocks import inherit_blocks
from wakeful.inheritance.layers import first
from wakeful.model.decoder import Decoder, without_matrices
from wakeful.model.initialize import set_parameter
from wakeful.quantization import quantize_module

LARGE = ModelConfig(
    num_layers=16, num_heads=32, num_kv_heads=8, width=2048, mlp_width=8192, vocab_size=128_256,
    max_length=2048, tied=True,
)  # fmt: skip
"""The shape of Llama 3.2 1B: 1.24B parameters."""
SMALL = dataclasses.replace(LARGE, num_layers=2, width=64, mlp_width=128, vocab_size=512)
"""For the benchmarks' own tests."""
WHAT = {
    "inherit": "inherit, half the layers", "fine": "quantize, fine", "w4": "quantize, w4",
}  # fmt: skip


def ratios(size: str = "large") -> Iterator[Ratio]:
    """Yield peak resident memory (its "seconds" are MB) over the weights that must be held.

    Those are the model's own, and the heir's or the quantized model's beside them.
    """
    for what, name in WHAT.items():
        command = [sys.executable, "-m", "benchmarks.peaks", what, size]
        peak, weights = map(float, subprocess.check_output(command, text=True).split()[-2:])
        yield Ratio(
            name=f"{name}, peak memory (MB)", peer="the weights of both models",
            ratio=peak / weights, low=peak / weights, high=peak / weights,
            seconds=peak, peer_seconds=weights, target="<= 1.30",
        )  # fmt: skip


@torch.no_grad()
def _peak(what: str, config: ModelConfig) -> tuple[float, float]:
    """Return how many MB the largest resident size grows by, and the MB of the weights."""
    before = resident()
    reference = _filled(config)
    forget_peak()
    if what == "inherit":
        layers = config.num_layers
        other: torch.nn.Module = inherit_blocks(reference, first(layers // 2, of=layers))
    else:
        other = quantize_module(reference.eval(), what)
    return resident("VmHWM") - before, _megabytes(reference, other)


def _filled(config: ModelConfig) -> Decoder:
    """Return a decoder with weights of no meaning, made once."""
    with without_matrices():
        decoder = Decoder(config)
    for name, parameter in list(decoder.named_parameters()):
        if parameter.is_meta:
            values = torch.empty(parameter.shape).uniform_(-0.02, 0.02)
            set_parameter(decoder, name, values)
    return decoder


def _megabytes(*models: torch.nn.Module) -> float:
    """Return the MB of what the models hold, shared storages counted once."""
    tensors = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(held.values()) / 2**20


if __name__ == "__main__":
    print(*_peak(sys.argv[1], SMALL if sys.argv[2] == "small" else LARGE))
