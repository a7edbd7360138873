"""Norms, rotary positions, feed-forward networks, initialization and the configuration."""

import dataclasses
import math
import re

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from helpers import some_tokens, tiny_config, tiny_decoder
from wakeful.config.model import ModelConfig
from wakeful.errors import WakefulError
from wakeful.model.block import MLP
from wakeful.model.decoder import Decoder
from wakeful.model.initialize import initialize, seed_of
from wakeful.model.positions import Rotary, turn_pairs
from wakeful.norms import Norm, NormSpec
from wakeful.variants import build, variants_by_name


def randomized(module: torch.nn.Module) -> torch.nn.Module:
    module = module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module


# ----------------------------------------------------------------------------- norms


def make_norm(name: str, width: int, *, eps: float, bias: bool) -> Norm:
    norm = build("norms", name)
    place = NormSpec(part="mlp", layer=1, num_layers=3, width=width, eps=eps, bias=bias)
    norm.attach(place)
    return norm


def test_layernorm_by_hand():
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    for bias in (True, False):
        norm = randomized(make_norm("layernorm", 5, eps=1e-3, bias=bias))
        assert [name for name, _ in norm.named_parameters()] == ["weight", "bias"][: 1 + bias]
        centred = x - x.mean(-1, keepdim=True)
        expected = centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + 1e-3) * norm.weight
        if bias:
            expected = expected + norm.bias
        torch.testing.assert_close(norm(x), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("name", "scales"), [("rmsnorm", 5), ("rmsnorm_single", 1)])
def test_rmsnorm_by_hand(name, scales):
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    norm = make_norm(name, 5, eps=1e-3, bias=True)
    assert [tuple(p.shape) for p in norm.parameters()] == [(scales,)]
    assert torch.equal(norm.weight, torch.ones(scales))
    norm = randomized(norm)
    expected = x / torch.sqrt((x**2).mean(-1, keepdim=True) + 1e-3) * norm.weight
    torch.testing.assert_close(norm(x), expected, rtol=0, atol=1e-13)
    inputs = (x, norm.weight)
    upstream = torch.randn_like(x)
    for got, want in zip(
        torch.autograd.grad(norm(x), inputs, upstream),
        torch.autograd.grad(expected, inputs, upstream),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["layernorm", "rmsnorm", "rmsnorm_single"])
def test_norms_keep_the_dtype_of_the_stream(name):
    norm = make_norm(name, 8, eps=1e-5, bias=False).to(torch.bfloat16)
    assert norm(torch.randn(2, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16


# --------------------------------------------------------------------------- positions


def test_rotary_is_llama_s_in_transformers():
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, max_position_embeddings=64)
    theirs = LlamaRotaryEmbedding(config)
    theta = config.rope_parameters["rope_theta"]
    ours = Rotary(8, 64, theta=theta)
    q, k = torch.randn(2, 9, 4, 8), torch.randn(2, 9, 2, 8)
    for start in (0, 55):
        places = torch.arange(start, start + 9)
        cos, sin = theirs(q, places[None])
        wanted = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
        for heads, want in zip((q, k), wanted, strict=True):
            for rotation in (
                ours(places),
                ours(slice(start, start + 9)),
                ours(places.expand(2, 9)),
            ):
                # Theirs multiplies position and frequency in float32: an error of 64 · 6e-8 in the
                # angle; ours is rounded once.
                torch.testing.assert_close(turn_pairs(heads, rotation), want, rtol=0, atol=2e-5)


def test_rotary_turns_pairs_by_hand():
    heads = torch.randn(1, 3, 1, 4, dtype=torch.float64)
    turned = turn_pairs(heads, Rotary(4, 8, theta=100.0)(slice(2, 5)))
    for row, place in enumerate((2, 3, 4)):
        for i, rate in enumerate((1.0, 100.0**-0.5)):
            c, s = math.cos(place * rate), math.sin(place * rate)
            a, b = heads[0, row, 0, i], heads[0, row, 0, i + 2]
            # The table is float32.
            torch.testing.assert_close(turned[0, row, 0, i], a * c - b * s, rtol=0, atol=1e-6)
            torch.testing.assert_close(turned[0, row, 0, i + 2], a * s + b * c, rtol=0, atol=1e-6)


def test_scalings_by_hand():
    plain = Rotary(8, 16, theta=100.0)
    rates = 100.0 ** -(torch.arange(4, dtype=torch.float64) / 4)
    for expression, wanted in (
        ("plain", rates),
        ("linear(factor=4.0)", rates / 4),
        # Turns in 64 tokens: 64 · rate / 2π = 10.2, 3.22, 1.02, 0.32; kept above 4, slowed below 1.
        (
            "llama3(factor=8.0, original_length=64)",
            [
                rates[0],
                *((s + (1 - s) / 8) * r for r in rates[1:3] for s in [(32 / math.pi * r - 1) / 3]),
                rates[3] / 8,
            ],
        ),
    ):
        scaled = Rotary(8, 16, theta=100.0, scaling=build("ropes", expression))
        angles = 15 * torch.tensor([float(rate) for rate in wanted], dtype=torch.float64)
        torch.testing.assert_close(scaled.cos[15, 0].double(), angles.cos(), rtol=0, atol=1e-7)
        torch.testing.assert_close(scaled.sin[15, 0].double(), angles.sin(), rtol=0, atol=1e-7)
    for kind in variants_by_name("ropes").values():
        for expression in kind.examples:
            assert str(build("ropes", str(build("ropes", expression)))) == str(
                build("ropes", expression)
            )
        neutral = Rotary(8, 16, theta=100.0, scaling=build("ropes", kind.neutral))
        assert torch.equal(neutral.cos, plain.cos)
    for expression in ("linear(factor=0.0)", "llama3(factor=1.0, original_length=8, low=4.0)"):
        with pytest.raises(WakefulError, match="factor"):
            build("ropes", expression)


def test_channels_past_the_rotary_width_stay():
    heads = torch.randn(1, 3, 2, 10, dtype=torch.float64, requires_grad=True)
    rotation = Rotary(6, 8, theta=100.0)(slice(2, 5))
    turned = turn_pairs(heads, rotation)
    assert torch.equal(turned[..., 6:], heads[..., 6:])
    assert torch.equal(turned[..., :6], turn_pairs(heads[..., :6], rotation))
    upstream = torch.randn_like(heads)
    (grad,) = torch.autograd.grad(turned, heads, upstream)
    assert torch.equal(grad[..., 6:], upstream[..., 6:])
    assert torch.autograd.gradcheck(
        lambda x: turn_pairs(x, tuple(r.double() for r in rotation)), heads
    )


@pytest.mark.usefixtures("as_users_run_it")
def test_new_parts_are_refused_where_they_say_nothing():
    for overrides, words in (
        ({"rotary_width": 3}, "model.rotary_width must be even and at most the 8 channels"),
        ({"rotary_width": 10}, "must be even and at most the 8 channels"),
        ({"positions": "learned", "rotary_width": 4}, "are for rotary positions"),
        ({"positions": "none", "rope": "linear(factor=2.0)"}, "are for rotary positions"),
        ({"attention_bias": "some"}, "model.attention_bias must be one of same, none, qkv, all"),
    ):
        with pytest.raises(WakefulError, match=re.escape(words)):
            tiny_config(**overrides)


@pytest.mark.parametrize("bias", [False, True])
def test_attention_biases_are_where_they_are_asked_for(bias):
    for choice, qkv, out in (
        ("same", bias, bias), ("none", False, False), ("qkv", True, False), ("all", True, True),
    ):  # fmt: skip
        attention = Decoder(tiny_config(bias=bias, attention_bias=choice)).blocks[0].attention
        assert [part.bias is not None for part in (attention.query, attention.out)] == [qkv, out]


def test_parallel_blocks_and_normalized_heads_by_hand():
    decoder = tiny_decoder(parallel=True, qk_norm=True, num_layers=1, positions="none")
    block = decoder.blocks[0]
    x = decoder.embed(some_tokens(2, 5))
    n = block.attention_norm(x)
    a = block.attention

    def heads(linear):
        h = (n @ linear.weight.T).unflatten(-1, (-1, 8))
        return h / torch.sqrt((h**2).mean(-1, keepdim=True) + 1e-5) * linear.norm.weight

    q, k = heads(a.query), heads(a.key).repeat_interleave(2, 2)
    v = (n @ a.value.weight.T).unflatten(-1, (-1, 8)).repeat_interleave(2, 2)
    logits = torch.einsum("blhd,bshd->bhls", q, k) / math.sqrt(8)
    logits = logits.masked_fill(~torch.ones(5, 5, dtype=torch.bool).tril(), -math.inf)
    u = torch.einsum("bhls,bshd->blhd", logits.softmax(-1), v).flatten(2)
    expected = x + u @ a.out.weight.T + block.mlp(block.mlp_norm(x))
    found = decoder.norm(expected)
    torch.testing.assert_close(decoder.hidden(some_tokens(2, 5)), found, rtol=0, atol=1e-12)


def test_the_rotary_table_is_not_saved():
    names = Decoder(tiny_config()).state_dict()
    assert not [name for name in names if "rotary" in name]


# ---------------------------------------------------------------------------- mlps


def test_mlps_by_hand():
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    for bias in (False, True):
        mlp = randomized(MLP("swiglu", 5, 7, bias=bias))
        gate, up = mlp.gate(x), mlp.up(x)
        expected = (gate / (1 + torch.exp(-gate)) * up) @ mlp.down.weight.T
        expected = expected + (mlp.down.bias if bias else 0)
        torch.testing.assert_close(mlp(x), expected, rtol=0, atol=1e-12)
        assert sum(p.numel() for p in mlp.parameters()) == 3 * 35 + bias * (7 + 7 + 5)

        exact = randomized(MLP("gelu_exact", 5, 7, bias=bias))
        h = exact.up(x)
        h = h * (1 + torch.erf(h / math.sqrt(2))) / 2
        torch.testing.assert_close(exact(x), exact.down(h), rtol=0, atol=1e-12)

        mlp = randomized(MLP("gelu", 5, 7, bias=bias))
        h = mlp.up(x)
        h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        torch.testing.assert_close(mlp(x), mlp.down(h), rtol=0, atol=1e-12)
        assert sum(p.numel() for p in mlp.parameters()) == 2 * 35 + bias * (7 + 5)


# ------------------------------------------------------------------------ initialization


@pytest.mark.slow
def test_named_seeds_make_twins():
    one = initialize(Decoder(tiny_config()), 7)
    for overrides in (
        {"route": "svformer"},
        {"normalizer": "softmax1(learned=True)"},
        {"depth": "denseformer"},
        {"num_layers": 2},
        {"norm": "rmsnorm_single"},
        {"mlp": "gelu"},
    ):
        names = dict(one.named_parameters())
        shared = 0
        for name, parameter in initialize(Decoder(tiny_config(**overrides)), 7).named_parameters():
            if name in names and names[name].shape == parameter.shape:
                assert torch.equal(parameter, names[name]), name
                shared += 1
        assert shared > 10
    for part, others in (
        ({"depth": "mudd"}, ({"route": "output_gate"}, {"embedding": "projected"})),
        ({"route": 'gated(gate="relu")'}, ({"embedding": "projected"}, {"depth": "mudd"})),
    ):
        alone = dict(initialize(Decoder(tiny_config(**part)), 7).named_parameters())
        (kind,) = part
        for other in others:
            both = dict(initialize(Decoder(tiny_config(**part, **other)), 7).named_parameters())
            drawn = [name for name in alone if name.startswith(f"{kind}.")]
            assert drawn
            for name in drawn:
                assert torch.equal(both[name], alone[name]), (name, other)
    other = initialize(Decoder(tiny_config()), 8)
    assert not torch.equal(other.embed.weight, one.embed.weight)
    assert seed_of(7, "a") != seed_of(7, "b")
    assert 0 <= seed_of(7, "a") < 2**63


def test_initial_sizes():
    wide = {"width": 128, "mlp_width": 160, "vocab_size": 200, "init_std": 0.03, "bias": True}
    plain = initialize(Decoder(tiny_config(**wide, positions="learned", mlp="gelu")), 0)
    for name, parameter in plain.state_dict().items():
        if name.endswith("bias"):
            assert (parameter == 0).all(), name
        elif parameter.ndim == 1:
            assert (parameter == 1).all(), name
        else:
            assert parameter.std() == pytest.approx(0.03, rel=0.06), name
            assert parameter.mean().abs() < 0.03 * 5 / parameter.numel() ** 0.5, name
    scaled = dict(
        initialize(
            Decoder(tiny_config(**wide, mlp="gelu", scale_residual_init=True)), 0
        ).named_parameters()
    )
    for name, parameter in plain.named_parameters():
        if name in scaled and parameter.ndim == 2:
            factor = math.sqrt(2 * 4) if name.endswith(("out.weight", "down.weight")) else 1.0
            torch.testing.assert_close(scaled[name] * factor, parameter)


def test_initialization_does_not_touch_the_global_random_state():
    state = torch.get_rng_state()
    decoder = Decoder(tiny_config())
    torch.set_rng_state(state)
    initialize(decoder, 0)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_variant_s_own_parameters_keep_their_start():
    decoder = initialize(
        Decoder(tiny_config(route="gated(start=2.0)", normalizer="softmax1(learned=True)")), 0
    )
    for name, parameter in decoder.named_parameters():
        if "gates" in name and name.endswith("weight"):
            assert (parameter == 0).all()
        if "gates" in name and name.endswith("bias"):
            assert (parameter == 2).all()
        if "log_sinks" in name:
            assert (parameter == 0).all()


# ------------------------------------------------------------------------ configuration


def test_the_shape_fills_in_what_is_usual():
    shape = ModelConfig(num_heads=4, width=32).shape
    assert (shape.num_kv_heads, shape.head_width) == (4, 8)
    shape = ModelConfig(num_heads=4, width=32, num_kv_heads=2, head_width=6).shape
    assert (shape.num_kv_heads, shape.head_width) == (2, 6)


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"vocab_size": 0}, "vocab_size must be at least 1, got 0"),
        ({"max_length": 0}, "max_length"),
        ({"num_layers": 0}, "num_layers"),
        ({"num_heads": 0}, "num_heads"),
        ({"width": 0}, "width"),
        ({"mlp_width": -3}, "mlp_width"),
        ({"num_kv_heads": -1}, "num_kv_heads must not be negative"),
        ({"num_kv_heads": 3}, "num_kv_heads = 3 does not divide model.num_heads = 4"),
        ({"num_kv_heads": 8}, "num_kv_heads = 8"),
        ({"head_width": 0, "num_heads": 3, "num_kv_heads": 0}, "num_heads = 3 does not divide"),
        ({"head_width": 7}, "pairs of channels"),
        ({"positions": "alibi"}, "positions must be one of"),
        ({"mlp": "relu"}, "mlp must be one of"),
        ({"norm_eps": 0.0}, "norm_eps"),
        ({"init_std": -0.1}, "init_std"),
        ({"rope_theta": 0.0}, "rope_theta"),
    ],
)
def test_an_impossible_model_is_refused_by_its_field(overrides, message):
    with pytest.raises(WakefulError, match=message):
        tiny_config(**overrides)


def test_a_configuration_is_frozen_and_comparable():
    config = tiny_config()
    assert config == dataclasses.replace(config)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.width = 3


def test_tied_ends_are_one_matrix():
    decoder = tiny_decoder(tied=True)
    assert decoder.head.weight is decoder.embed.weight
    assert decoder.num_parameters()["embedding"] == 29 * 16
    logits = decoder(some_tokens(1, 5))
    expected = decoder.hidden(some_tokens(1, 5)) @ decoder.embed.weight.T
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)
    # Still one after a change of dtype, as `.to` and loading leave it.
    decoder.float().load_state_dict(decoder.state_dict())
    assert decoder.head.weight is decoder.embed.weight
