"""A prefix in a stock model's own cache."""

import copy

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from wakeful.errors import WakefulError
from wakeful.hf import prefix_cache
from wakeful.hf.cache import CACHE

FIRST = [3, 5]


def models() -> list[LlamaForCausalLM | GPT2LMHeadModel]:
    torch.manual_seed(0)
    llama = LlamaConfig(
        vocab_size=61, hidden_size=24, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3, eos_token_id=None,
        bos_token_id=None,
    )  # fmt: skip
    gpt2 = GPT2Config(
        vocab_size=61, n_embd=24, n_layer=2, n_head=4, n_positions=32, initializer_range=0.3,
        eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    return [LlamaForCausalLM(llama).eval(), GPT2LMHeadModel(gpt2).eval()]


@torch.no_grad()
@pytest.mark.parametrize("model", models(), ids=lambda model: model.config.model_type)
def test_a_text_reads_on_from_it(model: LlamaForCausalLM) -> None:
    text = torch.randint(61, (2, 7), generator=torch.Generator().manual_seed(1))
    cache = prefix_cache(model, FIRST, batch_size=2)
    whole = torch.cat([torch.tensor([FIRST, FIRST]), text], dim=1)
    expected = model(whole).logits
    for _ in range(2):  # the cache that was copied stays
        found = model(text, **{CACHE: copy.deepcopy(cache)}).logits
        torch.testing.assert_close(found, expected[:, 2:], rtol=1e-4, atol=1e-5)
    assert cache.get_seq_length() == 2
    choice = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    longer = model.generate(whole, **{CACHE: copy.deepcopy(cache)}, **choice)
    assert torch.equal(longer, model.generate(whole, **choice))


def test_what_cannot_be_one_is_refused() -> None:
    with pytest.raises(WakefulError, match="at least one token"):
        prefix_cache(models()[0], [])
    with pytest.raises(WakefulError, match="token 61 is not in the vocabulary of 61"):
        prefix_cache(models()[0], [3, 61])
