"""Watching Transformers models: the weights of eager attention, and the model left as it was."""

import math

import pytest
import torch

from probes.architectures import ARCHITECTURES, Recorder, all_probes, batch, build
from wakeful.probes import exact
from wakeful.probes.streaming import head_weights
from wakeful.probes.watch import watch


@pytest.mark.slow
@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_weights_are_those_of_eager_attention(name, padding):
    model, eager = build(name), build(name, "eager")
    inputs = batch(padding)
    recorder = Recorder()
    with torch.no_grad():
        alone = model(**inputs).logits
        with watch(model, recorder, *all_probes()) as w:
            watched = model(**inputs).logits
        expected = eager(**inputs, output_attentions=True, output_hidden_states=True)
    real = inputs["attention_mask"].bool()
    assert torch.equal(watched, alone) or torch.equal(watched[real], alone[real])
    assert sorted(recorder.attention) == [0, 1]
    assert sorted(recorder.hidden) == [-1, 0, 1]
    for layer, event in recorder.attention.items():
        for b in range(2):
            weights = expected.attentions[layer][b][:, real[b]][:, :, real[b]]
            sequence, statistics = event.sequences[b], event.statistics[b]
            got = torch.stack([head_weights(sequence, head) for head in range(4)])
            torch.testing.assert_close(got, weights, rtol=1e-4, atol=1e-5)
            sums = {"rtol": 1e-4, "atol": 1e-5, "check_dtype": False}
            torch.testing.assert_close(statistics.column_sums, weights.sum(1), **sums)
            law = exact.attention_weights(
                sequence.q, sequence.k, scale=sequence.scale, window=sequence.window,
                softcap=sequence.softcap, sink=sequence.sink, keep=sequence.keep,
            )  # fmt: skip
            torch.testing.assert_close(law, got, rtol=1e-5, atol=1e-6)
    for layer in (-1, 0):
        hidden = recorder.hidden[layer]
        for b in range(2):
            torch.testing.assert_close(
                hidden.sequences[b],
                expected.hidden_states[layer + 1][b][real[b]],
                rtol=1e-3,
                atol=1e-4,
            )
    rows = w.frame
    assert set(rows["metric"]) >= {
        "rank",
        "entropy",
        "kurtosis",
        "first_key_share_with_row_0",
        "value_drain",
    }
    assert not rows["value"].is_nan().any()


def test_layers_of_linear_attention_show_their_stream_alone():
    kinds = {"layer_types": ["linear_attention", "full_attention"] * 2, "num_hidden_layers": 4}
    model = build("Qwen3_5Text", **kinds)
    eager = build("Qwen3_5Text", "eager", **kinds)
    recorder, inputs = Recorder(), batch("none")
    with torch.no_grad():
        with watch(model, recorder, *all_probes()) as w:
            model(**inputs)
        expected = eager(**inputs, output_hidden_states=True, output_attentions=True)
    assert sorted(recorder.attention) == [1, 3]
    assert sorted(recorder.hidden) == [-1, 0, 1, 2, 3]
    shown = [weights for weights in expected.attentions if weights is not None]
    for layer, weights in zip((1, 3), shown, strict=True):
        for b, sequence in enumerate(recorder.attention[layer].sequences):
            got = torch.stack([head_weights(sequence, head) for head in range(4)])
            torch.testing.assert_close(got, weights[b], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        torch.stack(recorder.hidden[2].sequences), expected.hidden_states[3], rtol=1e-3, atol=1e-4
    )
    rows = w.frame
    assert set(rows.filter(metric="rank")["layer"]) == {1, 3}
    assert not rows["value"].is_nan().any()


def test_windows_and_caps_reach_the_fast_path():
    for name, option in (("Mistral", "window"), ("Gemma2", "softcap"), ("GptOss", "sink")):
        recorder = Recorder()
        with torch.no_grad():
            model = build(name)
            with watch(model, recorder):
                model(**batch("left"))
        events = recorder.attention.values()
        assert any(getattr(event, option) is not None for event in events)
        assert all(event.keep is None for event in events)


def test_a_prefix_that_sees_itself_both_ways_is_kept_as_pairs():
    model, recorder = build("Llama"), Recorder()
    ids = batch("none")["input_ids"]
    pairs = torch.ones(23, 23, dtype=torch.bool).tril()
    pairs[:4, :4] = True
    mask = torch.zeros(1, 1, 23, 23).masked_fill(~pairs, -math.inf)
    with torch.no_grad(), watch(model, recorder):
        model(ids, attention_mask=mask.expand(2, -1, -1, -1), use_cache=False)
    assert torch.equal(recorder.attention[0].keep[0], pairs)


def test_rows_are_means_over_sequences_of_the_definitions():
    model, inputs = build("Llama"), batch("left")
    with torch.no_grad():
        expected = build("Llama", "eager")(
            **inputs, output_attentions=True, output_hidden_states=True
        )
        with watch(model, *all_probes()) as w:
            model(**inputs)
    rows, real = w.frame, inputs["attention_mask"].bool()
    A = [expected.attentions[1][b][:, real[b]][:, :, real[b]] for b in range(2)]
    h = [expected.hidden_states[1][b][real[b]] for b in range(2)]
    x = [expected.hidden_states[0][b][real[b]] for b in range(2)]

    def value(layer, metric, variant="paper", position="all", head=None):
        found = rows.filter(layer=layer, metric=metric, variant=variant, position=position)
        found = found.filter(found["head"].is_null() if head is None else found["head"] == head)
        row = found.row(0, named=True)
        return row["value"], row["standard_error"]

    def check(got, each):
        each = torch.stack([torch.as_tensor(number) for number in each]).double()
        assert got[0] == pytest.approx(each.mean().item(), rel=1e-4)
        assert got[1] == pytest.approx(each.std().item() / 2**0.5, rel=1e-3, abs=1e-6)

    check(value(1, "first_key_share_with_row_0", head=2), [exact.first_key_share(a)[2] for a in A])
    check(
        value(1, "first_key_share_without_row_0", head=2),
        [(a[2, 1:].argmax(-1) == 0).double().mean() for a in A],
    )
    check(value(1, "first_key_mass_with_row_0"), [exact.first_key_mass(a).mean() for a in A])
    check(
        value(1, "first_key_mass_without_row_0"),
        [exact.first_key_mass(a, with_row_0=False).mean() for a in A],
    )
    check(
        value(1, "entropy", "code"), [exact.entropy(exact.token_importance(a.mean(0))) for a in A]
    )
    check(
        value(1, "entropy", "per_head", head=3),
        [exact.entropy(exact.token_importance(a))[3] for a in A],
    )
    check(
        value(1, "top_importance", "code", "2"),
        [exact.top_importance(exact.token_importance(a.mean(0)), 2) for a in A],
    )
    for variant, head, each in (
        ("code", None, [a.mean((0, 1)) for a in A]),
        ("per_head", 1, [a[1].mean(0) for a in A]),
    ):
        check(value(1, "importance", variant, "first", head), [a[0] for a in each])
        check(value(1, "importance", variant, "rest", head), [a[1:].mean() for a in each])
    check(value(1, "rank", head=0), [exact.rank(a)[0] for a in A])
    check(value(1, "mass_columns", head=1), [exact.mass_columns(a)[1] for a in A])
    check(value(0, "kurtosis", position="first"), [exact.kurtosis(each)[0] for each in h])
    check(value(0, "kurtosis", position="rest"), [exact.kurtosis(each)[1:].mean() for each in h])
    ratios = [e.abs().amax(1) ** 2 / (e**2).sum(1) for e in h]
    check(value(0, "norm_ratio", position="first"), [each[0] for each in ratios])
    check(value(0, "norm_ratio", position="rest"), [each[1:].mean() for each in ratios])
    check(value(0, "max_activation", "largest", "rest"), [exact.max_activation(e[1:]) for e in h])
    check(
        value(0, "max_activation", position="rest"),
        [exact.token_max_activation(e)[1:].mean() for e in h],
    )
    check(value(0, "token_similarity"), [exact.token_similarity(each) for each in h])
    check(value(0, "residual_peak", position="first"), [exact.residual_peak(each) for each in h])
    recorder = Recorder()
    with torch.no_grad(), watch(model, recorder):
        model(**inputs)
    v = [sequence.v for sequence in recorder.attention[1].sequences]
    joined = [each.transpose(0, 1).flatten(1) for each in v]
    check(value(1, "value_eigenvalue", position="1"), [exact.value_spectrum(e)[0] for e in joined])
    check(
        value(1, "value_eigenvalue", "per_head", "1", head=1),
        [exact.value_spectrum(e)[1, 0] for e in v],
    )
    check(
        value(1, "value_spectrum", position="3"),
        [(s := exact.value_spectrum(e))[2] / s[0] for e in joined],
    )
    check(value(1, "value_drain", position="first"), [exact.value_drain(e) for e in joined])
    check(
        value(1, "value_drain", "per_head", "first", head=0), [exact.value_drain(e)[0] for e in v]
    )
    pairs = list(zip(x, h, strict=True))
    check(value(0, "block_influence"), [exact.block_influence(a, b) for a, b in pairs])
    check(
        value(0, "angular_distance", position="last"),
        [exact.angular_distance(a, b) for a, b in pairs],
    )
    cosines = [(a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1)) for a, b in pairs]
    angles = [each.arccos() / math.pi for each in cosines]
    check(value(0, "angular_distance", "all_tokens"), [each.mean() for each in angles])
    largest = rows.filter(metric="outlier_channel", layer=0)["value"].max()
    assert largest == pytest.approx(max(each.abs().max().item() for each in h), rel=1e-4)
