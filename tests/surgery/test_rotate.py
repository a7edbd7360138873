"""A rotated decoder is the same function, and no channel of it stands out."""

import pytest
import torch

from wakeful.config.model import ModelConfig
from wakeful.errors import WakefulError
from wakeful.hf.weights_out import stock_architecture
from wakeful.model.decoder import Decoder
from wakeful.quantization import quantize_module
from wakeful.surgery import check_rotates, rotate, rotate_keys, store_prefix
from wakeful.variants import variants_by_name

SMALL = ModelConfig(
    vocab_size=61, max_length=32, num_layers=3, num_heads=4, num_kv_heads=2, width=24, head_width=6,
    mlp_width=40,
)  # fmt: skip
GPT2 = {"norm": "layernorm", "mlp": "gelu", "bias": True, "positions": "learned", "tied": True}
NEOX = {"norm": "layernorm", "mlp": "gelu_exact", "bias": True, "parallel": True}
SHAPES = {
    "llama": {},
    "tied": {"tied": True},
    "qwen2": {"attention_bias": "qkv"},
    "qwen3": {"qk_norm": True},
    "gpt2": GPT2,
    "gpt_neox": NEOX,
    "layernorm without biases": {"norm": "layernorm"},
    "one scale, tied": {"norm": "rmsnorm_single", "tied": True},
    "sink": {"normalizer": "softmax1(learned=True)"},
    "resformer": {"route": 'resformer(mode="learnable")'},
    "svformer": {"route": "svformer"},
    "neutreno": {"route": "neutreno"},
    "denseformer": {"depth": "denseformer"},
}
FIRST = "reads the first 5 of the residual stream's channels"
ROTATIONS = ("hadamard", "haar", "block_diagonal(size=8)", "identity")


def decoder(**changes: object) -> Decoder:
    """Return a decoder whose parameters are all away from their start, in float64."""
    torch.manual_seed(0)
    config = ModelConfig(**{**vars(SMALL), **changes})  # pyright: ignore[reportArgumentType]
    made = Decoder(config).double().eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return made


@torch.no_grad()
def logits(model: Decoder) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(model.config.vocab_size, (2, 17), generator=generator)
    return model(tokens)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_logits_stay(shape: str) -> None:
    plain = decoder(**SHAPES[shape])
    before = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    expected = logits(plain)
    turned = rotate(plain)
    torch.testing.assert_close(logits(turned), expected, rtol=1e-9, atol=1e-9)
    assert all(torch.equal(before[name], now) for name, now in plain.state_dict().items())
    assert not torch.equal(turned.embed.weight, plain.embed.weight)


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("shape", ["llama", "gpt2"])
def test_every_rotation(shape: str, rotation: str) -> None:
    plain = decoder(**SHAPES[shape])
    torch.testing.assert_close(logits(rotate(plain, rotation)), logits(plain), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("placement", ["pre", "peri", "post", "reordered", "mixed(share=0.5)"])
@pytest.mark.parametrize("inner", [False, True])
def test_what_lies_inside_of_blocks_turns_wherever_norms_stand(placement: str, inner: bool) -> None:
    plain = decoder(placement=placement, tied=True, norm="layernorm", qk_norm=True)
    turned = rotate(plain, stream=False, inner=inner)
    torch.testing.assert_close(logits(turned), logits(plain), rtol=1e-9, atol=1e-9)
    parts = ["attention.value.weight", "attention.out.weight", *(["mlp.down.weight"] * inner)]
    inside = {f"blocks.{layer}.{part}" for layer in range(3) for part in parts}
    for name, now in turned.named_parameters():
        assert torch.equal(now, plain.get_parameter(name)) == (name not in inside), name
    assert turned.embed.weight is plain.embed.weight


@pytest.mark.parametrize("shape", ["llama", "gpt2", "gpt_neox", "tied"])
def test_what_the_last_projection_reads_turns(shape: str) -> None:
    plain = decoder(**SHAPES[shape])
    turned = rotate(plain, inner=True)
    torch.testing.assert_close(logits(turned), logits(plain), rtol=1e-9, atol=1e-9)
    assert turned.config.mlp_rotation
    assert stock_architecture(turned.config)[0] == "wakeful"
    seen = {}
    for name, model in (("plain", rotate(plain)), ("turned", turned)):
        hook = model.blocks[1].mlp.down.register_forward_pre_hook(
            lambda _, args, name=name: seen.update({name: args[0]})
        )
        logits(model)
        hook.remove()
    torch.testing.assert_close(seen["turned"].norm(dim=-1), seen["plain"].norm(dim=-1))
    assert not torch.allclose(seen["turned"], seen["plain"])


@pytest.mark.parametrize("shape", [*SHAPES, "differential"])
def test_queries_and_keys_turn_after_rope(shape: str) -> None:
    plain = decoder(**SHAPES.get(shape, {"route": shape}))
    turned = rotate_keys(plain)
    torch.testing.assert_close(logits(turned), logits(plain), rtol=1e-9, atol=1e-9)
    assert turned.embed.weight is plain.embed.weight
    assert stock_architecture(turned.config)[0] == "wakeful"
    seen = {}
    for name, model in (("plain", plain), ("turned", turned)):
        hook = model.blocks[0].attention.dot.register_forward_pre_hook(
            lambda _, args, name=name: seen.update({name: args[1]})
        )
        logits(model)
        hook.remove()
    torch.testing.assert_close(seen["turned"].norm(dim=-1), seen["plain"].norm(dim=-1))
    assert not torch.allclose(seen["turned"], seen["plain"])


def test_turned_keys_are_cached_and_stored() -> None:
    """Token by token, and with a prefix stored before the keys turn or after."""
    plain = decoder()
    one, other = rotate_keys(store_prefix(plain, [3])), store_prefix(rotate_keys(plain), [3])
    torch.testing.assert_close(logits(one), logits(store_prefix(plain, [3])), rtol=1e-9, atol=1e-9)
    stored = [each.blocks[1].attention.stored.keys for each in (one, other)]
    torch.testing.assert_close(*stored, rtol=1e-9, atol=1e-9)
    tokens, cache = torch.arange(12).view(2, 6), one.new_cache(2, 8)
    parts = [one.head(one.hidden(tokens[:, n : n + 1], cache=cache)) for n in range(6)]
    torch.testing.assert_close(torch.cat(parts, 1), one(tokens), rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_a_key_channel_that_stands_out_no_longer_spoils_a_coarse_cache() -> None:
    plain = decoder(normalizer="softmax", positions="learned", width=64, head_width=16)
    for block in plain.blocks:
        key, query = block.attention.key.weight, block.attention.query.weight
        key.view(2, 16, -1)[:, 2] *= 60
        query.view(4, 16, -1)[:, 2] /= 60
    errors = []
    for model in (plain, rotate_keys(plain)):
        found = logits(quantize_module(model.float(), "scheme(cache=absmax(bits=8, per='token'))"))
        errors.append(float((found - logits(plain)).norm()))
    assert errors[1] < 0.6 * errors[0]


def test_states_turn_by_one_orthogonal_matrix() -> None:
    plain = decoder()
    turned = rotate(plain, values=False)
    q = torch.linalg.lstsq(plain.embed.weight, turned.embed.weight).solution
    torch.testing.assert_close(q @ q.T, torch.eye(24).double(), rtol=0, atol=1e-9)
    for before, after in zip(plain.blocks, turned.blocks, strict=True):
        torch.testing.assert_close(after.mlp.down.weight, q.T @ before.mlp.down.weight)
        assert (after.mlp_norm.weight == 1).all()


def test_an_outlier_channel_is_spread() -> None:
    plain = decoder(width=256, num_heads=4, head_width=64)
    with torch.no_grad():
        plain.embed.weight[:, 7] += 500.0
    turned = rotate(plain)
    assert plain.embed.weight.abs().amax() > 400
    assert turned.embed.weight.abs().amax() < 120  # 500 / 16 a channel, were it spread evenly
    torch.testing.assert_close(logits(turned), logits(plain), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("shape", ["llama", "qwen2", "resformer", "svformer"])
def test_stored_values_turn_too(shape: str) -> None:
    plain = store_prefix(decoder(**SHAPES[shape]), [3, 4])
    turned = rotate(plain)
    torch.testing.assert_close(logits(turned), logits(plain), rtol=1e-8, atol=1e-8)
    stored = "blocks.0.attention.stored."
    before, after = dict(plain.named_parameters()), dict(turned.named_parameters())
    assert torch.equal(after[f"{stored}keys"], before[f"{stored}keys"])
    assert not torch.allclose(after[f"{stored}values"], before[f"{stored}values"])


def test_values_turn_within_their_heads() -> None:
    plain = decoder()
    turned, kept = rotate(plain), rotate(plain, values=False)
    for one, other in zip(turned.blocks, kept.blocks, strict=True):
        by_head = one.attention.value.weight.unflatten(0, (-1, 6))
        theirs = other.attention.value.weight.unflatten(0, (-1, 6))
        assert not torch.allclose(by_head, theirs)
        torch.testing.assert_close(by_head.norm(dim=1), theirs.norm(dim=1))


def test_seeds_give_rotations() -> None:
    plain = decoder()
    one, same, other = (rotate(plain, seed=seed).embed.weight for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.allclose(one, other)


@pytest.mark.parametrize("shape", ["llama", "qwen2", "qwen3", "gpt2", "gpt_neox"])
def test_a_stock_architecture_stays_stock(shape: str) -> None:
    plain = decoder(**SHAPES[shape], num_kv_heads=4)
    assert (
        stock_architecture(rotate(plain).config)[0]
        == stock_architecture(plain.config)[0]
        != "wakeful"
    )


def test_a_placement_is_taken_for_what_it_is_in_every_layer() -> None:
    check_rotates(decoder(placement="mixed(share=0.0)"), "hadamard")
    with pytest.raises(WakefulError, match=r"model\.placement"):
        check_rotates(decoder(placement="mixed(share=0.5)"), "hadamard")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"placement": "peri"}, "placement"),
        ({"placement": "post"}, "placement"),
        ({"route": "gated"}, "route"),
    ],
)
def test_what_cannot_be_exact_is_refused(changes: dict[str, str], word: str) -> None:
    with pytest.raises(WakefulError, match=rf"model\.{word}"):
        rotate(decoder(**changes))


@pytest.mark.parametrize(
    ("route", "does"),
    [
        ("gated(channels=5)", FIRST),
        (
            "on_layers([1], gated(channels=5))",
            FIRST,
        ),
        ("output_gate(channels=5)", FIRST),
        ("value_embedding(channels=5)", FIRST),
        ("then(resformer, differential)", "has a scale for each of the values' channels"),
    ],
)
def test_a_route_that_knows_its_channels_is_refused_at_once(route: str, does: str) -> None:
    with pytest.raises(WakefulError, match=f"{does}, so no other basis"):
        check_rotates(decoder(route=route, num_kv_heads=4), "hadamard")


def test_values_that_stay_keep_a_differential_transformer_exact() -> None:
    plain = decoder(route="differential", num_kv_heads=4)
    turned = rotate(plain, values=False)
    torch.testing.assert_close(logits(turned), logits(plain), rtol=0, atol=1e-9)
    check_rotates(plain, "identity")


@pytest.mark.slow
def test_whatever_is_not_refused_at_once_is_exact() -> None:
    for folder, field in (("routes", "route"), ("depth", "depth"), ("norms", "norm")):
        for kind in variants_by_name(folder).values():
            for example in kind.examples if kind.__module__.startswith("wakeful.") else ():
                plain = decoder(**{field: example, "num_layers": 4, "num_kv_heads": 4})
                try:
                    kept = check_rotates(plain, "hadamard")
                except WakefulError:
                    continue
                found = logits(rotate(plain, kept))
                torch.testing.assert_close(found, logits(plain), rtol=0, atol=1e-7)


def test_a_rotation_that_learns_is_refused() -> None:
    with pytest.raises(WakefulError, match="eigenbasis"):
        rotate(decoder(), "eigenbasis")


def test_a_norm_that_is_silent_in_a_channel_before_a_head_without_bias() -> None:
    plain = decoder(**GPT2)
    with torch.no_grad():
        plain.norm.weight[3] = 0.0
    with pytest.raises(WakefulError, match="scale of zero"):
        rotate(plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision(dtype: torch.dtype) -> None:
    plain = decoder(width=64, num_heads=4, head_width=16).to(dtype)
    turned = rotate(plain)
    assert turned.embed.weight.dtype == dtype
    error = (logits(turned).float() - logits(plain).float()).std() / logits(plain).float().std()
    assert error < (1e-4 if dtype == torch.float32 else 0.1)
