"""Fewer heads and channels: which stay, what they compute, and how the rest is made up for."""

import copy
from dataclasses import replace

import pytest
import torch

from helpers import some_tokens, tiny_decoder
from wakeful.config.schema import BridgeConfig, WidthConfig
from wakeful.errors import WakefulError
from wakeful.heirs.narrow import narrow, narrow_config
from wakeful.model.decoder import Decoder

TOKENS = some_tokens(6, 9)
NONE = BridgeConfig(map="none")
HALF = WidthConfig(heads=0.5, mlp=0.5)


def grouped(**over) -> Decoder:
    return tiny_decoder(num_heads=4, num_kv_heads=2, num_layers=3, mlp_width=20, **over)


@torch.no_grad()
def states(decoder: Decoder) -> list[torch.Tensor]:
    """Return what every layer puts out."""
    found: list[torch.Tensor] = []
    hooks = [
        block.register_forward_hook(lambda _, __, out: found.append(out[0]))
        for block in decoder.blocks
    ]
    decoder(TOKENS)
    for hook in hooks:
        hook.remove()
    return found


def off(decoder: Decoder, reference: Decoder) -> float:
    x, y = states(decoder)[-1], states(reference)[-1]
    return float(((x - y).square().sum(-1) / y.square().sum(-1)).mean())


@torch.no_grad()
def without(reference: Decoder) -> Decoder:
    """Silence one group of every layer, another one in each, and half of its channels."""
    for layer, block in enumerate(reference.blocks):
        attention, mlp = block.attention, block.mlp
        size = attention.value.out_features // 2
        lost = slice(size, 2 * size) if layer % 2 else slice(0, size)
        attention.value.weight[lost] = 0
        if attention.value.bias is not None:
            attention.value.bias[lost] = 0
        mlp.up.weight[layer : layer + 10] = 0
        if mlp.up.bias is not None:
            mlp.up.bias[layer : layer + 10] = 0
    return reference


@pytest.mark.parametrize(
    "over",
    [{}, {"mlp": "gelu", "bias": True}, {"qk_norm": True}, {"tied": False},
     {"placement": "peri"}, {"placement": "reordered", "bias": True}],
    ids=["plain", "biases", "head norms", "own head", "norms behind", "norms behind alone"],
)  # fmt: skip
@pytest.mark.parametrize("map", ["none", "down"])
def test_what_does_nothing_goes_first_and_is_not_missed(over: dict, map: str) -> None:
    reference = without(grouped(**over))
    before = reference(TOKENS)
    found = narrow(reference, HALF, TOKENS, BridgeConfig(map=map))
    config = found.config
    assert (config.num_heads, config.shape.num_kv_heads, config.mlp_width) == (2, 1, 10)
    assert config.shape.head_width == reference.config.shape.head_width
    torch.testing.assert_close(found(TOKENS), before, rtol=1e-9, atol=1e-9)
    assert torch.equal(reference(TOKENS), before)


def test_what_stays_is_the_most_important_by_definition() -> None:
    reference = tiny_decoder(num_heads=6, num_kv_heads=3, num_layers=2, mlp_width=20)
    read: dict[str, torch.Tensor] = {}
    for name in ("attention.out", "mlp.down"):
        reference.blocks[1].get_submodule(name).register_forward_pre_hook(
            lambda _, args, name=name: read.update({name: args[0]})
        )
    with torch.no_grad():
        reference(TOKENS)
    heads = read["attention.out"].unflatten(-1, (3, 2, 8)).norm(dim=-1).sum(-1).mean((0, 1))
    groups = sorted(heads.argsort()[-2:].tolist())
    channels = sorted(read["mlp.down"].abs().mean((0, 1)).argsort()[-5:].tolist())
    found = narrow(reference, WidthConfig(heads=0.67, mlp=0.25), TOKENS, NONE).blocks[1]
    theirs = reference.blocks[1]
    keys = theirs.attention.key.weight.unflatten(0, (3, 8))[groups].flatten(0, 1)
    queries = theirs.attention.query.weight.unflatten(0, (3, 16))[groups].flatten(0, 1)
    assert torch.equal(found.attention.key.weight, keys)
    assert torch.equal(found.attention.query.weight, queries)
    assert torch.equal(found.mlp.up.weight, theirs.mlp.up.weight[channels])
    assert torch.equal(found.mlp.down.weight, theirs.mlp.down.weight[:, channels])


@pytest.mark.parametrize("placement", ["pre", "peri"])
def test_all_kept_is_the_reference(placement: str) -> None:
    reference = grouped(placement=placement)
    found = narrow(reference, WidthConfig(), TOKENS)
    torch.testing.assert_close(found(TOKENS), reference(TOKENS), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("width", [WidthConfig(heads=0.5), WidthConfig(mlp=0.5), HALF])
def test_making_up_brings_the_stream_nearer(width: WidthConfig) -> None:
    reference = grouped()
    bare, made_up = (narrow(reference, width, TOKENS, how) for how in (NONE, BridgeConfig()))
    assert off(made_up, reference) < 0.7 * off(bare, reference)


@pytest.mark.parametrize(("weigh", "first"), [("relative", "apart"), ("equal", "out")])
def test_the_solution_is_the_least_squares(weigh: str, first: str) -> None:
    reference = tiny_decoder(num_layers=1, mlp_width=20)
    options = BridgeConfig(weigh=weigh, first=first, ridge=0.1)
    bare, found = (narrow(reference, WidthConfig(mlp=0.5), TOKENS, how) for how in (NONE, options))
    read: list[torch.Tensor] = []
    found.blocks[0].mlp.down.register_forward_pre_hook(lambda _, args: read.append(args[0]))
    (x,), (y,) = states(found), states(reference)
    start = 1 if first == "out" else 0
    f, error, y = (part[:, start:].flatten(0, 1) for part in (read[0], x - y, y))
    weights = 1 / y.square().sum(1) if weigh == "relative" else torch.ones(len(y)).double()
    ridge = 0.1 * (weights.unsqueeze(1) * f.square()).sum(0).mean()
    moved = found.blocks[0].mlp.down.weight - bare.blocks[0].mlp.down.weight
    gradient = (weights.unsqueeze(1) * error).T @ f + ridge * moved
    assert moved.abs().max() > 1e-3
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-9)


@pytest.mark.parametrize("placement", ["peri", "reordered"])
@pytest.mark.parametrize(("weigh", "first"), [("relative", "apart"), ("equal", "out")])
def test_before_a_norm_the_target_is_what_the_references_matrix_gives(
    placement: str, weigh: str, first: str
) -> None:
    reference = tiny_decoder(num_layers=1, mlp_width=20, placement=placement)
    options = BridgeConfig(weigh=weigh, first=first, ridge=0.1)
    bare, found = (narrow(reference, WidthConfig(mlp=0.5), TOKENS, how) for how in (NONE, options))
    seen: dict[str, torch.Tensor] = {}
    for name, decoder in (("ours", found), ("theirs", reference)):
        decoder.blocks[0].mlp.down.register_forward_hook(
            lambda _, args, out, name=name: seen.update({f"{name} read": args[0], name: out})
        )
        decoder.blocks[0].register_forward_pre_hook(lambda _, args: seen.update(stream=args[0]))
        with torch.no_grad():
            decoder(TOKENS)
    start = 1 if first == "out" else 0
    f, v, made, y = (
        seen[name][:, start:].flatten(0, 1) for name in ("ours read", "ours", "theirs", "stream")
    )
    weights = 1 / made.square().sum(1)
    weights = weights / y.square().sum(1) if weigh == "relative" else weights
    ridge = 0.1 * (weights.unsqueeze(1) * f.square()).sum(0).mean()
    moved = found.blocks[0].mlp.down.weight - bare.blocks[0].mlp.down.weight
    gradient = (weights.unsqueeze(1) * (v - made)).T @ f + ridge * moved
    assert moved.abs().max() > 1e-3
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-9)


@pytest.mark.parametrize("placement", ["peri", "reordered"])
def test_making_up_before_norms_brings_the_stream_nearer(placement: str) -> None:
    reference = grouped(placement=placement)
    bare, made_up = (narrow(reference, HALF, TOKENS, how) for how in (NONE, BridgeConfig()))
    assert off(made_up, reference) < 0.7 * off(bare, reference)


def test_a_norm_over_the_whole_stream_is_refused() -> None:
    with pytest.raises(WakefulError, match=r"model\.placement = post.* leave out --width"):
        narrow(tiny_decoder(placement="post"), HALF, TOKENS)


@pytest.mark.parametrize("first", ["apart", "out"])
def test_documents_of_a_row_are_solved_on_as_rows_of_their_own(first: str) -> None:
    reference, together = grouped(), some_tokens(6, 10)
    alone, numbers = together.reshape(-1, 5), torch.arange(10).expand(6, -1) // 5
    options = BridgeConfig(first=first)
    one = narrow(reference, HALF, alone, options)
    other = narrow(reference, HALF, together, options, documents=numbers)
    crossed = narrow(reference, HALF, together, options)
    torch.testing.assert_close(one(alone), other(alone), rtol=1e-7, atol=1e-7)
    assert not torch.allclose(one(alone), crossed(alone), rtol=1e-3, atol=1e-3)


def test_at_least_one_of_each_stays() -> None:
    config = narrow_config(grouped().config, WidthConfig(heads=0.01, mlp=0.01))
    assert (config.num_heads, config.num_kv_heads, config.mlp_width) == (2, 1, 1)


@pytest.mark.parametrize(
    ("width", "said"),
    [
        (WidthConfig(heads=0.9), "heads 0.9 comes to all 3 groups of heads: 0.7 would leave out"),
        (WidthConfig(heads=0.7, mlp=0.99), "mlp 0.99 comes to all 20 hidden channels: 0.95 would"),
        (WidthConfig(mlp=0.9999), "mlp 0.9999 comes to all 20 hidden channels: 0.95 would"),
    ],
)
def test_a_share_that_leaves_nothing_out_is_refused(width: WidthConfig, said: str) -> None:
    config = tiny_decoder(num_heads=6, num_kv_heads=3, mlp_width=20).config
    with pytest.raises(WakefulError, match=f"--width.{said}"):
        narrow_config(config, width)
    # What the message names narrows by one, and 1 asks for all.
    found = narrow_config(config, WidthConfig(heads=0.7, mlp=0.95))
    assert (found.num_kv_heads, found.mlp_width) == (2, 19)
    assert narrow_config(config, WidthConfig(heads=1.0, mlp=0.5)).num_kv_heads == 3


def test_a_single_group_of_heads_cannot_be_narrowed() -> None:
    config = tiny_decoder(num_heads=4, num_kv_heads=1).config
    with pytest.raises(WakefulError, match=r"heads 0\.3: a layer has 1 of the groups of heads"):
        narrow_config(config, WidthConfig(heads=0.3))


@pytest.mark.parametrize("whole", [2, 3, 5, 9, 344, 1536, 14336, 53248])
def test_the_share_that_is_named_leaves_out_one(whole: int) -> None:
    config = replace(tiny_decoder().config, mlp_width=whole)
    with pytest.raises(WakefulError, match="would leave out one") as refused:
        narrow_config(config, WidthConfig(mlp=1 - 1e-9))
    share = float(str(refused.value).partition(": ")[2].split()[0])
    assert narrow_config(config, WidthConfig(mlp=share)).mlp_width == whole - 1


@pytest.mark.parametrize(
    "over",
    [{"route": "svformer"}, {"normalizer": "softmax1(learned=True)"},
     {"qk_norm_whole": True, "qk_norm": True}],
    ids=str,
)  # fmt: skip
def test_parts_with_heads_of_their_own_are_refused_unless_all_heads_stay(over: dict) -> None:
    name = next(iter(over))
    reference = grouped(**over)
    with pytest.raises(WakefulError, match=rf"model\.{name} = .*: --width\.heads narrows"):
        narrow(reference, HALF, TOKENS)
    bare, made_up = (
        narrow(reference, WidthConfig(mlp=0.5), TOKENS, how) for how in (NONE, BridgeConfig())
    )
    assert made_up.config.num_heads == 4
    assert off(made_up, reference) < 0.7 * off(bare, reference)


def test_turned_channels_are_refused_unless_all_stay() -> None:
    reference = grouped(mlp_rotation=True)
    with pytest.raises(WakefulError, match=r"model\.mlp_rotation = True: --width\.mlp narrows"):
        narrow(reference, WidthConfig(mlp=0.5), TOKENS)
    assert narrow(reference, WidthConfig(heads=0.5), TOKENS).config.num_heads == 2


@pytest.mark.parametrize("normalizer", ["softcap(cap=2.0)", "softmax1", "relu"])
def test_normalizers_without_parameters_are_narrowed(normalizer: str) -> None:
    reference = without(grouped(normalizer=normalizer))
    before = reference(TOKENS)
    found = narrow(reference, HALF, TOKENS)
    torch.testing.assert_close(found(TOKENS), before, rtol=1e-9, atol=1e-9)


def test_a_share_is_between_0_and_1() -> None:
    with pytest.raises(WakefulError, match=r"width\.mlp must be in \[0, 1\], got 1\.5"):
        WidthConfig(mlp=1.5)


def test_narrowing_in_float32_and_in_mixed_precision_comes_near_float64() -> None:
    reference = grouped()
    options = BridgeConfig(ridge=1e-2)
    exact = narrow(reference, HALF, TOKENS, options)
    single = narrow(copy.deepcopy(reference).float(), HALF, TOKENS, options)
    context = torch.autocast("cpu", dtype=torch.bfloat16)
    mixed = narrow(copy.deepcopy(reference).float(), HALF, TOKENS, options, autocast=context)
    name = "blocks.1.mlp.down.weight"
    wanted = exact.get_parameter(name)
    torch.testing.assert_close(single.get_parameter(name).double(), wanted, rtol=1e-3, atol=1e-5)
    distance = (mixed.get_parameter(name).double() - wanted).norm() / wanted.norm()
    assert 0 < distance < 0.1  # bfloat16 has three digits, and a ridge of 0.01 lets them grow
