"""Files of llama.cpp: embeddings among the layers that are quantized, and what is written."""

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
class Table:
    """An embedding (V, D) and the linear layers whose matrix it is."""

    embedding: nn.Embedding
    heads: tuple[nn.Module, ...]

    @cached_property
    def linear(self) -> nn.Linear:
        """The linear layer of the same matrix."""
        return _linear_of(self.embedding.weight)  # pyright: ignore[reportArgumentType]

    def replaced(self, form: QuantizedLinear) -> dict[int, nn.Module]:
        """Return modules of the dequantized matrix by the ids of those whose place they take."""
        weight = nn.Parameter(form.dequantized(), requires_grad=False)
        table = nn.Embedding(weight.shape[0], weight.shape[1], _weight=weight)
        return {id(self.embedding): table, **{id(head): _linear_of(weight) for head in self.heads}}


def _linear_of(weight: nn.Parameter) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = weight
    return linear


def tables_of(decoder: Decoder) -> dict[str, Table]:
    """Return the embedding of a decoder's tokens by its name."""
    tied = decoder.head.weight is decoder.embed.weight
    return {"embed": Table(decoder.embed, (decoder.head,) if tied else ())}


def save_for_llama_cpp(
    model: nn.Module,
    layers: Mapping[str, QuantizedLinear],
    path: Path,
    *,
    tokenizer: Tokenizer,
    name: str = "",
    lineage: str = "",
) -> None:
    """Write a decoder with these layers quantized, and all else in float16: as a GGUF file, or to
    NAME.txt the flags by which llama-quantize gives each matrix the same type.

    Raises:
        WakefulError: the file exists or cannot be read back, or no such file holds the decoder.
    """
    decoder = as_decoder(model)
    if decoder is None:
        raise WakefulError("a GGUF file holds what our decoder can be, which this model is not")
    if path.suffix == ".txt":
        types = {f"{name}.weight": f"Q{layer.grid.bits}_0" for name, layer in layers.items()}
        with replace_atomically(path) as part:
            part.write_text(llama_quantize_flags(decoder, types), "utf-8")
        return
    replaced: dict[int, nn.Module] = {}
    tables = tables_of(decoder)
    for layer_name, layer in layers.items():
        if layer_name in tables:
            replaced |= tables[layer_name].replaced(layer)
            continue
        own = decoder.get_submodule(layer_name)
        dense = copy.copy(own)
        dense._parameters = dict(own._parameters)
        dense.weight = nn.Parameter(layer.dequantized(), requires_grad=False)
        replaced[id(own)] = dense
    steps = {
        f"{layer_name}.weight": (layer.grid.bits, layer.operands.scales.scale)
        for layer_name, layer in layers.items()
    }
    dequantized = with_modules(decoder, replaced)
    assert isinstance(dequantized, Decoder)
    export_gguf(
        dequantized, path, tokenizer=tokenizer, storage="f16", name=name,
        lineage=lineage, steps=steps,
    )  # fmt: skip
