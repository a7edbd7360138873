"""softmax-1 inside Transformers' own models, against eager attention with the definition put in."""

import subprocess
import sys

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

from helpers import some_tokens
from wakeful.errors import WakefulError
from wakeful.hf.softmax1 import NAME, check_softmax1, register, softmax1_attention

PLAIN = "plain_softmax1"


def plain_attention(module, query, key, value, mask, scaling=None, dropout=0.0, **kwargs):
    """Return Transformers' eager attention with e^x / (1 + Σ e^x) in the softmax's place."""
    assert dropout == 0.0
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    x = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    x = x + mask[..., : key.shape[-2]]
    # Shifted by a constant that is no part of the definition: logits stay below 50 here.
    e = torch.exp(x - 50.0)
    weights = e / (torch.exp(torch.tensor(-50.0).to(e)) + e.sum(-1, keepdim=True))
    return (weights @ value).transpose(1, 2).contiguous(), weights


@pytest.fixture(autouse=True, scope="module")
def _plain():
    attention, masks = AttentionInterface(), AttentionMaskInterface()
    AttentionInterface.register(PLAIN, plain_attention)
    AttentionMaskInterface.register(PLAIN, masks["eager"])
    yield
    attention._global_mapping.pop(PLAIN)
    masks._global_mapping.pop(PLAIN)


SMALL = {
    "vocab_size": 29,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 28,
    "pad_token_id": 0,
}
GROUPED = SMALL | {"num_key_value_heads": 2}
MODELS = {
    "llama": ("Llama", GROUPED),
    "llama, one key head": ("Llama", SMALL | {"num_key_value_heads": 1}),
    "mistral": ("Mistral", GROUPED | {"sliding_window": 4}),
    "qwen2": (
        "Qwen2",
        GROUPED | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", GROUPED | {"head_dim": 8}),
    "gemma": ("Gemma", GROUPED | {"head_dim": 8}),
    "gemma2": (
        "Gemma2",
        GROUPED | {"head_dim": 8, "sliding_window": 4, "attn_logit_softcapping": None},
    ),
    "gpt2": (
        "GPT2",
        {
            "vocab_size": 29,
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "attn_pdrop": 0.0,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "bos_token_id": 0,
            "eos_token_id": 28,
            "pad_token_id": 0,
        },
    ),
    "gpt_neox": ("GPTNeoX", SMALL | {"attention_dropout": 0.0, "hidden_dropout": 0.0}),
}
every_model = pytest.mark.parametrize("name", MODELS)


def build(name: str, attention: str = NAME, **overrides):
    """Return a float64 model with weights large enough for attention to matter."""
    kind, options = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**options | overrides)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.3 * drawn)
    return model.eval()


def twins(name: str, **overrides):
    ours, plain = build(name, **overrides), build(name, PLAIN, **overrides)
    assert ours.config._attn_implementation == NAME
    assert plain.config._attn_implementation == PLAIN
    return ours, plain


def left_padded(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    longest = max(lengths)
    tokens = some_tokens(len(lengths), longest, vocab_size=28)
    mask = torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]
    return tokens.masked_fill(~mask, 0), mask, (mask.long().cumsum(1) - 1).clamp_min(0)


@every_model
@pytest.mark.parametrize("length", [1, 2, 9])
def test_logits_and_gradients_are_the_definition(name, length):
    tokens = some_tokens(2, length)
    found, wanted = [], []
    for model, kept in zip(twins(name), (found, wanted), strict=True):
        model.train()
        logits = model(tokens, use_cache=False).logits
        logits.square().mean().backward()
        kept.extend([logits, *(p.grad for p in model.parameters())])
    for got, want in zip(found, wanted, strict=True):
        if want is None:
            assert got is None
            continue
        # Llama-like norms and rotary tables compute in float32 in both models alike, and round the
        # two orders of summation apart from there.
        scale = max(1.0, want.abs().max().item())
        torch.testing.assert_close(got, want, rtol=0, atol=2e-6 * scale)


@every_model
def test_it_is_not_the_softmax(name):
    tokens = some_tokens(2, 9)
    difference = build(name)(tokens).logits - build(name, "eager")(tokens).logits
    assert difference.abs().max() > 1e-3


@every_model
def test_padding_changes_no_real_token(name):
    ours, plain = twins(name)
    lengths = (11, 6, 1)
    tokens, mask, places = left_padded(lengths)
    arguments = {"attention_mask": mask.long(), "use_cache": False, "position_ids": places}
    together = ours(tokens, **arguments).logits
    expected = plain(tokens, **arguments).logits
    # Float32 inside the norms and tables, as above.
    torch.testing.assert_close(together[mask], expected[mask], rtol=0, atol=2e-5)
    for row, length in enumerate(lengths):
        alone = ours(tokens[row : row + 1, -length:]).logits
        torch.testing.assert_close(together[row, -length:], alone[0], rtol=0, atol=2e-5)
    grads = torch.autograd.grad(together[mask].square().mean(), list(ours.parameters()))
    assert all(grad.isfinite().all() for grad in grads)


def greedy(model, tokens: Tensor, steps: int) -> Tensor:
    """Continue without any cache."""
    for _ in range(steps):
        following = model(tokens, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, following], 1)
    return tokens


@every_model
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_is_decoding_without_a_cache(name, cache):
    model = build(name)
    tokens = some_tokens(1, 7, vocab_size=28)
    expected = greedy(model, tokens, 8)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    if cache == "static":
        # The cache is longer than the text at every step, and nothing is to be compiled here.
        options |= {"cache_implementation": "static", "disable_compile": True}
    found = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_a_padded_batch_generates_what_its_texts_do_alone(name):
    model = build(name)
    lengths = (9, 4)
    tokens, mask, _ = left_padded(lengths)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    together = model.generate(tokens, attention_mask=mask.long(), **options)
    for row, length in enumerate(lengths):
        alone = greedy(model, tokens[row : row + 1, -length:], 6)
        assert together[row, -length - 6 :].tolist() == alone[0].tolist()


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "gpt_neox"])
def test_a_prompt_read_in_pieces(name):
    """More queries than one against a longer cache: the mask is aligned to the right."""
    model = build(name)
    tokens = some_tokens(2, 11)
    full = model(tokens, use_cache=False).logits
    cache, pieces = None, []
    for piece in tokens.split([3, 5, 1, 2], dim=1):
        step = model(piece, past_key_values=cache, use_cache=True)
        cache, pieces = step.past_key_values, [*pieces, step.logits]
    torch.testing.assert_close(torch.cat(pieces, 1), full, rtol=0, atol=2e-5)


def test_packed_texts_do_not_see_each_other():
    model = build("llama")
    tokens = some_tokens(1, 9)
    places = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    packed = model(tokens, position_ids=places, use_cache=False).logits
    for part in (slice(0, 4), slice(4, 9)):
        alone = model(tokens[:, part], use_cache=False).logits
        torch.testing.assert_close(packed[:, part], alone, rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precisions_run(dtype):
    tokens = some_tokens(2, 9)
    exact = build("llama")(tokens).logits
    model = build("llama").to(dtype)
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    found = model(tokens).logits.double()
    # Two layers of roundings at 6e-8 and 0.4 %.
    limit = {torch.float32: 1e-5, torch.bfloat16: 0.05}[dtype]
    assert (found - exact).norm() / exact.norm() < limit


def test_gradient_checkpointing_changes_nothing():
    tokens = some_tokens(2, 9)
    grads = []
    for checkpointed in (False, True):
        model = build("llama").train()
        if checkpointed:
            # The name since Transformers 5.2x; before that it was `gradient_checkpointing_enable`.
            enable = getattr(model, "activation_checkpointing_enable", None)
            (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
        model(tokens, labels=tokens, use_cache=False).loss.backward()
        grads.append([p.grad for p in model.parameters()])
    for one, two in zip(*grads, strict=True):
        assert torch.equal(one, two)


# ---------------------------------------------------------------- masks, given directly


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
        found, weights = softmax1_attention(Module(), q, k, v, mask)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        assert weights is None
    shared = keep[:1]
    found, _ = softmax1_attention(Module(), q, k, v, shared, scaling=8**-0.5)
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
        found, _ = softmax1_attention(module, q, k, v, None, is_causal=causal)
        torch.testing.assert_close(found, plainly(q, k, v, keep), rtol=0, atol=1e-12)
    module.is_causal = False
    q, k, v = given_heads(4, 4)
    found, _ = softmax1_attention(module, q, k, v, None)
    torch.testing.assert_close(found, plainly(q, k, v, torch.ones(4, 4)), rtol=0, atol=1e-12)


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"dropout": 0.1}, r"no dropout.*Module asks for 0.1.*attention_dropout, attn_pdrop"),
        ({"softcap": 50.0}, r"caps its attention logits \(softcap\)"),
        ({"s_aux": torch.zeros(4)}, r"sinks of its own \(s_aux\)"),
        ({"sinks": torch.zeros(4)}, r"sinks of its own"),
        ({"position_bias": torch.zeros(1, 4, 3, 5)}, r"position bias"),
        ({"head_mask": torch.ones(4)}, r"head mask"),
        ({"cache": object()}, r"paged cache"),
        ({"output_attentions": True}, r"output_attentions has nothing to return"),
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
        softmax1_attention(Module(), **arguments)


def test_absent_features_are_not_refused():
    q, k, v = given_heads(3, 3)
    softmax1_attention(
        Module(), q, k, v, None, softcap=None, s_aux=None, position_bias=None, cache=None,
        output_attentions=False, sliding_window=4, position_ids=torch.arange(3)[None],
    )  # fmt: skip


def test_models_that_need_more_are_refused():
    tokens = some_tokens(1, 5)
    with pytest.raises(WakefulError, match=r"Gemma2Attention.*softcap"):
        build("gemma2", attn_logit_softcapping=50.0)(tokens)
    with pytest.raises(WakefulError, match="dropout"):
        build("llama", attention_dropout=0.1).train()(tokens)
    # Dropout is off outside training.
    build("llama", attention_dropout=0.1)(tokens)
    config = transformers.GptOssConfig(
        **GROUPED, head_dim=8, num_local_experts=2, num_experts_per_tok=1, sliding_window=4
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=NAME)
    with pytest.raises(WakefulError, match=r"GptOssAttention.*sinks of its own"):
        model(tokens)


def test_attention_weights_are_refused():
    for name in ("llama", "gpt2"):
        with pytest.raises(WakefulError, match="output_attentions has nothing to return"):
            build(name, output_attentions=True)(some_tokens(1, 5))
    with pytest.raises(WakefulError, match="output_attentions has nothing to return"):
        build("llama")(some_tokens(1, 5), output_attentions=True)
    # GPT-2 keeps that argument to itself; nothing is made up.
    assert build("gpt2")(some_tokens(1, 5), output_attentions=True).attentions == ()


def test_a_model_that_would_ignore_the_request_is_found_out():
    check_softmax1(build("llama"))
    with pytest.raises(WakefulError, match="uses attn_implementation = 'sdpa'"):
        check_softmax1(build("llama", "sdpa"))
    config = transformers.BloomConfig(vocab_size=29, hidden_size=16, n_layer=1, n_head=2)
    bloom = AutoModelForCausalLM.from_config(config, attn_implementation=NAME)
    with pytest.raises(WakefulError, match="BloomForCausalLM has an attention of its own"):
        check_softmax1(bloom)


# ------------------------------------------------------------------------ registration


def test_it_loads_by_name_and_switches_back(tmp_path):
    model = build("llama")
    tokens = some_tokens(1, 9)
    expected = model(tokens).logits
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation=NAME, dtype=torch.float64
    )
    # Weights at other addresses: matrix products may sum in another order.
    torch.testing.assert_close(loaded(tokens).logits, expected, rtol=0, atol=1e-12)
    # The checkpoint itself does not ask for it: loaded plainly it is a softmax model again.
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert plain.config._attn_implementation == "sdpa"
    plain.set_attn_implementation(NAME)
    torch.testing.assert_close(plain(tokens).logits, expected, rtol=0, atol=1e-12)
    plain.set_attn_implementation("sdpa")
    assert (plain(tokens).logits - expected).abs().max() > 1e-3


def test_other_models_do_not_change():
    tokens = some_tokens(2, 9)
    before = {kind: build("llama", kind)(tokens).logits for kind in ("sdpa", "eager")}
    functions = {name: f for name, f in AttentionInterface().items() if name != NAME}
    masks = {name: f for name, f in AttentionMaskInterface().items() if name != NAME}
    register()
    build("llama")(tokens)
    assert {name: f for name, f in AttentionInterface().items() if name != NAME} == functions
    assert {name: f for name, f in AttentionMaskInterface().items() if name != NAME} == masks
    for kind, logits in before.items():
        assert torch.equal(build("llama", kind)(tokens).logits, logits)


def test_only_importing_wakeful_hf_registers_the_name():
    code = (
        "import transformers, wakeful, wakeful.model.decoder\n"
        "from transformers import AttentionInterface, AttentionMaskInterface\n"
        f"assert {NAME!r} not in AttentionInterface()\n"
        "import wakeful.hf\n"
        f"assert {NAME!r} in AttentionInterface()\n"
        f"assert {NAME!r} in AttentionMaskInterface()\n"
        "assert len([n for n in AttentionInterface() if 'wakeful' in n]) == 1\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_mask_is_sdpa_s():
    masks = AttentionMaskInterface()
    assert masks[NAME] is masks["sdpa"]
