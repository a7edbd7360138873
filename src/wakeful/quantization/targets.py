"""Engines, and the formats of weights among which each layer of a file for them may choose."""

from collections.abc import Mapping
from dataclasses import dataclass

from wakeful.quantization.schemes import Absmax, Scheme
from wakeful.quantization.schemes.grids import Ggml
from wakeful.quantization.schemes.methods import Gptq


@dataclass(frozen=True)
class Target:
    """Formats that an engine runs."""

    schemes: Mapping[str, Scheme]
    """By name, the smallest first."""
    full: str
    """What a layer that is not quantized is stored as."""
    fuses: bool = True
    """True where layers that it multiplies as one matrix take one format."""
    tables: bool = False
    """True where embeddings and the head are quantized, and counted, too."""


def _absmax(bits: int, group: int = 0) -> Absmax:
    return Absmax(bits=bits, per="channel", group=group, scale="bfloat16")


VLLM = Target(
    {
        **{
            f"W4A16 in groups of {group}": Scheme(weights=_absmax(4, group), method=Gptq())
            for group in (128, 64, 32)
        },
        "W8A16": Scheme(weights=_absmax(8)),
    },
    full="full precision",
)
"""Formats of weights that vLLM runs on any device, with scales of bfloat16."""
LLAMA_CPP = Target(
    {
        "Q4_0": Scheme(weights=Ggml(bits=4), method=Gptq()),
        "Q5_0": Scheme(weights=Ggml(bits=5), method=Gptq()),
        "Q8_0": Scheme(weights=Ggml(bits=8)),
    },
    full="F16",
    fuses=False,
    tables=True,
)
TARGETS = {"vllm": VLLM, "llama.cpp": LLAMA_CPP}
