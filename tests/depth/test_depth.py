"""Depth mixes against their plain definitions, and what they refuse."""

import pytest
import torch

from depth.mixes import READS
from helpers import some_tokens, tiny_config, tiny_decoder
from routes.reference import DEPTHS, ROUTES, Model
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
        ("resformer", "unknown depth mix .resformer."),
        ("denseformr", "did you mean 'denseformer'"),
        ("denseformer(dilation=2.5)", "dilation must be int"),
    ],
)
def test_what_makes_no_sense_is_refused(expression, message):
    with pytest.raises(WakefulError, match=message):
        Decoder(tiny_config(depth=expression))
