"""Masks that are given to softmax-1 directly, and what it refuses."""

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM

from helpers import some_tokens
from hf.softmax1_models import build
from wakeful.errors import WakefulError
from wakeful.hf.softmax1 import check_softmax1, softmax1_attention_forward
from wakeful.variants.implementations import SOFTMAX1


class Module(torch.nn.Module):
    is_causal = True


def given_heads(queries: int, keys: int):
    shapes = (2, 4, queries, 8), (2, 2, keys, 8), (2, 2, keys, 8)
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def plainly(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    e = torch.exp(q @ k.mT * 8**-0.5) * keep
    return (e / (1 + e.sum(-1, keepdim=True)) @ v).transpose(1, 2)


def test_masks_of_either_kind_say_the_same():
    q, k, v = given_heads(3, 5)
    keep = torch.rand(2, 1, 3, 5) < 0.5
    keep[1, 0, 1] = False  # one query sees nothing
    expected = plainly(q, k, v, keep)
    assert (expected[1, 1] == 0).all()
    least = torch.finfo(torch.float64).min
    for mask in (
        keep,
        torch.zeros(keep.shape).double().masked_fill(~keep, least),
        torch.zeros(keep.shape).double().masked_fill(~keep, -torch.inf),
        torch.zeros(keep.shape).masked_fill(~keep, torch.finfo(torch.float32).min),
        torch.zeros(keep.shape).half().masked_fill(~keep, torch.finfo(torch.float16).min),
    ):
        found, weights = softmax1_attention_forward(Module(), q, k, v, mask)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        assert weights is None
    shared = keep[:1]
    found, _ = softmax1_attention_forward(Module(), q, k, v, shared, scaling=8**-0.5)
    torch.testing.assert_close(found, plainly(q, k, v, shared), rtol=0, atol=1e-12)


def test_without_a_mask_the_rules_of_sdpa_hold():
    module = Module()
    square = torch.ones(5, 5, dtype=torch.bool).tril()
    for queries, keys, causal, keep in [
        (5, 5, None, square),
        (5, 5, False, torch.ones(5, 5)),
        (1, 5, None, torch.ones(1, 5)),
        (3, 5, False, torch.ones(3, 5)),
        # A static cache that was empty: three tokens written, the rest not yet.
        (3, 5, None, square[:3]),
        (3, 5, True, square[:3]),
    ]:
        q, k, v = given_heads(queries, keys)
        found, _ = softmax1_attention_forward(module, q, k, v, None, is_causal=causal)
        torch.testing.assert_close(found, plainly(q, k, v, keep), rtol=0, atol=1e-12)
    module.is_causal = False
    q, k, v = given_heads(4, 4)
    found, _ = softmax1_attention_forward(module, q, k, v, None)
    torch.testing.assert_close(found, plainly(q, k, v, torch.ones(4, 4)), rtol=0, atol=1e-12)


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"dropout": 0.1}, r"no dropout.*Module asks for 0.1.*attention_dropout, attn_pdrop"),
        ({"softcap": 50.0}, r"caps its attention logits \(softcap\)"),
        ({"s_aux": torch.zeros(3)}, r"a sink a head \(s_aux\).* gives \(3,\) for 4 heads"),
        ({"sinks": torch.zeros(4)}, r"sinks of its own"),
        ({"position_bias": torch.zeros(1, 4, 3, 5)}, r"position bias"),
        ({"head_mask": torch.ones(4)}, r"head mask"),
        ({"cache": object()}, r"paged cache"),
        ({"output_attentions": True}, r"that output_attentions asks for"),
        (
            {"attention_mask": torch.ones(2, 4, 3, 5, dtype=torch.bool)},
            r"\(batch, 1, 3, 5\).*all heads",
        ),
        ({"attention_mask": torch.ones(2, 1, 3, 4, dtype=torch.bool)}, r"gives \(2, 1, 3, 4\)"),
        ({"attention_mask": torch.full((2, 1, 3, 5), -1.5)}, r"holds a bias"),
        ({"value": torch.zeros(2, 2, 5, 6).double()}, r"values are 6 wide and its queries 8"),
    ],
)
def test_what_it_cannot_do_is_refused(overrides, message):
    q, k, v = given_heads(3, 5)
    arguments = {"query": q, "key": k, "value": v, "attention_mask": None} | overrides
    with pytest.raises(WakefulError, match=message):
        softmax1_attention_forward(Module(), **arguments)


def test_absent_features_change_nothing():
    q, k, v = given_heads(3, 3)
    absent, _ = softmax1_attention_forward(
        Module(), q, k, v, None, softcap=None, s_aux=None, position_bias=None, cache=None,
        output_attentions=False, sliding_window=4, position_ids=torch.arange(3)[None],
    )  # fmt: skip
    plain, _ = softmax1_attention_forward(Module(), q, k, v, None)
    assert torch.equal(absent, plain)


def test_a_window_that_no_mask_states_is_refused():
    q, k, v = given_heads(5, 5)
    with pytest.raises(WakefulError, match=r"looks back 4 of 5 keys.*needs the mask"):
        softmax1_attention_forward(Module(), q, k, v, None, sliding_window=4)


def test_models_that_need_more_are_refused():
    tokens = some_tokens(1, 5)
    with pytest.raises(WakefulError, match=r"Gemma2Attention.*softcap"):
        build("gemma2", attn_logit_softcapping=50.0)(tokens)
    with pytest.raises(WakefulError, match="dropout"):
        build("llama", attention_dropout=0.1).train()(tokens)
    # Dropout is off outside training.
    build("llama", attention_dropout=0.1)(tokens)


def test_attention_weights_are_refused():
    for name in ("llama", "gpt2"):
        with pytest.raises(WakefulError, match="that output_attentions asks for"):
            build(name, output_attentions=True)(some_tokens(1, 5))
    with pytest.raises(WakefulError, match="that output_attentions asks for"):
        build("llama")(some_tokens(1, 5), output_attentions=True)
    # GPT-2 keeps that argument to itself; nothing is made up.
    assert build("gpt2")(some_tokens(1, 5), output_attentions=True).attentions == ()


def test_a_model_that_would_ignore_the_request_is_found_out():
    check_softmax1(build("llama"))
    with pytest.raises(WakefulError, match="uses attn_implementation = 'sdpa'"):
        check_softmax1(build("llama", "sdpa"))
    config = transformers.BloomConfig(vocab_size=29, hidden_size=16, n_layer=1, n_head=2)
    bloom = AutoModelForCausalLM.from_config(config, attn_implementation=SOFTMAX1)
    with pytest.raises(WakefulError, match="BloomForCausalLM has an attention of its own"):
        check_softmax1(bloom)
