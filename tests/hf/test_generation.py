"""generate() on our class: greedy, sampling, beams, padding, and the cache it saves."""

import pytest
import torch
from transformers import pipeline

from helpers import some_tokens
from hf.models import VARIANTS, padded, pair
from wakeful.data.tokenizer import Tokenizer
from wakeful.errors import WakefulError
from wakeful.hf.cache import CACHE, WakefulCache
from wakeful.hf.modeling import WakefulForCausalLM
from wakeful.model.generate import generate_tokens

OPTIONS = {"max_new_tokens": 10, "pad_token_id": 0, "do_sample": False}


def whole(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Say that no token is padding, though the padding's id may occur among them."""
    return {"inputs": tokens, "attention_mask": torch.ones_like(tokens)}


def forwards(model: WakefulForCausalLM) -> list[int]:
    """Return a list that will hold the number of new tokens of every forward pass."""
    seen: list[int] = []
    model.model.decoder.blocks[0].register_forward_pre_hook(
        lambda _, inputs: seen.append(inputs[0].shape[1])
    )
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "two anchors"])
def test_greedy_sampled_and_beam_search_are_the_same_with_the_cache(name: str) -> None:
    decoder, model = pair(**VARIANTS[name])
    tokens = some_tokens(2, 9, seed=5)
    seen = forwards(model)
    greedy = model.generate(**whole(tokens), **OPTIONS)
    assert seen == [9] + [1] * 9
    ours = list(generate_tokens(decoder, tokens[0].tolist(), num_tokens=10, temperature=0))
    assert greedy[0, 9:].tolist() == ours
    assert torch.equal(greedy, model.generate(**whole(tokens), use_cache=False, **OPTIONS))
    assert seen[10:] == list(range(9, 19))
    for options in (
        {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5},
        {"do_sample": True, "top_k": 5, "num_return_sequences": 2},
    ):
        both = []
        for use_cache in (True, False):
            torch.manual_seed(3)
            both.append(model.generate(**whole(tokens), **OPTIONS | options, use_cache=use_cache))
        assert torch.equal(*both)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vanilla", "svformer", "gpt-2", "learned sink"])
@pytest.mark.parametrize("beams", [1, 3])
def test_left_padded_batches_continue_as_each_alone(name: str, beams: int) -> None:
    _, model = pair(**VARIANTS[name])
    tokens, mask = padded(some_tokens(3, 9), 9, 5, 1)
    batch = model.generate(tokens, attention_mask=mask, num_beams=beams, **OPTIONS)
    for row, length in enumerate((9, 5, 1)):
        prompt = tokens[row : row + 1, 9 - length :]
        alone = model.generate(**whole(prompt), num_beams=beams, **OPTIONS)
        assert batch[row, 9:].tolist() == alone[0, length:].tolist()


def test_prompt_lookup_rolls_the_cache_back() -> None:
    _, model = pair(route="resformer")
    tokens = torch.tensor([[3, 4, 5, 6, 3, 4, 5, 6, 3, 4]])
    wanted = model.generate(**whole(tokens), **OPTIONS)
    seen = forwards(model)
    found = model.generate(**whole(tokens), prompt_lookup_num_tokens=4, **OPTIONS)
    assert torch.equal(found, wanted)
    assert max(seen[1:]) > 1


def test_a_conversation_goes_on_from_its_cache() -> None:
    _, model = pair(route="svformer")
    tokens = some_tokens(1, 6)
    cache = model.new_cache(1)
    first = model.generate(**whole(tokens), **{CACHE: cache}, **OPTIONS)
    seen = forwards(model)
    more = torch.cat([first, some_tokens(1, 3, seed=9)], 1)
    found = model.generate(**whole(more), **{CACHE: cache}, **OPTIONS)
    assert seen[0] < more.shape[1]
    assert torch.equal(found, model.generate(**whole(more), **OPTIONS))


# ----------------------------------------------------------------------------- the cache


@pytest.mark.parametrize(
    ("route", "slots"),
    [("own", 8), ("svformer", 5), ("svformer(anchors=[0, 2])", 6), ("cla", 4), ("resformer", 8)],
)
@torch.no_grad()
def test_the_cache_holds_what_the_route_needs_and_no_more(route: str, slots: int) -> None:
    _, model = pair(torch.float32, route=route)
    cache = model(some_tokens(3, 9)).get(CACHE)
    assert isinstance(cache, WakefulCache)
    # N = 4 layers: vanilla has 2N slots of (batch, kv heads, room, head width) float32.
    assert cache.num_bytes == slots * 3 * 2 * 256 * 8 * 4
    live = sum(t.untyped_storage().nbytes() for t in cache.slots._tensors.values())
    assert cache.num_bytes == live
    assert cache.get_seq_length() == 9


@torch.no_grad()
def test_the_cache_grows_crops_repeats_and_selects() -> None:
    decoder, model = pair(route="resformer")
    tokens = some_tokens(2, 20)
    wanted = decoder(tokens)
    cache = model.new_cache(2, 3)
    for start, end in ((0, 2), (2, 9), (9, 10)):
        step = model(tokens[:, start:end], **{CACHE: cache})
        assert step.get(CACHE) is cache
        torch.testing.assert_close(step.logits, wanted[:, start:end], rtol=0, atol=1e-12)
    assert cache.slots.capacity == 18
    cache.crop(-4)
    assert cache.get_seq_length() == 6
    cache.crop(0)
    cache.crop(50)
    assert cache.get_seq_length() == 6
    logits = model(tokens[:, 6:20], **{CACHE: cache}).logits
    torch.testing.assert_close(logits, wanted[:, 6:], rtol=0, atol=1e-12)
    cache.crop(10)
    cache.batch_repeat_interleave(2)
    assert cache.batch_size == 4
    cache.batch_select_indices(torch.tensor([3, 0, 1]))
    rows = torch.tensor([1, 0, 0])
    logits = model(tokens[rows, 10:12], **{CACHE: cache}).logits
    torch.testing.assert_close(logits, wanted[rows, 10:12], rtol=0, atol=1e-12)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert cache.get_mask_sizes(3, 0) == (3, 0)
    with pytest.raises(WakefulError, match="filled by a Wakeful model"):
        cache.update(tokens, tokens, 0)
    with pytest.raises(WakefulError, match="cannot crop a cache of 0 tokens to -1"):
        cache.crop(-1)


# ------------------------------------------------------------------------ text in, text out


@pytest.mark.slow
def test_the_pipeline_continues_text() -> None:
    tokenizer = Tokenizer.train(["def f(x):\n    return x + 1\n"] * 5, 270)
    _, model = pair(torch.float32, vocab_size=tokenizer.vocab_size)
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.inner,
        eos_token=tokenizer.end_of_text_token,
        pad_token=tokenizer.end_of_text_token,
        padding_side="left",
    )
    generator = pipeline("text-generation", model=model, tokenizer=theirs)
    prompts = ["def f", "return x"]
    options = {"max_new_tokens": 6, "do_sample": False}
    together = generator(prompts, batch_size=2, **options)
    for prompt, found in zip(prompts, together, strict=True):
        assert found[0]["generated_text"].startswith(prompt)
        assert found[0]["generated_text"] == generator(prompt, **options)[0]["generated_text"]
