"""softmax-1 and learned sinks: the definition, its limits and its stability."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import some_tokens, tiny_config, tiny_decoder
from routes.reference import ROUTES, SINKS, WEIGHTS, Model
from wakeful.errors import WakefulError
from wakeful.model.decoder import Decoder
from wakeful.normalizers import Normalizer
from wakeful.parts.softmax1 import sink_softmax
from wakeful.variants import build, variants_by_name


@pytest.mark.parametrize("kv_heads", [1, 2, 4], ids=["mqa", "gqa", "mha"])
@pytest.mark.parametrize("expression", SINKS)
def test_a_decoder_uses_the_definition(expression, kv_heads):
    decoder = tiny_decoder(normalizer=expression, num_kv_heads=kv_heads)
    tokens = some_tokens(2, 11)
    model = Model(decoder, tokens)
    model.log_sink = SINKS[expression](model)
    torch.testing.assert_close(decoder(tokens), model.logits(ROUTES["own"]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", variants_by_name("normalizers"))
def test_every_normalizer_has_a_definition(name):
    assert any(expression.split("(")[0] == name for expression in SINKS)


def attached(expression: str) -> Normalizer:
    normalizer = build("normalizers", expression)
    normalizer.attach(tiny_config().shape)
    return normalizer


def test_softmax1_by_hand():
    logits = torch.tensor([1.0, 2.0, 5.0]).double().log().expand(1, 4, 1, 3)
    weights = sink_softmax(logits, attached("softmax1").log_sink(torch.zeros(1, 1, 16)))
    expected = torch.tensor([1.0, 2.0, 5.0]).double() / 9.0
    torch.testing.assert_close(weights, expected.expand(1, 4, 1, 3), rtol=0, atol=1e-15)
    sink = torch.tensor([2.0]).double().log().expand(4)
    torch.testing.assert_close(sink_softmax(logits, sink)[0, 0, 0], expected * 9 / 10)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.floats(-700, 700), min_size=1, max_size=9),
    sink=st.none() | st.floats(-700, 700),
)
def test_the_weights_are_a_share_of_one(rows, sink):
    logits = torch.tensor([[[rows]]], dtype=torch.float64)
    sinks = None if sink is None else torch.tensor([sink], dtype=torch.float64)
    weights = sink_softmax(logits, sinks)[0, 0, 0]
    # The same as the ordinary softmax with the sink's column added, and then dropped.
    column = [] if sink is None else [sink]
    expected = torch.tensor(rows + column, dtype=torch.float64).softmax(0)[: len(rows)]
    torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-300)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_extreme_logits_stay_finite(dtype):
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4], [1e4, 1e4, 1e4]], dtype=dtype)
    weights = sink_softmax(logits[None, None], torch.zeros(1, dtype=dtype))[0, 0]
    third = 1 / 3
    expected = torch.tensor([[1, 0, 0], [0, 0, 0], [third, third, third]], dtype=dtype)
    torch.testing.assert_close(weights, expected)


def test_a_query_that_sees_nothing_attends_to_nothing():
    logits = torch.full((1, 4, 2, 3), -math.inf, dtype=torch.float64)
    logits[:, :, 1, 0] = 0.0
    for sink in (None, torch.zeros(4).double()):
        weights = sink_softmax(logits, sink)
        assert (weights[:, :, 0] == 0).all()
        assert weights.isfinite().all()


@pytest.mark.parametrize("expression", WEIGHTS)
def test_weights_of_any_form_are_finite_shares(expression):
    """However large or small the logits are, and where a query sees nothing."""
    rows = [[1e4, -1e4, 0.0], [-1e4] * 3, [1e4] * 3, [-math.inf] * 3, [-math.inf, 2e3, -2e3]]
    logits = torch.tensor(rows).expand(1, 4, 5, 3).clone().requires_grad_()
    normalizer = attached(expression)
    weights = normalizer.weights(logits)
    assert (weights[logits == -math.inf] == 0).all()
    assert (weights >= 0).all()
    if not expression.startswith("relu"):
        assert (weights <= 1).all()
    weights.square().sum().backward()
    assert logits.grad.isfinite().all()


def test_weights_reach_zero_where_their_definition_says():
    exact = {"dtype": torch.float64}
    logits = torch.tensor([0.5, 0.3, 0.17, 0.03], **exact).log().expand(1, 4, 1, 4)
    assert (attached("softpick").weights(logits) == 0).all()  # every logit is below zero
    logits = torch.tensor([3.0, 1.0, 0.5], **exact).log().expand(1, 4, 1, 3)
    picked = attached("softpick(eps=1e-12)").weights(logits)[0, 0, 0]
    expected = torch.tensor([0.8, 0.0, 0.0], **exact)
    torch.testing.assert_close(picked, expected, rtol=0, atol=1e-9)


def test_a_constant_sink_is_no_parameter_and_is_not_saved():
    assert not [n for n in Decoder(tiny_config(normalizer="softmax1")).state_dict() if "sink" in n]
    names = Decoder(tiny_config(normalizer="softmax1(learned=True)")).state_dict()
    assert [tuple(value.shape) for name, value in names.items() if "log_sinks" in name] == [
        (4,)
    ] * 4


def test_a_learned_sink_starts_where_it_is_told():
    x = torch.ones(1, 2, 16)
    assert torch.equal(
        attached("softmax1(learned=True, start=1.5)").log_sink(x), torch.full((4,), 1.5)
    )
    assert torch.equal(attached("softmax1").log_sink(x), torch.zeros(4))
    assert attached("softmax").log_sink(x) is None


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("softmax2", "unknown normalizer 'softmax2'.*did you mean"),
        ("softmax1(learned=1)", "learned must be bool"),
        ("softmax1(start=True)", "start must be float"),
        ("softmax(learned=True)", "softmax has no option 'learned'"),
        ("softmax1(0.5)", "softmax1"),
        ("softpick(eps=0.0)", "softpick: eps must be positive, got 0"),
        ("relu(length=-4)", "relu: length must be a number of tokens, .* got -4"),
        ("sigmoid(length=-4)", "sigmoid: length must be a number of tokens, .* got -4"),
    ],
)
def test_what_makes_no_sense_is_refused(expression, message):
    with pytest.raises(WakefulError, match=message):
        Decoder(tiny_config(normalizer=expression))


EXTREMES = (0.0, 1.0, 88.0, -104.0, 1e4, -1e4, 3e38, -3e38, -math.inf)


@pytest.mark.parametrize("sink", [None, 0.0, 30.0, 1e4, -1e9, 3e38, -math.inf])
def test_extreme_logits_keep_to_the_definition_forward_and_backward(sink: float | None) -> None:
    """In float64 with the Jacobian written out: dx = p (g − Σ p g), ds = −p_s Σ p g."""
    rows = torch.tensor([*itertools.product(EXTREMES, repeat=3)])
    logits = rows.view(1, 1, -1, 3).requires_grad_()
    s = None if sink is None else torch.tensor([sink], requires_grad=True)
    upstream = torch.tensor([3.0, -200.0, 17.0]).expand(logits.shape)
    found = sink_softmax(logits, s)
    found.backward(upstream)

    x, g = logits.detach().double(), upstream.double()
    rest = torch.full((1, 1, len(rows), 1), -math.inf, dtype=torch.float64)
    rest = rest if s is None else s.detach().double().expand(rest.shape)
    everything = torch.cat([x, rest], -1)
    top = everything.amax(-1, keepdim=True)
    shares = (everything - top.masked_fill(top == -math.inf, 0.0)).exp()
    shares = shares / shares.sum(-1, keepdim=True).clamp_min(1e-300)
    p, left = shares.split([3, 1], -1)
    inner = (p * g).sum(-1, keepdim=True)
    torch.testing.assert_close(found.double(), p, rtol=0, atol=1e-6)
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad.double(), p * (g - inner), rtol=0, atol=2e-4)
    if s is not None:
        assert s.grad is not None
        torch.testing.assert_close(
            s.grad.double(), -(left * inner).sum().view(1), rtol=1e-5, atol=1e-3
        )


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_not_hidden(odd: float) -> None:
    logits = torch.tensor([[[[0.0, odd, 1.0], [0.0, 2.0, 1.0]]]])
    found = sink_softmax(logits, torch.zeros(1))
    assert found[0, 0, 0].isnan().any()
    assert found[0, 0, 1].isfinite().all()
