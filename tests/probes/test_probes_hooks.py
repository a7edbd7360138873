"""Watching leaves nothing behind, and refuses what it cannot see."""

import ast
import inspect
import re
from pathlib import Path

import pytest
import torch
import transformers
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from probes.architectures import Recorder, all_probes, batch, build
from wakeful.errors import WakefulError
from wakeful.hf.cache import CACHE
from wakeful.probes import __all__ as public
from wakeful.probes.attention import Sinks
from wakeful.probes.base import AttentionEvent
from wakeful.probes.rank import Ranks
from wakeful.probes.watch import watch


def snapshot(model):
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    return hooks, dict(ALL_ATTENTION_FUNCTIONS._local_mapping), model.config._attn_implementation


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
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


@pytest.mark.slow
def test_the_attention_function_takes_every_call_that_transformers_makes():
    """Modeling files call it in several ways, some with the mask by keyword, some with all."""
    with watch(build("Llama")):
        attend = inspect.signature(ALL_ATTENTION_FUNCTIONS["sdpa"])
    seen = set()
    for file in Path(transformers.__file__).parent.glob("models/*/modeling_*.py"):
        source = file.read_text("utf-8")
        for found in re.finditer(r"\battention_interface\(", source):
            call = call_at(source, found.start())
            named = {word.arg for word in call.keywords if word.arg}
            attend.bind(*call.args, **dict.fromkeys(named))
            seen.add((len(call.args), "attention_mask" in named, "query" in named))
    assert seen >= {(5, False, False), (4, True, False), (1, True, True)}


def call_at(source, start):
    """The call expression that begins here, read to its closing parenthesis."""
    depth, end = 1, source.index("(", start) + 1
    while depth:
        depth += {"(": 1, ")": -1}.get(source[end], 0)
        end += 1
    return ast.parse(source[start:end], mode="eval").body


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
        with watch(model, Sinks(), Ranks()):
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
        "does not go through",
    ),
    "FalconForCausalLM": (
        transformers.FalconConfig,
        {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
        "does not go through",
    ),
    "DogeForCausalLM": (
        transformers.DogeConfig,
        {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
         "num_attention_heads": 2},
        "position bias",
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
        watch(model, Sinks()),
    ):
        model(torch.randint(3, 61, (1, 9)))
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_bias_on_logits_is_refused():
    model, ids = build("Llama"), torch.randint(3, 61, (1, 9))
    mask = torch.full((9, 9), torch.finfo(torch.float32).min).triu(1).view(1, 1, 9, 9)
    with torch.no_grad(), watch(model, Sinks()):
        model(ids, attention_mask=mask)
    mask[..., 4, 2] = -1.5  # as ALiBi adds
    with pytest.raises(WakefulError, match="position bias"), torch.no_grad(), watch(model, Sinks()):
        model(ids, attention_mask=mask)


def test_caches_training_mode_and_other_implementations_are_refused():
    model, ids = build("Llama"), batch("none")["input_ids"]
    with torch.no_grad():
        cache = model(ids, use_cache=True).get(CACHE)
        with pytest.raises(WakefulError, match="whole sequences"), watch(model):
            model(ids[:, :1], **{CACHE: cache})
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


def test_every_probe_that_the_page_names_is_public():
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text("utf-8")
    table = page.partition("| probe | metrics |")[2].partition("\n\n")[0]
    cells = [row.split("|")[1] for row in table.splitlines() if "`" in row]
    named = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert "BosMass" in named
    assert named <= set(public)
