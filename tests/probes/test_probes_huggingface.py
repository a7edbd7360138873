"""Watching Transformers models: the weights of eager attention, and the model left as it was."""

import math

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from wakeful.errors import WakefulError
from wakeful.probes import exact
from wakeful.probes.base import AttentionEvent, HiddenEvent, Probe, gather
from wakeful.probes.blocks import BlockInfluence
from wakeful.probes.concentration import Entropy, Importance
from wakeful.probes.hidden import OutlierChannels, Outliers, Smoothing
from wakeful.probes.patterns import AttentionPictures, HiddenPicture
from wakeful.probes.rank import Rank
from wakeful.probes.sinks import FirstToken
from wakeful.probes.streaming import head_weights
from wakeful.probes.values import Values
from wakeful.probes.watch import watch

LLAMA = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NO_GQA = LLAMA | {"num_key_value_heads": 4}
GPT2 = {
    "vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

ARCHITECTURES = {
    "Llama": LLAMA,
    "Mistral": LLAMA | {"sliding_window": 6},
    "Qwen2": LLAMA,
    "Qwen3": LLAMA | {"head_dim": 16},
    "Gemma": LLAMA | {"head_dim": 8},
    "Gemma2": LLAMA
    | {"head_dim": 8, "sliding_window": 5, "attn_logit_softcapping": 0.05,
       "query_pre_attn_scalar": 4},
    "Gemma3Text": LLAMA
    | {"head_dim": 8, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "GPT2": GPT2,
    "GPT2-by-layer": GPT2 | {"scale_attn_by_inverse_layer_idx": True},
    "GPTNeoX": NO_GQA,
    "OPT": {
        "vocab_size": 61, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 64, "word_embed_proj_dim": 32,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    },
    "Phi": NO_GQA,
    "Phi3": LLAMA,
    "Falcon": {
        "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "alibi": False, "bos_token_id": 1, "eos_token_id": 2,
    },
    "StableLm": LLAMA,
    "Olmo2": LLAMA,
    "Starcoder2": LLAMA | {"sliding_window": 7},
    "Cohere": LLAMA,
    "Granite": LLAMA | {"attention_multiplier": 0.3},
    "SmolLM3": LLAMA,
    "GPTBigCode": GPT2,
    "Llama4Text": LLAMA
    | {"head_dim": 8, "attention_chunk_size": 8, "num_local_experts": 2,
       "intermediate_size_mlp": 32},
    "DeepseekV3": NO_GQA
    | {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
       "v_head_dim": 12, "n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1,
       "topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 2},
    "GptOss": LLAMA
    | {"head_dim": 8, "sliding_window": 6, "num_local_experts": 2, "num_experts_per_tok": 1},
}  # fmt: skip
EAGER_ONLY = {"Gemma2", "GptOss"}


def build(name, implementation="sdpa"):
    """The same random model each time, with large weights: attention far from uniform."""
    torch.manual_seed(7)
    config_class = getattr(transformers, name.split("-")[0] + "Config")
    config = config_class(**ARCHITECTURES[name])
    if name in EAGER_ONLY:
        implementation = "eager"
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=implementation, dtype=torch.float32
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.3)
        for block_name, parameter in model.named_parameters():
            if block_name.endswith("sinks"):
                parameter.normal_(0, 1)
    return model


class Recorder(Probe):
    def __init__(self):
        self.attention, self.hidden = {}, {}

    def see(self, event):
        if isinstance(event, AttentionEvent):
            self.attention[event.layer] = event
        elif isinstance(event, HiddenEvent):
            self.hidden[event.layer] = event

    def rows(self):
        return gather([])


def all_probes():
    return (
        FirstToken(), Entropy(), Importance(), Values(), Outliers(), Smoothing(), OutlierChannels(),
        BlockInfluence(), Rank(), HiddenPicture(),
        AttentionPictures(layers=range(2), heads=range(4), size=8),
    )  # fmt: skip


def batch(padding):
    ids = torch.randint(3, 61, (2, 23), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    if padding == "left":
        mask[1, :9] = 0
    if padding == "right":
        mask[1, 15:] = 0
    return {"input_ids": ids, "attention_mask": mask, "use_cache": False}


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
    rows = w.rows()
    assert set(rows["metric"]) >= {"rank", "entropy", "kurtosis", "first_key_share", "value_drain"}
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
    rows, real = w.rows(), inputs["attention_mask"].bool()
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

    check(value(1, "first_key_share", head=2), [exact.first_key_share(a)[2] for a in A])
    check(value(1, "first_key_mass"), [exact.first_key_mass(a).mean() for a in A])
    check(
        value(1, "first_key_mass", "without_row_0"),
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
    check(value(1, "rank", head=0), [exact.rank(a)[0] for a in A])
    check(value(1, "mass_columns", head=1), [exact.mass_columns(a)[1] for a in A])
    check(value(0, "kurtosis", position="first"), [exact.kurtosis(each)[0] for each in h])
    check(value(0, "kurtosis", position="rest"), [exact.kurtosis(each)[1:].mean() for each in h])
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
    largest = rows.filter(metric="outlier_channel", layer=0)["value"].max()
    assert largest == pytest.approx(max(each.abs().max().item() for each in h), rel=1e-4)


def snapshot(model):
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    return hooks, dict(ALL_ATTENTION_FUNCTIONS._local_mapping), model.config._attn_implementation


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "Falcon"])
def test_everything_is_gone_after_an_exception(name):
    class Fails(Recorder):
        def see(self, event):
            if isinstance(event, AttentionEvent) and event.layer == 1:
                raise RuntimeError("a probe failed")

    model = build(name)
    before = snapshot(model)
    with torch.no_grad():
        alone = model(**batch("none")).logits
        with pytest.raises(RuntimeError, match="a probe failed"), watch(model, Fails()):
            model(**batch("none"))
        assert snapshot(model) == before
        assert torch.equal(model(**batch("none")).logits, alone)


def test_watches_nest_and_do_not_see_other_models():
    one, other = build("Llama"), build("Mistral")
    outer, inner = Recorder(), Recorder()
    before = snapshot(one)
    with torch.no_grad(), watch(one, outer), watch(other, inner):
        one(**batch("none"))
        assert not inner.attention
        other(**batch("none"))
    assert outer.attention[0].window is None
    assert inner.attention[0].window == 6
    assert snapshot(one) == before


def test_gradients_and_autocast_are_the_models_own():
    model, inputs = build("Llama"), batch("none")
    alone = model(**inputs, labels=inputs["input_ids"]).loss
    alone.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with watch(model, *all_probes()):
        watched = model(**inputs, labels=inputs["input_ids"]).loss
        watched.backward()
    assert torch.equal(alone, watched)
    assert all(torch.equal(a, b.grad) for a, b in zip(gradients, model.parameters(), strict=True))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        alone = model(**inputs).logits
        with watch(model, FirstToken(), Rank()):
            assert torch.equal(model(**inputs).logits, alone)


UNSUPPORTED = {
    "MambaForCausalLM": (
        transformers.MambaConfig,
        {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4},
        "MambaForCausalLM can't be watched",
    ),
    "BloomForCausalLM": (
        transformers.BloomConfig,
        {"vocab_size": 61, "hidden_size": 16, "n_layer": 1, "n_head": 2},
        "neither through",
    ),
    "T5ForConditionalGeneration": (
        transformers.T5Config,
        {"vocab_size": 61, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2},
        "encoder-decoder",
    ),
    "BertModel": (
        transformers.BertConfig,
        {
            "vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
            "intermediate_size": 16,
        },
        "both directions",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_architectures_are_named_with_the_reason(name):
    config_class, options, reason = UNSUPPORTED[name]
    model = getattr(transformers, name)(config_class(**options)).eval()
    with (
        pytest.raises(WakefulError, match=reason) as caught,
        torch.no_grad(),
        watch(model, FirstToken()),
    ):
        model(torch.randint(3, 61, (1, 9)))
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_alibi_is_refused():
    config = transformers.FalconConfig(**(ARCHITECTURES["Falcon"] | {"alibi": True}))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    with (
        pytest.raises(WakefulError, match="position bias"),
        torch.no_grad(),
        watch(model, FirstToken()),
    ):
        model(**batch("none"))


def test_caches_training_mode_and_other_implementations_are_refused():
    model, ids = build("Llama"), batch("none")["input_ids"]
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
        with pytest.raises(WakefulError, match="whole sequences"), watch(model):
            model(ids[:, :1], past_key_values=cache)
    with pytest.raises(WakefulError, match="eval"), watch(model.train()):
        pass
    with (
        pytest.raises(WakefulError, match="flex_attention"),
        watch(build("Llama", "flex_attention")),
    ):
        pass
    with (
        pytest.raises(WakefulError, match="neither a wakeful Decoder"),
        watch(torch.nn.Linear(1, 1).eval()),
    ):
        pass
