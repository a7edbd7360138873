"""Scores of formats by the definition, in float64, and against the exact divergence."""

import pytest
import torch
from test_convert import llama
from torch import Tensor, nn

from helpers import some_tokens, tiny_decoder
from wakeful.model.hooks import hooked
from wakeful.probes.running import logits_of
from wakeful.quantization.convert import linear_layers
from wakeful.quantization.formats import quantize_layers
from wakeful.quantization.gguf_file import embedding_tables
from wakeful.quantization.linear import quantize_layer, weight_and_bias
from wakeful.quantization.schemes import parse_scheme
from wakeful.quantization.scores import score_formats

TOKENS = some_tokens(1, 6)
LAYER = "model.layers.0.mlp.gate_proj"


def log_probabilities(model: nn.Module, moved: Tensor | None = None) -> Tensor:
    """Return ln p (L − 1, V) with `moved` added to what LAYER puts out."""
    layer = {LAYER: model.get_submodule(LAYER)}
    with hooked(layer, after=lambda _n, _a, y: y if moved is None else y + moved):
        return logits_of(model, TOKENS)[0, :-1].log_softmax(-1)


def curvature(model: nn.Module) -> Tensor:
    """Return the diagonal of H, (L, N): Σ_s Σ_v p_sv (∂ ln p_sv / ∂y_tn)² by its definition."""
    moved = torch.zeros(
        6, weight_and_bias(model.get_submodule(LAYER))[0].shape[0], dtype=torch.float64
    )
    moved.requires_grad_()
    found = log_probabilities(model, moved)
    total = torch.zeros_like(moved)
    for row in found:
        for value in row:
            (gradient,) = torch.autograd.grad(value, moved, retain_graph=True)
            total += value.exp().detach() * gradient.square()
    return total


def divergence(model: nn.Module, moved: Tensor) -> float:
    """Return KL of the moved model from the model, summed over predicted tokens."""
    with torch.no_grad():
        p, q = log_probabilities(model), log_probabilities(model, moved)
    return float((p.exp() * (p - q)).sum())


def test_half_of_the_curvature_is_the_divergence_of_a_small_step() -> None:
    model = llama().double()
    diagonal = curvature(model)
    largest = diagonal.flatten().topk(5).indices
    for place in largest.tolist():
        moved = torch.zeros_like(diagonal).flatten()
        moved[place] = 1e-4
        expected = 0.5 * float(diagonal.flatten()[place]) * 1e-8
        assert divergence(model, moved.view_as(diagonal)) == pytest.approx(expected, rel=1e-2)


@pytest.mark.slow
def test_a_score_is_half_of_the_squared_error_times_the_curvature() -> None:
    model = llama().double()
    layers = linear_layers(model)
    grid = parse_scheme("scheme(weights=absmax(bits=4, per='channel', group=8))")
    formats = quantize_layers(model, layers, {"four": grid}, ())
    inputs: list[Tensor] = []
    with hooked({LAYER: layers[LAYER]}, before=lambda _n, x: inputs.append(x[0][0].detach())):
        log_probabilities(model)
    error = (
        formats["four"][LAYER].dequantize().double() - weight_and_bias(layers[LAYER])[0].detach()
    )
    exact = 0.5 * float((curvature(model) * (inputs[0] @ error.T).square()).sum()) / 5
    many = TOKENS.expand(4_000, -1)  # as many draws of what the model predicts
    scores = score_formats(model, layers, formats, [many[:2_000], many[2_000:]])
    assert scores["four"][LAYER] == pytest.approx(exact, rel=0.05)
    assert set(scores["four"]) == set(layers)


def test_scores_are_ordered_as_formats_are() -> None:
    model = tiny_decoder(dtype=torch.float32, width=32, mlp_width=64, head_width=8).eval()
    layers = linear_layers(model)
    schemes = {
        f"{bits} {group}": parse_scheme(
            f"scheme(weights=absmax(bits={bits}, per='channel', group={group}))"
        )
        for bits, group in ((4, 16), (6, 16), (8, 0), (4, 64))
    }
    formats = quantize_layers(model, layers, schemes, (), only_fitting=True)
    scores = score_formats(model, layers, formats, [some_tokens(4, 12)])
    four, six, eight, wide = (scores[scheme] for scheme in schemes)
    assert all(four[name] > six[name] > eight[name] > 0 for name in layers)
    assert wide.keys() == {name for name in layers if name.endswith("mlp.down")}
    again = score_formats(model, layers, formats, [some_tokens(4, 12)])
    assert again == scores
    assert all(parameter.grad is None for parameter in model.parameters())


def test_transformed_inputs_are_scored_by_the_output_of_the_layer() -> None:
    """Weights for inputs that are rotated or divided are no approximation of the layer's own."""
    model = tiny_decoder(dtype=torch.float32, width=32, mlp_width=64, head_width=8).eval()
    layers, text = linear_layers(model), [some_tokens(4, 12)]
    schemes = {
        name: parse_scheme(f"scheme(weights=absmax(bits={bits}, per='channel', group=16){option})")
        for name, bits, option in (
            ("four", 4, ""), ("eight", 8, ""), ("rotated", 8, ", rotation=16"),
            ("divided", 8, ", method=smooth"),
        )
    }  # fmt: skip
    formats = quantize_layers(model, layers, schemes, text)
    scores = score_formats(model, layers, formats, text)
    for name in layers:
        for scheme in ("rotated", "divided"):
            assert 0 < scores[scheme][name] < 4 * scores["eight"][name] < scores["four"][name]


def test_a_table_is_scored_by_its_rows_and_by_the_head_of_the_same_matrix() -> None:
    """The score of a small change is the divergence, of a tied and of an untied model."""
    for tied in (True, False):
        torch.manual_seed(0)
        model = tiny_decoder(dtype=torch.float64, tied=tied).eval()
        table = embedding_tables(model)["embed"]
        weight = table.embedding.weight
        moved = 1e-4 * torch.randn_like(weight)
        form = quantize_layer(table.linear, parse_scheme("scheme(weights=ggml(bits=8))"))
        form.dequantize = lambda weight=weight, moved=moved: (weight + moved).detach()
        text = [some_tokens(4, 12, seed=n) for n in range(8)]
        score = score_formats(model, {}, {"f": {"embed": form}}, text, tables={"embed": table})
        with torch.no_grad():
            before = [logits_of(model, tokens)[:, :-1].log_softmax(-1) for tokens in text]
            weight += moved
            after = [logits_of(model, tokens)[:, :-1].log_softmax(-1) for tokens in text]
        kl = [(p.exp() * (p - q)).sum(-1).mean() for p, q in zip(before, after, strict=True)]
        # The diagonal leaves the products of different channels and tokens out.
        assert score["f"]["embed"] == pytest.approx(float(sum(kl)) / 8, rel=0.35)
