"""softmax-1 in Transformers: logits, gradients, caches and padding against the definition."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

from helpers import some_tokens
from hf.models import recompute
from hf.softmax1_models import PLAIN, build, every_model, left_padded, plain_attention, twins
from wakeful.hf.cache import CACHE
from wakeful.hf.softmax1 import register_softmax1
from wakeful.variants.implementations import SOFTMAX1


@pytest.fixture(autouse=True, scope="module")
def _plain():
    attention, masks = AttentionInterface(), AttentionMaskInterface()
    AttentionInterface.register(PLAIN, plain_attention)
    AttentionMaskInterface.register(PLAIN, masks["eager"])
    yield
    attention._global_mapping.pop(PLAIN)
    masks._global_mapping.pop(PLAIN)


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
        step = model(piece, **{CACHE: cache}, use_cache=True)
        cache, pieces = step.get(CACHE), [*pieces, step.logits]
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
            recompute(model, {"use_reentrant": False})
        model(tokens, labels=tokens, use_cache=False).loss.backward()
        grads.append([p.grad for p in model.parameters()])
    for one, two in zip(*grads, strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("length", [1, 9])
def test_a_model_with_sinks_of_its_own_keeps_them(length: int):
    """gpt-oss against its own eager attention: the same logits, and gradients of its sinks too."""
    found, wanted = [], []
    tokens, mask, places = left_padded((length, max(1, length - 4)))
    for implementation, kept in ((SOFTMAX1, found), ("eager", wanted)):
        model = build("gpt_oss", implementation).train()
        logits = model(
            tokens, attention_mask=mask.long(), position_ids=places, use_cache=False
        ).logits[mask]
        logits.square().mean().backward()
        kept.extend([logits, *(layer.self_attn.sinks.grad for layer in model.model.layers)])
    assert all(grad.abs().max() > 1e-6 for grad in wanted[1:])
    for got, want in zip(found, wanted, strict=True):
        # Norms and rotary tables in float32, as above.
        torch.testing.assert_close(got, want, rtol=0, atol=2e-6 * max(1.0, want.abs().max().item()))


def test_a_model_with_sinks_of_its_own_generates():
    model, eager = build("gpt_oss"), build("gpt_oss", "eager")
    tokens = some_tokens(1, 7, vocab_size=28)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
    assert found.tolist() == greedy(eager, tokens, 8).tolist()


# ------------------------------------------------------------------------ registration


def test_it_loads_by_name_and_switches_back(tmp_path):
    model = build("llama")
    tokens = some_tokens(1, 9)
    expected = model(tokens).logits
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation=SOFTMAX1, dtype=torch.float64
    )
    # Weights at other addresses: matrix products may sum in another order.
    torch.testing.assert_close(loaded(tokens).logits, expected, rtol=0, atol=1e-12)
    # What the caller names goes before what the checkpoint names.
    plain = AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="sdpa", dtype=torch.float64
    )
    assert plain.config._attn_implementation == "sdpa"
    plain.set_attn_implementation(SOFTMAX1)
    torch.testing.assert_close(plain(tokens).logits, expected, rtol=0, atol=1e-12)
    plain.set_attn_implementation("sdpa")
    assert (plain(tokens).logits - expected).abs().max() > 1e-3


def test_other_models_do_not_change():
    tokens = some_tokens(2, 9)
    before = {kind: build("llama", kind)(tokens).logits for kind in ("sdpa", "eager")}
    functions = {name: f for name, f in AttentionInterface().items() if name != SOFTMAX1}
    masks = {name: f for name, f in AttentionMaskInterface().items() if name != SOFTMAX1}
    register_softmax1()
    build("llama")(tokens)
    assert {name: f for name, f in AttentionInterface().items() if name != SOFTMAX1} == functions
    assert {name: f for name, f in AttentionMaskInterface().items() if name != SOFTMAX1} == masks
    for kind, logits in before.items():
        assert torch.equal(build("llama", kind)(tokens).logits, logits)


@pytest.mark.slow
def test_only_importing_wakeful_hf_registers_the_name():
    code = (
        "import transformers, wakeful, wakeful.model.decoder\n"
        "from transformers import AttentionInterface, AttentionMaskInterface\n"
        f"assert {SOFTMAX1!r} not in AttentionInterface()\n"
        "import wakeful.hf\n"
        f"assert {SOFTMAX1!r} in AttentionInterface()\n"
        f"assert {SOFTMAX1!r} in AttentionMaskInterface()\n"
        "assert len([n for n in AttentionInterface() if 'wakeful' in n]) == 1\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_mask_is_sdpa_s():
    masks = AttentionMaskInterface()
    assert masks[SOFTMAX1] is masks["sdpa"]
