"""Cost of a layer in a format, to second order in its output error, by one backward pass.

With ŷ_t = y_t + δ_t, the model's predictions move from its own by

    KL = ½ Σ_t δ_tᵀ H δ_t + O(δ³),   H = E (∂ℓ/∂y_t)(∂ℓ/∂y_t)ᵀ

over tokens that the model predicts itself: the Gauss-Newton matrix of the loss, by the Fisher
identity. The score keeps its diagonal over channels and tokens,

    ½ Σ_t Σ_n g_tn² δ_tn²,   g = ∂ℓ/∂y,   δ_t = (Ŵ − W) x_t, or ŷ_t − y_t of quantized inputs,

in nats per predicted token. It costs a forward and a backward pass for all layers and a product
for each layer and format, where the exact cost takes two forwards for each of them.

Shapes: M tokens, K input channels, N output channels.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from wakeful.model.finite import widened
from wakeful.model.hooks import hooked
from wakeful.probes.running import first_target
from wakeful.quantization.formats import Formats
from wakeful.quantization.gguf_file import Table
from wakeful.quantization.gradients import output_gradients
from wakeful.quantization.linear import matrix
from wakeful.quantization.observing import plain_linear

Scores = Mapping[str, Mapping[str, float]]
"""Nats per token by the names of formats and layers."""


def score_formats(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    formats: Formats,
    text: Sequence[Int[Tensor, "B L"]],
    *,
    tables: Mapping[str, Table] | None = None,
    seed: int = 0,
) -> Scores:
    """Return the scores of a model's layers in every format that they have a form of.

    Each tensor of `text` is read forward and back once; longer batches take fewer dequantizations
    and more memory. `tables` are embeddings, whose scores have their rows' part and that of heads
    of the same matrix. `seed` draws the tokens that the model predicts.
    """
    tables = tables or {}
    heads = {name: head for name, table in tables.items() for head in table.heads}
    layers = {**layers, **heads}
    device = next(model.parameters()).device
    labels = torch.Generator(device).manual_seed(seed)
    inputs: dict[tuple[str, int], Tensor] = {}
    calls: dict[str, int] = {}
    scores = {format_name: dict.fromkeys(forms, 0.0) for format_name, forms in formats.items()}

    def keep(name: str, args: tuple[Any, ...]) -> None:
        call = calls[name] = calls.get(name, -1) + 1
        inputs[name, call] = args[0].detach()

    def score(name: str, call: int, gradient: Tensor) -> None:
        x = inputs.pop((name, call))
        rows = widened(x.reshape(-1, x.shape[-1]))
        weight = widened(matrix(layers[name])[0].detach())
        with torch.no_grad():
            for format_name, forms in formats.items():
                if name in forms:
                    error = rows @ (forms[name].dequantized() - weight).T
                    if forms[name].scheme.activations:
                        error = widened(forms[name].linear(x) - plain_linear(layers[name], x))
                        error = error.reshape(gradient.shape)
                    scores[format_name][name] += 0.5 * float((gradient * error).square().sum())

    def score_rows(name: str, ids: Tensor, gradient: Tensor) -> None:
        if name not in tables:
            return
        rows = widened(tables[name].embedding.weight.detach()[ids])
        with torch.no_grad():
            for format_name, forms in formats.items():
                if name in forms:
                    error = forms[name].dequantized()[ids] - rows
                    scores[format_name][name] += 0.5 * float((gradient * error).square().sum())

    count = 0
    with (
        hooked(layers, before=keep),
        output_gradients(model, layers, score, on_rows=score_rows, labels=labels) as read,
    ):
        for tokens in text:
            inputs.clear()
            calls.clear()
            read(tokens)
            count += tokens.shape[0] * (tokens.shape[1] - first_target(model))
    return {
        format_name: {name: total / count for name, total in totals.items()}
        for format_name, totals in scores.items()
    }
