"""The decoder against Transformers' models of the same weights, and its own options."""

import math

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_model, save_model
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from helpers import exact_loss, gradients, some_tokens, tiny_config, tiny_decoder
from routes.reference import Model, own
from wakeful.errors import WakefulError
from wakeful.model.decoder import Decoder

# ------------------------------------------------------------ Transformers' own models


def replace_rmsnorms(model: LlamaForCausalLM) -> None:
    """Put PyTorch's RMSNorm in the place of Llama's, which computes in float32 whatever it gets."""
    for module in model.modules():
        for name, child in module.named_children():
            if type(child).__name__ == "LlamaRMSNorm":
                norm = torch.nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon)
                norm.weight = child.weight
                setattr(module, name, norm.double())


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@torch.no_grad()
def test_the_vanilla_decoder_is_llama(kv_heads):
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=29,
            hidden_size=16,
            intermediate_size=20,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=kv_heads,
            head_dim=8,
            max_position_embeddings=24,
            rms_norm_eps=1e-5,
            attn_implementation="sdpa",
        )
    ).double()
    replace_rmsnorms(theirs)
    theirs.eval()
    ours = Decoder(tiny_config(num_layers=3, num_kv_heads=kv_heads)).double()
    for parameter in theirs.parameters():
        parameter.normal_(std=0.4)
    pairs = [
        (ours.embed, theirs.model.embed_tokens),
        (ours.norm, theirs.model.norm),
        (ours.head, theirs.lm_head),
    ]
    for block, layer in zip(ours.blocks, theirs.model.layers, strict=True):
        a, b = block.attention, layer.self_attn
        pairs += [(a.query, b.q_proj), (a.key, b.k_proj), (a.value, b.v_proj), (a.out, b.o_proj)]
        pairs += [(block.attention_norm, layer.input_layernorm)]
        pairs += [(block.mlp_norm, layer.post_attention_layernorm)]
        pairs += [(getattr(block.mlp, n), getattr(layer.mlp, f"{n}_proj")) for n in ("up", "down")]
        pairs += [(block.mlp.gate, layer.mlp.gate_proj)]
    copied = 0
    for target, source in pairs:
        target.weight.copy_(source.weight)
        copied += source.weight.numel()
    assert copied == ours.num_parameters()["total"] == theirs.num_parameters()
    # Their angles are products in float32: take their table, to compare all the rest exactly.
    cos, sin = theirs.model.rotary_emb(torch.zeros(1).double(), torch.arange(24)[None])
    ours.rotary.cos.copy_(cos[0, :, None, :4])
    ours.rotary.sin.copy_(sin[0, :, None, :4])

    tokens = some_tokens(2, 11)
    expected = theirs(tokens).logits
    torch.testing.assert_close(ours(tokens), expected, rtol=0, atol=1e-10)
    mask = torch.arange(11) >= torch.tensor([[0], [4]])
    places = (mask.long().cumsum(1) - 1).clamp_min(0)
    padded = theirs(tokens, attention_mask=mask.long(), position_ids=places).logits
    torch.testing.assert_close(ours(tokens, valid=mask)[mask], padded[mask], rtol=0, atol=1e-10)


@pytest.mark.parametrize("by_layer", [False, True])
@torch.no_grad()
def test_the_vanilla_decoder_is_gpt2(by_layer):
    theirs = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=29,
            n_positions=24,
            n_embd=16,
            n_layer=3,
            n_head=4,
            n_inner=20,
            scale_attn_by_inverse_layer_idx=by_layer,
            bos_token_id=0,
            eos_token_id=0,
        )
    ).double()
    theirs.eval()
    for parameter in theirs.parameters():
        parameter.normal_(std=0.4)
    ours = Decoder(
        tiny_config(
            num_layers=3,
            num_kv_heads=0,
            head_width=0,
            norm="layernorm",
            mlp="gelu",
            positions="learned",
            bias=True,
            tied=True,
            scale_logits_by_layer=by_layer,
        )
    ).double()

    def copy(target, source, *, transposed=False):
        target.weight.copy_(source.weight.T if transposed else source.weight)
        target.bias.copy_(source.bias)

    body = theirs.transformer
    ours.embed.weight.copy_(body.wte.weight)
    ours.positions.weight.copy_(body.wpe.weight)
    copy(ours.norm, body.ln_f)
    for block, layer in zip(ours.blocks, body.h, strict=True):
        copy(block.attention_norm, layer.ln_1)
        copy(block.mlp_norm, layer.ln_2)
        a = block.attention
        # Conv1D keeps (in, out), the three projections side by side.
        weights = layer.attn.c_attn.weight.T.chunk(3)
        biases = layer.attn.c_attn.bias.chunk(3)
        for target, weight, bias in zip((a.query, a.key, a.value), weights, biases, strict=True):
            target.weight.copy_(weight)
            target.bias.copy_(bias)
        copy(a.out, layer.attn.c_proj, transposed=True)
        copy(block.mlp.up, layer.mlp.c_fc, transposed=True)
        copy(block.mlp.down, layer.mlp.c_proj, transposed=True)
    assert ours.num_parameters()["total"] == theirs.num_parameters()
    tokens = some_tokens(2, 11)
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-10)
    assert ours.loss(tokens, tokens).item() == pytest.approx(
        F.cross_entropy(theirs(tokens).logits.flatten(0, 1), tokens.flatten()).item(), rel=1e-6
    )


# --------------------------------------------------------------------------- options


def test_the_decoder_is_its_written_out_definition():
    decoder = tiny_decoder()
    tokens = some_tokens(2, 11)
    torch.testing.assert_close(
        decoder(tokens), Model(decoder, tokens).logits(own), rtol=0, atol=1e-12
    )


def test_logits_are_scaled_by_layer():
    """Each layer's attention logits are divided by its number, counted from 1."""
    decoder = tiny_decoder(scale_logits_by_layer=True)
    plain = tiny_decoder()
    plain.load_state_dict(decoder.state_dict())
    with torch.no_grad():
        for number, block in enumerate(plain.blocks, start=1):
            block.attention.query.weight /= number
    tokens = some_tokens(2, 11)
    torch.testing.assert_close(decoder(tokens), plain(tokens), rtol=0, atol=1e-12)


@pytest.mark.parametrize("positions", ["rotary", "learned", "none"])
def test_positions_decide_whether_order_matters(positions):
    decoder = tiny_decoder(positions=positions, num_layers=1)
    tokens = some_tokens(1, 9)
    swapped = tokens.clone()
    swapped[0, [1, 4]] = tokens[0, [4, 1]]
    same = torch.allclose(decoder(tokens)[:, -1], decoder(swapped)[:, -1], rtol=0, atol=1e-12)
    assert same == (positions == "none")


@pytest.mark.parametrize(
    "overrides", [{"positions": "learned"}, {"positions": "none"}, {"bias": True}]
)
def test_decoding_and_padding_work_with_other_parts(overrides):
    decoder = tiny_decoder(**overrides, norm="layernorm", mlp="gelu", tied=True)
    tokens = some_tokens(2, 9)
    full = decoder(tokens)
    cache = decoder.new_cache(2, 9)
    pieces = [decoder(piece, cache=cache) for piece in tokens.split([4, 3, 1, 1], 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), full, rtol=0, atol=1e-10)
    valid = torch.arange(9) >= torch.tensor([[0], [4]])
    alone = decoder(tokens[1:, 4:])
    torch.testing.assert_close(decoder(tokens, valid=valid)[1:, 4:], alone, rtol=0, atol=1e-10)


def test_what_does_not_fit_is_refused():
    decoder = tiny_decoder()
    with pytest.raises(WakefulError, match="25 tokens do not fit the model's context of 24"):
        decoder(some_tokens(1, 25))
    cache = decoder.new_cache(1, 6)
    decoder(some_tokens(1, 5), cache=cache)
    with pytest.raises(WakefulError, match="the cache holds 6 tokens, and 7 are needed"):
        decoder(some_tokens(1, 2), cache=cache)
    assert cache.length == 5
    with pytest.raises(WakefulError, match="valid covers 3 tokens, but there are 5"):
        decoder(some_tokens(1, 5), valid=torch.ones(1, 3, dtype=torch.bool))
    for length in (6, -6):
        with pytest.raises(WakefulError, match="cannot crop a cache of 5 tokens"):
            cache.crop(length)
    long = tiny_decoder(max_length=9)
    cache = long.new_cache(1, 20)
    long(some_tokens(1, 9), cache=cache)
    with pytest.raises(WakefulError, match="context of 9"):
        long(some_tokens(1, 1), cache=cache)


def test_losses_count_what_is_not_ignored():
    decoder = tiny_decoder()
    tokens = some_tokens(3, 9)
    inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
    targets[0, 2:] = -100
    targets[2] = -100
    each = decoder.loss(inputs, targets, reduction="none")
    assert each.shape == (3, 8)
    assert ((each != 0) == (targets != -100)).all()
    assert decoder.loss(inputs, targets).item() == pytest.approx(each.sum().item() / 10, rel=1e-6)
    assert decoder.loss(inputs, targets, reduction="sum").item() == pytest.approx(
        each.sum().item(), rel=1e-6
    )
    whole = decoder.loss(inputs, tokens[:, 1:]).item()
    assert whole == pytest.approx(exact_loss(decoder, tokens).item(), rel=1e-6)


@pytest.mark.parametrize("tied", [False, True])
def test_the_loss_has_the_gradient_of_its_definition(tied):
    decoder = tiny_decoder(tied=tied, route="resformer(mode='plus')")
    tokens = some_tokens(3, 9)
    _, wanted = gradients(decoder, tokens)
    decoder.zero_grad()
    decoder.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    for name, parameter in decoder.named_parameters():
        # The loss is computed in float32 whatever the model's precision.
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-4, atol=1e-6)


def test_every_token_equal_and_untrained_costs_the_logarithm_of_the_vocabulary():
    decoder = tiny_decoder(noise=0, init_std=1e-6, dtype=torch.float32)
    tokens = some_tokens(2, 9)
    assert decoder.loss(tokens, tokens).item() == pytest.approx(math.log(29), abs=1e-4)


def test_a_tied_model_is_saved_once_and_loaded_back(tmp_path):
    decoder = tiny_decoder(tied=True, route="resformer(mode='learnable')")
    save_model(decoder, str(tmp_path / "model.safetensors"))
    other = Decoder(decoder.config).double()
    load_model(other, str(tmp_path / "model.safetensors"))
    assert other.head.weight is other.embed.weight
    assert torch.equal(other(some_tokens(1, 9)), decoder(some_tokens(1, 9)))


def test_recomputing_happens_in_training_only():
    decoder = tiny_decoder(route="differential", normalizer="softmax1")
    decoder.checkpoint_activations = True
    runs = 0

    def count(*_):
        nonlocal runs
        runs += 1

    decoder.blocks[0].register_forward_pre_hook(count)
    with torch.no_grad():
        decoder(some_tokens(1, 5))
    assert runs == 1
    gradients(decoder, some_tokens(1, 5))
    assert runs == 3
