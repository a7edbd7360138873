"""Files for llama.cpp: quantized layers, embeddings included, written as GGUF."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torch import nn

from wakeful.data.tokenizer import Tokenizer
from wakeful.errors import WakefulError
from wakeful.hf.gguf_out import export_gguf, llama_quantize_flags
from wakeful.model.decoder import Decoder
from wakeful.probes.experts import with_modules
from wakeful.probes.running import as_decoder
from wakeful.quantization.linear import QuantizedLinear
from wakeful.runs.run import replace_atomically


@dataclass(frozen=True)
class EmbeddingTable:
    """An embedding (V, D) and the output heads that share its weight."""

    embedding: nn.Embedding
    heads: tuple[nn.Module, ...]

    @cached_property
    def linear(self) -> nn.Linear:
        """A linear layer whose weight is the embedding's."""
        return _linear_with_weight(self.embedding.weight)  # pyright: ignore[reportArgumentType]

    def replacements(self, quantized: QuantizedLinear) -> dict[int, nn.Module]:
        """Return replacements for the embedding and the heads, by the `id` of each: modules that
        share the dequantized weight of `quantized`.
        """
        weight = nn.Parameter(quantized.dequantize(), requires_grad=False)
        table = nn.Embedding(weight.shape[0], weight.shape[1], _weight=weight)
        heads = {id(head): _linear_with_weight(weight) for head in self.heads}
        return {id(self.embedding): table, **heads}


def _linear_with_weight(weight: nn.Parameter) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = weight
    return linear


def embedding_tables(decoder: Decoder) -> dict[str, EmbeddingTable]:
    """Return a decoder's token embedding by its name, with the output head where the two are
    tied.
    """
    tied = decoder.head.weight is decoder.embed.weight
    return {"embed": EmbeddingTable(decoder.embed, (decoder.head,) if tied else ())}


def save_for_llama_cpp(
    model: nn.Module,
    layers: Mapping[str, QuantizedLinear],
    path: Path,
    *,
    tokenizer: Tokenizer,
    name: str = "",
    lineage: str = "",
) -> None:
    """Write a decoder for llama.cpp: as NAME.gguf, or as NAME.txt the flags of llama-quantize.

    The quantized `layers`, by name, are written as they are, everything else in float16; the flags
    make llama-quantize give each matrix the same type. `name` and `lineage` go into the metadata of
    a .gguf file.

    Raises:
        WakefulError: the file exists or cannot be read back, or no such file can hold the model.
    """
    decoder = as_decoder(model)
    if decoder is None:
        raise WakefulError(
            "a GGUF file holds models that our decoder can express, and this model is not one"
        )
    if path.suffix == ".txt":
        types = {f"{name}.weight": f"Q{layer.grid.bits}_0" for name, layer in layers.items()}
        with replace_atomically(path) as part:
            part.write_text(llama_quantize_flags(decoder, types), "utf-8")
        return
    replacements: dict[int, nn.Module] = {}
    tables = embedding_tables(decoder)
    for layer_name, layer in layers.items():
        if layer_name in tables:
            replacements |= tables[layer_name].replacements(layer)
            continue
        original = decoder.get_submodule(layer_name)
        dequantized_layer = copy.copy(original)
        dequantized_layer._parameters = dict(original._parameters)  # else the original changes too
        dequantized_layer.weight = nn.Parameter(layer.dequantize(), requires_grad=False)
        replacements[id(original)] = dequantized_layer
    # Given the scales, the export computes the layers' codes from their dequantized weights.
    bits_and_scales = {
        f"{layer_name}.weight": (layer.grid.bits, layer.operands.scales.scale)
        for layer_name, layer in layers.items()
    }
    dequantized = with_modules(decoder, replacements)
    assert isinstance(dequantized, Decoder)
    export_gguf(
        dequantized, path, tokenizer=tokenizer, storage="f16", name=name,
        lineage=lineage, steps=bits_and_scales,
    )  # fmt: skip
