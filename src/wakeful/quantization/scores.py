"""Estimated cost of quantizing a layer, to second order in its output error, by one backward pass.

With ŷ_t = y_t + δ_t, the model's predictions differ from the full-precision ones by

    KL = ½ Σ_t δ_tᵀ H δ_t + O(δ³),   H = E (∂ℓ/∂y_t)(∂ℓ/∂y_t)ᵀ

the expectation over targets drawn from the model's own predictions: the Gauss-Newton matrix of the
loss, by the Fisher identity. The score keeps its diagonal over channels and tokens,

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
from wakeful.probes.running import logits_of
from wakeful.quantization.calibration import linear_product
from wakeful.quantization.formats import LayersByFormat
from wakeful.quantization.gguf_file import EmbeddingTable
from wakeful.quantization.gradients import capture_output_gradients
from wakeful.quantization.linear import weight_and_bias

Scores = Mapping[str, Mapping[str, float]]
"""Estimated cost in nats per token, by the names of format and layer."""


def score_formats(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    formats: LayersByFormat,
    text: Sequence[Int[Tensor, "B L"]],
    *,
    tables: Mapping[str, EmbeddingTable] | None = None,
    seed: int = 0,
) -> Scores:
    """Return the estimated cost of quantizing each layer to each format, in nats per token, by the
    names of format and layer.

    The model reads every batch of `text` twice: forward to draw targets, then forward and back.

    Args:
        model: the model in full precision.
        layers: its linear layers by name.
        formats: quantized versions of the layers, and of the embeddings in `tables`, by the names
            of format and layer.
        text: token ids.
        tables: embeddings to score too, by name. The cost of an output head that shares an
            embedding's weight is added to the embedding's.
        seed: seed of the tokens that are drawn from the model's predictions as targets.
    """
    tables = tables or {}
    # A tied head has the name of its embedding, under which both are quantized and scored.
    heads = {name: head for name, table in tables.items() for head in table.heads}
    linears = {**layers, **heads}
    device = next(model.parameters()).device
    target_generator = torch.Generator(device).manual_seed(seed)
    inputs: dict[tuple[str, int], Tensor] = {}  # of each layer's calls in this pass
    last_calls: dict[str, int] = {}  # each layer's last call in this pass, from 0
    scores = {name: dict.fromkeys(quantized, 0.0) for name, quantized in formats.items()}

    def store_input(name: str, args: tuple[Any, ...]) -> None:
        """Keep the input of a layer's call until the gradient of its output is known."""
        call = last_calls[name] = last_calls.get(name, -1) + 1
        inputs[name, call] = args[0].detach()

    @torch.no_grad()
    def score_call(name: str, call: int, gradient: Tensor) -> None:
        """Add ½ Σ g² δ² of one call of a linear layer, by the gradient (M, N) of its output."""
        x = inputs.pop((name, call))
        x_rows = widened(x.reshape(-1, x.shape[-1]))
        weight = widened(weight_and_bias(linears[name])[0].detach())
        for format_name, quantized in formats.items():
            if name not in quantized:
                continue
            layer = quantized[name]
            # Quantized inputs and outputs have errors too, and transformed inputs other weights.
            if layer.scheme.activations or layer.has_transformed_inputs:
                error = widened(layer.linear(x) - linear_product(linears[name], x))
                error = error.reshape(gradient.shape)
            else:
                error = x_rows @ (layer.dequantize() - weight).T
            scores[format_name][name] += 0.5 * float((gradient * error).square().sum())

    @torch.no_grad()
    def score_embedding(name: str, ids: Tensor, gradient: Tensor) -> None:
        """Add ½ Σ g² δ² of an embedding, by the gradient (B, L, D) of the embedded tokens."""
        if name not in tables:
            return
        embedded = widened(tables[name].embedding.weight.detach()[ids])
        for format_name, quantized in formats.items():
            if name in quantized:
                error = quantized[name].dequantize()[ids] - embedded
                scores[format_name][name] += 0.5 * float((gradient * error).square().sum())

    num_predicted = 0
    gradients = capture_output_gradients(
        model, linears, score_call, on_embedding_gradient=score_embedding
    )
    targets = [_draw_targets(model, tokens, target_generator) for tokens in text]
    with hooked(linears, before=store_input), gradients as run_forward_and_back:
        for tokens, targets_of_batch in zip(text, targets, strict=True):
            inputs.clear()
            last_calls.clear()
            run_forward_and_back(tokens, targets_of_batch)
            num_predicted += len(targets_of_batch)
    return {
        format_name: {name: total / num_predicted for name, total in totals.items()}
        for format_name, totals in scores.items()
    }


@torch.no_grad()
def _draw_targets(
    model: nn.Module, tokens: Int[Tensor, "B L"], generator: torch.Generator
) -> Int[Tensor, "P"]:
    """Return token ids drawn at random from the model's predictions, one for each predicted token.

    Every token but a sequence's first is predicted, so P = B · (L − 1).
    """
    logits = logits_of(model, tokens)[:, :-1].flatten(0, 1)
    return widened(logits).softmax(-1).multinomial(1, generator=generator).flatten()
