"""The damage against its definitions, computed another way."""

import math

import polars as pl
import pytest
import torch
from test_convert import gpt2

from helpers import some_tokens, tiny_decoder
from wakeful.probes import exact
from wakeful.quantization import quantize_module, quantized_layers
from wakeful.quantization.measure import Measurement, Totals, measure_damage, relative_errors

SEQUENCES = [some_tokens(1, 13, seed=n) for n in range(4)]


def decoder(**over: object):
    return tiny_decoder(dtype=torch.float32, **over).eval()


def value(frame: pl.DataFrame, **wanted: object) -> float:
    found = frame.filter(*(pl.col(name) == each for name, each in wanted.items()))
    assert len(found) == 1
    return found["value"].item()


def test_perplexity_and_divergence_are_their_definitions() -> None:
    model = decoder()
    small = quantize_module(model, "coarse")
    found = measure_damage("tiny", model, {"coarse": small}, SEQUENCES)
    nll, other, divergence = [], [], []
    with torch.inference_mode():
        for tokens in SEQUENCES:
            p, q = (m(tokens)[0, :-1].double().softmax(-1) for m in (model, small))
            targets = tokens[0, 1:]
            places = torch.arange(12)
            nll.append(-p[places, targets].log().sum().item())
            other.append(-q[places, targets].log().sum().item())
            divergence.append((p * (p / q).log()).sum().item())
    assert found.counts == [12] * 4
    assert found.perplexity()[0] == pytest.approx(math.exp(sum(nll) / 48), rel=1e-5)
    assert found.perplexity("coarse")[0] == pytest.approx(math.exp(sum(other) / 48), rel=1e-5)
    assert found.divergence("coarse")[0] == pytest.approx(sum(divergence) / 48, rel=1e-4)
    increase = math.exp(sum(other) / 48) - math.exp(sum(nll) / 48)
    assert found.perplexity_increase("coarse")[0] == pytest.approx(increase, rel=1e-4)
    loss = (sum(other) - sum(nll)) / 48
    assert found.loss_increase("coarse")[0] == pytest.approx(loss, rel=1e-4)


def test_errors_are_the_delta_methods() -> None:
    """Against the jackknife over sequences, which knows no formula."""
    generator = torch.Generator().manual_seed(0)
    size = 400
    counts = torch.randint(20, 40, (size,), generator=generator)
    hard = torch.rand(size, generator=generator)
    full = (counts * (2 + 0.3 * hard)).tolist()
    more = (counts * (2.1 + 0.5 * hard)).tolist()

    def at(keep: slice | list[int]) -> tuple[float, float, float]:
        index = torch.arange(size)[keep]
        total = counts[index].sum().item()
        a, b = (sum(x[i] for i in index.tolist()) / total for x in (full, more))
        return math.exp(a), math.exp(b) - math.exp(a), b - a

    left_out = torch.tensor([at([i for i in range(size) if i != n]) for n in range(size)]).double()
    spread = (left_out - left_out.mean(0)).square().sum(0)
    jackknife = ((size - 1) / size * spread).sqrt().tolist()
    found = Measurement("x", counts.tolist(), Totals(full), {"s": Totals(more)}, pl.DataFrame())
    for estimate, expected in zip(
        (found.perplexity(), found.perplexity_increase("s"), found.loss_increase("s")),
        jackknife,
        strict=True,
    ):
        assert estimate[1] == pytest.approx(expected, rel=0.02)
    # The two models share their sequences: unpaired errors would be far larger.
    assert found.perplexity_increase("s")[1] < 0.8 * math.hypot(found.perplexity()[1],
                                                     found.perplexity("s")[1])  # fmt: skip


def test_one_sequence_has_no_error() -> None:
    model = decoder()
    found = measure_damage("tiny", model, {"fine": quantize_module(model, "fine")}, SEQUENCES[:1])
    for estimate in (
        found.perplexity(),
        found.perplexity_increase("fine"),
        found.divergence("fine"),
    ):
        assert math.isnan(estimate[1])
    assert found.layers["standard_error"].null_count() == len(found.layers)


def test_a_model_that_is_no_different_is_not_damaged() -> None:
    model = decoder()
    found = measure_damage("tiny", model, {"same": model}, SEQUENCES)
    assert found.perplexity_increase("same") == (0.0, 0.0)
    assert found.divergence("same") == (0.0, 0.0)
    assert "relative_error" not in set(found.layers["metric"])


@pytest.mark.parametrize("kind", ["decoder", "gpt2"])
def test_layer_errors_are_of_the_full_precision_input(kind: str) -> None:
    model = decoder(tied=True) if kind == "decoder" else gpt2()
    inner = "blocks.2.attention.value" if kind == "decoder" else "transformer.h.1.mlp.c_fc"
    small = quantize_module(model, "moderate")
    found = measure_damage("tiny", model, {"moderate": small}, SEQUENCES).layers
    names = set(found.filter(pl.col("metric") == "relative_error")["module"])
    assert names == set(quantized_layers(small))
    inputs: list[torch.Tensor] = []
    layer = model.get_submodule(inner)
    handle = layer.register_forward_pre_hook(lambda _m, args: inputs.append(args[0][0]))
    with torch.inference_mode():
        for tokens in SEQUENCES:
            model(tokens)
        handle.remove()
        weight = layer.weight if kind == "decoder" else layer.weight.T
        errors, kurtosis = [], []
        for x in inputs:
            y = x @ weight.T + (0 if layer.bias is None else layer.bias)
            s, t = x.abs().max() / 127, weight.abs().max() / 127
            y_q = (x / s).round() * s @ ((weight / t).round() * t).T
            y_q = y_q + (0 if layer.bias is None else layer.bias)
            errors.append(((y_q - y)[1:].norm() / y[1:].norm()).item())
            kurtosis.append(exact.kurtosis(x[1:]).mean().item())
    mean = sum(errors) / 4
    assert value(
        found, module=inner, metric="relative_error", position="rest", scheme="moderate"
    ) == pytest.approx(mean, rel=1e-3)
    assert value(found, module=inner, metric="input_kurtosis", position="rest") == pytest.approx(
        sum(kurtosis) / 4, rel=1e-4
    )
    row = found.filter(pl.col("module") == inner).row(0, named=True)
    assert row["layer"] == (2 if kind == "decoder" else 1)
    assert row["kind"] == ("attention.value" if kind == "decoder" else "mlp.c_fc")


def test_relative_errors_by_hand() -> None:
    true = torch.tensor([[3.0, 4.0], [0.0, 2.0], [0.0, 0.0]])
    found = torch.tensor([[3.0, 4.5], [0.0, 2.0], [1.0, 0.0]])
    assert relative_errors(found, true) == pytest.approx(
        {"first": 0.1, "rest": 0.5, "all": math.sqrt(1.25 / 29)}
    )


def test_hooks_are_gone_after_a_failure() -> None:
    model = decoder()
    broken = quantize_module(model, "fine")
    broken.blocks[1].mlp.up.scheme = None
    with pytest.raises(AttributeError):
        measure_damage("tiny", model, {"fine": broken}, SEQUENCES)
    for module in (*model.modules(), *broken.modules()):
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


@pytest.mark.slow
def test_a_projected_models_head_is_compared_with_what_it_is_folded_into() -> None:
    model = decoder(embedding="projected")
    small = quantize_module(model, "scheme(weights=absmax(bits=8, per='channel'))")
    name = str(small.get_submodule("head").scheme)  # pyright: ignore[reportAttributeAccessIssue]
    found = measure_damage("tiny", model, {name: small}, SEQUENCES).layers
    assert set(found.filter(pl.col("metric") == "relative_error")["module"]) == set(
        quantized_layers(small)
    )
    assert value(found, module="head", metric="relative_error", position="all") < 0.02
