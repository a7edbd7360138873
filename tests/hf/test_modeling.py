"""Our class among those of Transformers: forward, masks, losses, hidden states, saving."""

import copy
import itertools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache

from helpers import some_tokens, tiny_config
from hf.models import VARIANTS, padded, pair, recompute
from wakeful.errors import WakefulError
from wakeful.hf import as_transformers
from wakeful.hf.cache import CACHE
from wakeful.hf.configuration import WakefulConfig
from wakeful.hf.modeling import WakefulForCausalLM, WakefulModel
from wakeful.hf.projections import PROJECTION_NAMES, projection_name
from wakeful.optim.axes import decide_axes


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_losses_are_the_decoder_s(name: str) -> None:
    decoder, model = pair(**VARIANTS[name])
    tokens = some_tokens(2, 11)
    wanted = decoder(tokens)
    outputs = model(tokens, labels=tokens)
    assert torch.equal(outputs.logits, wanted)
    loss = F.cross_entropy(wanted[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert outputs.loss.item() == pytest.approx(loss.item(), rel=1e-6)
    shared = model(tokens, labels=tokens, num_items_in_batch=40)
    assert shared.loss.item() == pytest.approx(loss.item() * 20 / 40, rel=1e-6)
    assert torch.equal(model(tokens, logits_to_keep=3).logits, wanted[:, -3:])
    assert torch.equal(model(tokens, logits_to_keep=torch.tensor([0, 5])).logits, wanted[:, [0, 5]])
    assert torch.equal(model(inputs_embeds=decoder.embed(tokens)).logits, wanted)
    assert torch.equal(model(tokens, return_dict=False)[0], wanted)
    base = model.model(tokens).last_hidden_state
    assert torch.equal(base, decoder.hidden(tokens))


@pytest.mark.parametrize("name", VARIANTS)
def test_recomputing_and_the_cache_change_neither_loss_nor_gradients(name: str) -> None:
    _, model = pair(**VARIANTS[name])
    tokens = some_tokens(2, 9)

    def step(**options: bool) -> tuple[float, dict[str, torch.Tensor]]:
        model.zero_grad()
        loss = model(tokens, labels=tokens, **options).loss
        loss.backward()
        return loss.item(), {n: p.grad.clone() for n, p in model.named_parameters()}

    loss, wanted = step(use_cache=False)
    cached = step(use_cache=True)
    model.train()
    plain = step()
    runs = 0

    def count(*_: object) -> None:
        nonlocal runs
        runs += 1

    model.model.decoder.blocks[0].register_forward_pre_hook(count)
    recompute(model)
    recomputed = step()
    assert runs == 2
    assert model(tokens, use_cache=True).get(CACHE) is None
    for again, found in (cached, plain, recomputed):
        assert again == loss
        for name_, grad in wanted.items():
            torch.testing.assert_close(found[name_], grad, rtol=0, atol=1e-12)


def test_the_reentrant_form_is_refused() -> None:
    _, model = pair()
    with pytest.raises(WakefulError, match="use_reentrant = True loses the gradients"):
        recompute(model, {"use_reentrant": True})
    if hasattr(model, "activation_checkpointing_enable"):
        with pytest.raises(WakefulError, match="every_n_layers must be 1"):
            model.activation_checkpointing_enable(every_n_layers=2)


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_padding_on_either_side_is_never_seen(name: str) -> None:
    decoder, model = pair(**VARIANTS[name])
    tokens, mask = padded(some_tokens(3, 11), 11, 7, 2)
    logits = model(tokens, attention_mask=mask).logits
    for row, length in enumerate((11, 7, 2)):
        alone = decoder(tokens[row : row + 1, 11 - length :])[0]
        torch.testing.assert_close(logits[row, 11 - length :], alone, rtol=0, atol=1e-12)
    right = model(tokens.flip(1), attention_mask=mask.flip(1)).logits
    alone = decoder(tokens.flip(1)[1:2, :7])[0]
    torch.testing.assert_close(right[1, :7], alone, rtol=0, atol=1e-12)


@torch.no_grad()
def test_packed_texts_do_not_see_each_other() -> None:
    decoder, model = pair(route="resformer")
    tokens = some_tokens(1, 12)
    places = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3]])
    logits = model(tokens, position_ids=places).logits
    pieces = [decoder(piece) for piece in tokens.split([5, 3, 4], 1)]
    torch.testing.assert_close(logits, torch.cat(pieces, 1), rtol=0, atol=1e-12)
    # Positions that only start elsewhere are one text; relative ones change nothing.
    shifted = model(tokens, position_ids=torch.arange(7, 19)[None]).logits
    torch.testing.assert_close(shifted, decoder(tokens), rtol=0, atol=1e-5)


@torch.no_grad()
def test_hidden_states_are_what_the_blocks_receive() -> None:
    decoder, model = pair(depth="denseformer")
    tokens = some_tokens(2, 7)
    states = model(tokens, output_hidden_states=True).hidden_states
    assert len(states) == 5
    assert torch.equal(states[0], decoder.embed(tokens))
    assert torch.equal(states[-1], decoder.hidden(tokens))
    block, _ = model.model.decoder.blocks[0](states[0], _flow(model, tokens))
    mixed = model.model.decoder.depth(1, block, {0: states[0]})
    torch.testing.assert_close(states[1], mixed, rtol=0, atol=1e-12)
    assert model(tokens).hidden_states is None


def _flow(model: WakefulForCausalLM, tokens: torch.Tensor):
    from wakeful.model.attention import Flow

    rotation = model.model.decoder.rotary(slice(0, tokens.shape[1]))
    return Flow(memory={}, cache=None, rotations={"rotary": rotation}, keep=None)


def test_what_is_not_offered_is_refused() -> None:
    _, model = pair()
    tokens = some_tokens(2, 5)
    with pytest.raises(WakefulError, match="attention weights are never made"):
        model(tokens, output_attentions=True)
    with pytest.raises(WakefulError, match=f"{CACHE} is a DynamicCache"):
        model(tokens, **{CACHE: DynamicCache()})
    with pytest.raises(WakefulError, match=r"shape \(2, 5\), and has shape \(2, 1, 5, 5\)"):
        model(tokens, attention_mask=torch.ones(2, 1, 5, 5))
    with pytest.raises(WakefulError, match="either input_ids or inputs_embeds"):
        model()
    with pytest.raises(WakefulError, match="65 tokens do not fit the model's context of 64"):
        model(some_tokens(1, 65))
    with pytest.raises(WakefulError, match=r"parts\.color, which this wakeful does not know"):
        WakefulConfig(parts={"color": 3})
    with pytest.raises(WakefulError, match=r"model\.num_layers must be at least 1"):
        WakefulConfig(parts={"num_layers": 0})


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_saved_models_come_back(name: str, tmp_path: Path) -> None:
    _, model = pair(torch.float32, **VARIANTS[name])
    tokens = some_tokens(2, 9)
    model.save_pretrained(tmp_path)
    again, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert type(again) is WakefulForCausalLM
    assert again.config.model == model.config.model
    assert torch.equal(again(tokens).logits, model(tokens).logits)
    assert (again.lm_head.weight is again.model.decoder.embed.weight) == model.config.model.tied
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert half(tokens).logits.dtype == torch.bfloat16
    # To the bit: how far bfloat16 is from float32 hangs on the variant and on the processor.
    cast = copy.deepcopy(model).to(torch.bfloat16)
    assert torch.equal(half(tokens).logits, cast(tokens).logits)


def test_a_saved_model_without_its_head_and_one_from_a_configuration(tmp_path: Path) -> None:
    _, model = pair(torch.float32, tied=True)
    model.save_pretrained(tmp_path)
    tokens = some_tokens(2, 9)
    base = AutoModel.from_pretrained(tmp_path)
    assert type(base) is WakefulModel
    assert torch.equal(base(tokens).last_hidden_state, model.model(tokens).last_hidden_state)
    config = AutoConfig.from_pretrained(tmp_path)
    for name, value in {
        "hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 8,
        "num_key_value_heads": 2, "intermediate_size": 20, "vocab_size": 29,
        "max_position_embeddings": 64, "tie_word_embeddings": True,
    }.items():  # fmt: skip
        assert getattr(config, name) == value
    fresh = AutoModelForCausalLM.from_config(
        WakefulConfig.of(
            tiny_config(
                init_std=0.02,
                route='resformer(mode="learnable", init=(0.25, 0.75))',
                normalizer="softmax1(learned=True, start=-3.0)",
                scale_residual_init=True,
            )
        )
    )
    decoder = fresh.model.decoder
    assert decoder.blocks[0].mlp.up.up_proj.weight.std().item() == pytest.approx(0.02, rel=0.2)
    assert decoder.blocks[0].mlp.down.down_proj.weight.std().item() == pytest.approx(
        0.02 / 8**0.5, rel=0.25
    )
    assert (decoder.norm.weight == 1).all()
    assert (decoder.blocks[3].attention.dot.normalizer.log_sinks == -3).all()
    mixing = [p for n, p in decoder.route.named_parameters()]
    assert {0.25, 0.75} <= {value for p in mixing for value in p.flatten().tolist()}
    torch.testing.assert_close(decoder.rotary.cos, decoder.rotary.table()[0])


def test_what_a_checkpoint_lacks_gets_its_start(tmp_path: Path) -> None:
    _, model = pair(torch.float32, normalizer="softmax1(learned=True, start=-2.0)")
    state = model.state_dict()
    del state["model.decoder.blocks.1.attention.dot.normalizer.log_sinks"]
    del state["model.decoder.blocks.2.mlp.gate.gate_proj.weight"]
    model.save_pretrained(tmp_path, state_dict=state)
    again, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert len(report["missing_keys"]) == 2
    blocks = again.model.decoder.blocks
    assert (blocks[1].attention.dot.normalizer.log_sinks == -2).all()
    assert torch.equal(
        blocks[0].attention.dot.normalizer.log_sinks,
        model.model.decoder.blocks[0].attention.dot.normalizer.log_sinks,
    )
    assert blocks[2].mlp.gate.gate_proj.weight.std() > 0.1


def test_the_vocabulary_can_grow() -> None:
    for tied in (False, True):
        _, model = pair(torch.float32, tied=tied)
        before = model(some_tokens(1, 5)).logits
        model.resize_token_embeddings(40, mean_resizing=False)
        after = model(some_tokens(1, 5)).logits
        assert after.shape[-1] == 40
        torch.testing.assert_close(after[..., :29], before)
        assert model.config.vocab_size == 40


def test_wrapping_shares_the_decoder_s_parameters() -> None:
    decoder, _ = pair(tied=True)
    names = dict(decoder.named_parameters())
    model = as_transformers(decoder, end_of_text=7)
    assert {id(p) for p in model.parameters()} == {id(p) for p in names.values()}
    assert model.generation_config.eos_token_id == 7
    tokens = some_tokens(1, 5)
    assert torch.equal(model(tokens).logits, decoder(tokens))
    for block, name in itertools.product(model.model.decoder.blocks, PROJECTION_NAMES.items()):
        linear = block.get_submodule(".".join(name))
        assert type(linear) is torch.nn.Linear
    other = copy.deepcopy(model)
    assert torch.equal(other(tokens).logits, decoder(tokens))


@pytest.mark.parametrize("name", VARIANTS)
def test_rotations_and_decay_know_the_names(name: str) -> None:
    decoder, model = pair(**VARIANTS[name])

    def sides(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
        decided = decide_axes(dict(module.named_parameters()), both_sides=True)
        return {name: axes for name, (axes, _) in decided.items()}

    ours, theirs = sides(decoder), sides(model)
    for parameter, axes in ours.items():
        assert theirs[whole_name(parameter)] == axes
    assert len(ours) == len(theirs)


def whole_name(parameter: str) -> str:
    return (
        "lm_head.weight"
        if parameter == "head.weight"
        else f"model.decoder.{projection_name(parameter)}"
    )
