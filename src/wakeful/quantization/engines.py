"""Weight formats of the engines vLLM and llama.cpp, from which a layer's format is chosen."""

from collections.abc import Mapping
from dataclasses import dataclass

from wakeful.quantization.schemes import Absmax, Scheme
from wakeful.quantization.schemes.gptq import Gptq
from wakeful.quantization.schemes.grids import Ggml


@dataclass(frozen=True)
class EngineFormats:
    """Weight formats that an engine runs."""

    schemes: Mapping[str, Scheme]
    """Formats by name, the smallest first."""
    full_precision: str
    """Name of the format of layers that are not quantized."""
    fuses_layers: bool = True
    """True where layers that the engine multiplies as one matrix must share a format."""
    quantizes_embeddings: bool = False
    """True where embeddings and the head are quantized too and count toward the budget."""


def _absmax_per_channel(bits: int, group: int = 0) -> Absmax:
    return Absmax(bits=bits, per="channel", group=group, scale="bfloat16")


VLLM = EngineFormats(
    {
        **{
            f"W4A16 in groups of {group}": Scheme(
                weights=_absmax_per_channel(4, group), method=Gptq()
            )
            for group in (128, 64, 32)
        },
        "W8A16": Scheme(weights=_absmax_per_channel(8)),
    },
    full_precision="full precision",
)
"""Formats of weights that vLLM runs on any device, with scales of bfloat16."""
LLAMA_CPP = EngineFormats(
    {
        "Q4_0": Scheme(weights=Ggml(bits=4), method=Gptq()),
        "Q5_0": Scheme(weights=Ggml(bits=5), method=Gptq()),
        "Q8_0": Scheme(weights=Ggml(bits=8)),
    },
    full_precision="F16",
    fuses_layers=False,
    quantizes_embeddings=True,
)
ENGINES = {"vllm": VLLM, "llama.cpp": LLAMA_CPP}
