"""Depth mixes against their plain definitions, and what they refuse."""

import math
from types import SimpleNamespace

import pytest
import torch

from depth.mixes import READS
from helpers import some_tokens, tiny_config, tiny_decoder
from routes.reference import DEPTHS, ROUTES, Model
from wakeful.depth.manifold import ManifoldHyperConnections, sinkhorn
from wakeful.errors import WakefulError
from wakeful.model.decoder import Decoder
from wakeful.variants import variants_by_name


@pytest.mark.parametrize("layers", [1, 4, 5])
@pytest.mark.parametrize("expression", DEPTHS)
def test_a_depth_mix_is_its_definition(expression, layers):
    if "period=2" in expression and layers == 1:
        pytest.skip("the period is longer than the model")
    decoder = tiny_decoder(depth=expression, num_layers=layers)
    tokens = some_tokens(2, 9)
    expected = Model(decoder, tokens).logits(ROUTES["own"], DEPTHS[expression])
    torch.testing.assert_close(decoder(tokens), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("layers", "placement"), [(1, "pre"), (4, "pre"), (5, "pre"), (4, "peri")])
@pytest.mark.parametrize("expression", READS)
def test_what_each_sublayer_reads_is_as_defined(expression, layers, placement):
    decoder = tiny_decoder(depth=expression, num_layers=layers, placement=placement)
    tokens = some_tokens(2, 9)
    expected = Model(decoder, tokens).logits(ROUTES["own"], reads=READS[expression])
    torch.testing.assert_close(decoder(tokens), expected, rtol=1e-12, atol=1e-12)


def test_a_depth_mix_and_a_route_do_not_meet():
    decoder = tiny_decoder(depth="denseformer", route="resformer")
    tokens = some_tokens(2, 9)
    expected = Model(decoder, tokens).logits(ROUTES["resformer"], DEPTHS["denseformer"])
    torch.testing.assert_close(decoder(tokens), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", variants_by_name("depth"))
def test_every_depth_mix_has_a_definition(name):
    assert any(expression.split("(")[0] == name for expression in (*DEPTHS, *READS))


def transformers_class(model: str, name: str) -> type[torch.nn.Module]:
    """Return a module of Transformers' implementation of a model; skip where it has none yet."""
    module = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    return getattr(module, name)


@pytest.mark.parametrize(
    ("model", "name", "mixing"),
    [
        ("deepseek_v4", "DeepseekV4", "sinkhorn"),
        ("hy_v4", "HYV4", "identity"),
    ],
)
def test_manifold_hyper_connections_are_those_of_released_models(model, name, mixing):
    decoder = tiny_decoder(depth=f'mhc(mixing="{mixing}")', dtype=torch.float32, noise=0.5)
    mix = decoder.depth
    assert isinstance(mix, ManifoldHyperConnections)
    config = SimpleNamespace(
        hc_mult=4, hc_sinkhorn_iters=20, hc_eps=1e-6, rms_norm_eps=1e-6, hidden_size=16,
        hc_magnitude=2.0,
    )  # fmt: skip
    streams, out = torch.randn(2, 5, 4, 16), torch.randn(2, 5, 16)

    def loaded(kind: str, sublayer: int, prefix: str = "") -> torch.nn.Module:
        theirs = transformers_class(model, name + kind)(config)
        weight = mix.maps[sublayer].unflatten(0, (4, -1)).transpose(0, 1).flatten(1)
        ours = {"fn": weight, "base": mix.biases[sublayer], "scale": mix.scales[sublayer]}
        theirs.load_state_dict({prefix + key: value for key, value in ours.items()})
        return theirs

    read, state = mix._read(3, streams)
    post, *comb, collapsed = loaded("HyperConnection", 3)(streams)
    torch.testing.assert_close(read, collapsed, rtol=1e-4, atol=1e-5)
    kept = comb[0].transpose(-1, -2) @ streams if comb else streams
    torch.testing.assert_close(state[0], kept, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state[1], post, rtol=1e-4, atol=1e-5)
    last, _ = mix.step(8, read, out, state)
    after = post.unsqueeze(-1) * out.unsqueeze(-2) + kept
    torch.testing.assert_close(last, loaded("HyperHead", 8, "hc_")(after), rtol=1e-4, atol=1e-5)


def test_mixing_is_doubly_stochastic_and_starts_with_streams_alike():
    shares = sinkhorn(torch.randn(7, 4, 4).double() * 3, 200)
    for axis in (-1, -2):
        total = shares.sum(axis)
        torch.testing.assert_close(total, torch.ones_like(total), rtol=0, atol=1e-4)
    mix = tiny_decoder(depth="mhc", noise=0).depth
    assert torch.equal(mix.biases[0][:4], torch.full((4,), -math.log(3)).double().float().double())
    assert all((scales == 0.01).all() for scales in (s.float() for s in mix.scales))


def test_denseformer_keeps_the_weights_its_sparser_forms_need():
    counts = {
        "denseformer": 2 + 3 + 4 + 5,
        "denseformer(dilation=2)": 1 + 2 + 2 + 3,
        "denseformer(period=2)": 3 + 5,
        "denseformer(dilation=2, period=2)": 2 + 3,
    }
    plain = Decoder(tiny_config()).num_parameters()["total"]
    for expression, count in counts.items():
        total = Decoder(tiny_config(depth=expression)).num_parameters()["total"]
        assert total - plain == count, expression


def test_only_the_hiddens_that_are_read_are_kept():
    assert Decoder(tiny_config())._kept_hiddens == set()
    assert Decoder(tiny_config(depth="denseformer"))._kept_hiddens == {0, 1, 2, 3}
    assert Decoder(tiny_config(depth="denseformer(period=4, dilation=2)"))._kept_hiddens == {0, 2}


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("denseformer(dilation=0)", "count from 1"),
        ("denseformer(period=0)", "count from 1"),
        ("denseformer(period=5)", "longer than the 4 layers"),
        ("mhc(streams=0)", "streams and iterations must be at least 1"),
        ("mhc(mixing='none')", "mixing must be"),
        ("resformer", "unknown depth mix .resformer."),
        ("denseformr", "did you mean 'denseformer'"),
        ("denseformer(dilation=2.5)", "dilation must be int"),
    ],
)
def test_what_makes_no_sense_is_refused(expression, message):
    with pytest.raises(WakefulError, match=message):
        Decoder(tiny_config(depth=expression))
