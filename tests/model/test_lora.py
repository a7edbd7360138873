"""Low-rank adapters: peft's definition, where a model begins, and what learns."""

import peft
import pytest
import torch
from torch import nn

from helpers import some_tokens, tiny_decoder
from wakeful.errors import WakefulError
from wakeful.model.lora import LowRank, adapt, merged_weight
from wakeful.variants.roles import role_of


def test_one_layer_is_pefts() -> None:
    torch.manual_seed(0)
    theirs = peft.inject_adapter_in_model(
        peft.LoraConfig(r=3, lora_alpha=5, target_modules=["0"]),
        nn.Sequential(nn.Linear(7, 4)),
    )[0]
    ours = LowRank(7, 4)
    ours.adapt(3, 5.0, seed=0)
    with torch.no_grad():
        theirs.lora_B.default.weight.normal_()
        ours.weight.copy_(theirs.base_layer.weight)
        ours.bias.copy_(theirs.base_layer.bias)
        ours.lora_a.copy_(theirs.lora_A.default.weight)
        ours.lora_b.copy_(theirs.lora_B.default.weight)
    x = torch.randn(2, 5, 7)
    torch.testing.assert_close(ours(x), theirs(x))
    found = merged_weight(ours.weight, ours.lora_a, ours.lora_b, ours.lora_scale)
    theirs.merge()
    torch.testing.assert_close(found, theirs.base_layer.weight)
    # Drawn as widely as peft draws.
    ours.adapt(4096, 1.0, seed=1)
    assert ours.lora_a.std().item() == pytest.approx((1 / (3 * 7)) ** 0.5, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("modules", "layers"),
    [("all", ["query", "key", "value", "out", "gate", "up", "down"]),
     ("attention", ["query", "key", "value", "out"]), ("mlp", ["gate", "up", "down"])],
)  # fmt: skip
def test_a_decoder_begins_as_it_was_and_only_adapters_learn(
    modules: str, layers: list[str]
) -> None:
    plain, tokens = tiny_decoder(mlp="swiglu"), some_tokens(2, 9)
    decoder = adapt(tiny_decoder(mlp="swiglu"), 2, alpha=4.0, modules=modules, seed=7)
    assert torch.equal(decoder(tokens), plain(tokens))
    free = {name for name, p in decoder.named_parameters() if p.requires_grad}
    assert {name.split(".")[3] for name in free} == set(layers)
    assert len(free) == 2 * len(layers) * plain.config.num_layers
    decoder.loss(tokens, tokens).backward()
    before = {name: p.detach().clone() for name, p in plain.named_parameters()}
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            assert (parameter.grad is not None) == (name in free)
            if parameter.grad is not None:
                parameter.sub_(parameter.grad)
    for name, parameter in decoder.named_parameters():
        if name not in free:
            assert torch.equal(parameter, before[name]), name
    assert decoder.loss(tokens, tokens) < plain.loss(tokens, tokens)
    for name in free:
        role = role_of(decoder.get_parameter(name))
        assert role is not None
        assert not role.decays


@pytest.mark.parametrize(
    ("fields", "learn"),
    [
        ({"normalizer": "softmax1(learned=True)"}, ["log_sinks"]),
        ({"route": "value_embedding"}, ["tables", "gates"]),
        ({"route": "then(gated, output_gate)"}, ["gates"]),
        ({"route": "resformer(mode='learnable')"}, ["weights"]),
        ({"route": "resformer"}, []),
        ({"depth": "denseformer"}, ["weights"]),
        ({"norm": "gated_norm"}, []),
    ],
)
def test_what_routes_depth_mixes_and_normalizers_learn_learns_on(
    fields: dict[str, str], learn: list[str]
) -> None:
    decoder, tokens = adapt(tiny_decoder(**fields), 2, alpha=4.0), some_tokens(2, 9)
    decoder.loss(tokens, tokens).backward()
    free = {name for name, p in decoder.named_parameters() if p.requires_grad}
    others = {name for name in free if ".lora_" not in name}
    assert all(decoder.get_parameter(name).grad is not None for name in free)
    assert bool(others) == bool(learn)
    for part in learn:
        assert any(part in name for name in others), others
    plain = tiny_decoder(**fields)
    variants = {
        name for name, _ in plain.named_parameters()
        if name.startswith(("route.", "depth.")) or ".normalizer." in name
    }  # fmt: skip
    assert others == variants


def test_the_draw_hangs_on_seed_and_layer_alone() -> None:
    def drawn(seed: int, modules: str) -> torch.Tensor:
        decoder = adapt(tiny_decoder(), 2, alpha=1.0, modules=modules, seed=seed)
        return decoder.get_parameter("blocks.1.mlp.down.lora_a")

    assert torch.equal(drawn(0, "all"), drawn(0, "mlp"))
    assert not torch.equal(drawn(0, "all"), drawn(1, "all"))


@pytest.mark.parametrize("given", [{"rank": 0, "alpha": 1.0}, {"rank": 2, "alpha": 0.0}])
def test_no_rank_and_no_scale_are_refused(given: dict[str, float]) -> None:
    with pytest.raises(WakefulError, match="alpha positive"):
        adapt(tiny_decoder(), **given)
