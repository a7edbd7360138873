"""Routes against their plain definitions, what they keep and cache, and what they refuse."""

import pytest
import torch

from helpers import some_tokens, tiny_config, tiny_decoder
from routes.reference import ROUTES, SINKS, Model
from wakeful.errors import WakefulError
from wakeful.model.decoder import Decoder
from wakeful.probes.attention import Sinks, Values
from wakeful.probes.rank import Ranks
from wakeful.probes.watch import watch
from wakeful.routes.base import Read
from wakeful.variants import build, variants_by_name


@pytest.mark.parametrize("kv_heads", [1, 2, 4], ids=["mqa", "gqa", "mha"])
@pytest.mark.parametrize("expression", ROUTES)
def test_a_route_is_its_definition(expression, kv_heads):
    if "differential" in expression and kv_heads == 1:
        with pytest.raises(WakefulError, match=r"model.num_kv_heads must be even, got 1"):
            tiny_decoder(route=expression, num_kv_heads=1)
        return
    decoder = tiny_decoder(route=expression, num_kv_heads=kv_heads)
    tokens = some_tokens(2, 9)
    expected = Model(decoder, tokens).logits(ROUTES[expression])
    torch.testing.assert_close(decoder(tokens), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("expression", ["then(resformer, neutreno(lam=0.2))", "differential"])
def test_a_route_is_its_definition_under_softmax1(expression):
    decoder = tiny_decoder(route=expression, normalizer="softmax1(learned=True)")
    tokens = some_tokens(2, 9)
    model = Model(decoder, tokens)
    model.log_sink = SINKS["softmax1(learned=True)"](model)
    expected = model.logits(ROUTES[expression])
    torch.testing.assert_close(decoder(tokens), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", variants_by_name("routes"))
def test_every_route_has_a_definition_here(name):
    assert any(f"{name}(" in e or e == name or f" {name}" in e for e in ROUTES)


def test_gradients_flow_through_the_first_layers_values():
    """No detach: the loss of the last layer's mixed value reaches V_1's projection."""
    decoder = tiny_decoder(route='resformer(mode="constant", scale=2.0)')
    name = "blocks.0.attention.value.weight"
    tokens = some_tokens(2, 9)

    def loss(first: torch.Tensor) -> torch.Tensor:
        state = decoder.state_dict() | {name: first}
        return torch.func.functional_call(decoder, state, (tokens,)).square().mean()

    weight = decoder.get_parameter(name).detach().clone().requires_grad_()
    direction = torch.randn_like(weight)
    slope = (torch.autograd.grad(loss(weight), weight)[0] * direction).sum()
    with torch.no_grad():
        change = loss(weight + 1e-6 * direction) - loss(weight - 1e-6 * direction)
    torch.testing.assert_close(change / 2e-6, slope, rtol=1e-6, atol=1e-9)


def test_learned_weights_start_where_their_definition_says():
    def weights(expression: str, **overrides) -> dict[str, list]:
        config = tiny_config(route=expression, **overrides)
        return {name: p.tolist() for name, p in Decoder(config).route.named_parameters()}

    assert weights('resformer(mode="learnable")') == {"weights": [[0.5, 0.5]] * 3}
    assert weights('resformer(mode="learnable", init=(2.0, 1.0))') == {"weights": [[2.0, 1.0]] * 3}
    assert weights('resformer(mode="plus")') == {"total": [4.0], "share": [0.0] * 3}
    assert weights('on_layers([2], resformer(mode="plus"))', num_layers=6) == {
        "route.total": [6.0],
        "route.share": [0.0],
    }
    gated = weights("gated(start=0.5)")
    assert gated["gates.1.bias"] == [0.5, 0.5]
    assert gated["gates.1.weight"] == [[0.0] * 16] * 2
    gates = weights("output_gate(start=2.0)")
    assert gates["gates.0.bias"] == [2.0] * 4
    assert gates["gates.0.weight"] == [[0.0] * 16] * 4
    assert len(weights('output_gate(per="channel")')["gates.3.bias"]) == 4 * 8
    relu = Decoder(tiny_config(route='gated(gate="relu")')).route.gates["1"]
    assert relu.bias is None
    assert 0.01 < relu.weight.std() < 0.03
    embedded = Decoder(tiny_config(route="value_embedding")).route
    names = [f"{part}.{n}.weight" for part in ("gates", "tables") for n in (1, 3)]
    assert list(dict(embedded.named_parameters())) == names
    vectors = Decoder(tiny_config(route="differential")).route.vectors
    assert 0.05 < vectors.std() < 0.15
    for plain in ("own", "resformer", "neutreno", "svformer", "cla"):
        assert weights(plain) == {}


def test_a_differential_layer_s_probes_see_each_softmax():
    decoder = tiny_decoder(route="differential").eval()
    tokens = some_tokens(2, 9)
    with watch(decoder, Sinks(), Ranks(), Values()) as seen, torch.no_grad():
        decoder(tokens)
    assert seen.frame["value"].is_finite().all()
    model = Model(decoder, tokens)
    model.logits(ROUTES["differential"])
    shown = seen.frame.filter(layer=2, metric="first_key_mass_without_row_0")["value"].to_list()
    first = model.A(3)[:, :, 1:, 0].mean((0, 2))
    torch.testing.assert_close(shown[:4], first.tolist(), rtol=0, atol=1e-6)


def test_a_pull_on_borrowed_values_decodes_like_the_full_forward():
    """NeuTRENO on a layer that borrows an anchor's values corrects with the new tokens' alone."""
    expression = "then(svformer(anchors=[0, 2]), on_layers([2, 3], neutreno))"
    decoder = tiny_decoder(route=expression)
    tokens = some_tokens(2, 9)

    def definition(m: Model, n: int) -> torch.Tensor:
        anchor = 1 if n < 3 else 3
        return m.A(n) @ m.V[anchor] + (0.4 if n >= 3 else 0.0) * (m.V[1] - m.V[anchor])

    full = decoder(tokens)
    torch.testing.assert_close(full, Model(decoder, tokens).logits(definition), rtol=0, atol=1e-12)
    cache = decoder.new_cache(2, 9)
    pieces = [decoder(piece, cache=cache) for piece in tokens.split([3, 4, 1, 1], 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), full, rtol=0, atol=1e-10)


# ---------------------------------------------------------------------- what is kept


def test_svformer_has_one_value_projection_and_the_paper_s_cache():
    for layers in (1, 2, 3, 7):
        config = tiny_config(route="svformer", num_layers=layers)
        decoder, vanilla = Decoder(config), Decoder(tiny_config(num_layers=layers))
        owners = [name for name in decoder.state_dict() if "attention.value" in name]
        assert owners == ["blocks.0.attention.value.weight"]
        missing = set(vanilla.state_dict()) - set(decoder.state_dict())
        assert missing == {f"blocks.{n}.attention.value.weight" for n in range(1, layers)}
        # (N + 1) / 2N of vanilla's, exactly, in what is allocated.
        ours, theirs = (model.new_cache(2, 24).num_bytes for model in (decoder, vanilla))
        assert ours * 2 * layers == theirs * (layers + 1)
        assert decoder.cache_bytes_per_token * 2 * layers == vanilla.cache_bytes_per_token * (
            layers + 1
        )


@pytest.mark.parametrize(
    ("expression", "absent", "slots"),
    [
        ("svformer(anchors=[0, 2])", {("value", 1), ("value", 3)}, 4 + 2),
        ("cla", {(kind, n) for kind in ("key", "value") for n in (1, 3)}, 4),
        ("cla(group=3)", {(kind, n) for kind in ("key", "value") for n in (1, 2)}, 4),
        ("resformer", set(), 8),
    ],
)
def test_a_borrowing_layer_has_neither_projection_nor_cache(expression, absent, slots):
    decoder = Decoder(tiny_config(route=expression))
    names = decoder.state_dict().keys()
    found = {
        (kind, n)
        for kind in ("query", "key", "value")
        for n in range(4)
        if f"blocks.{n}.attention.{kind}.weight" not in names
    }
    assert found == absent
    assert len(decoder.cache_slots) == slots


def test_resformer_caches_the_mixed_value():
    decoder = tiny_decoder(route="resformer")
    tokens = some_tokens(1, 7)
    model = Model(decoder, tokens)
    model.logits(ROUTES["resformer"])
    cache = decoder.new_cache(1, 7)
    decoder(tokens, cache=cache)
    for n in range(1, 5):
        cache.length = 0
        stored = cache.extend(("values", n - 1), torch.empty(1, 0, 2, 8).double())
        assert stored.shape[1] == 0
        kept = cache._tensors["values", n - 1]
        torch.testing.assert_close(kept, model.Vmixed[n][:, ::2], rtol=0, atol=1e-12)


@pytest.mark.parametrize("expression", ["own", "resformer", "svformer", "gated", "neutreno", "cla"])
def test_rope_never_touches_values(expression):
    """The values that reach attention do not change when every angle does."""
    decoder = tiny_decoder(route=expression, num_layers=2)
    seen: dict[str, list] = {"k": [], "v": []}
    decoder.blocks[0].attention.dot.register_forward_pre_hook(
        lambda module, args: (seen["k"].append(args[1]), seen["v"].append(args[2]), None)[-1]
    )
    tokens = some_tokens(1, 9)
    decoder(tokens)
    decoder.rotary.cos.copy_(torch.randn_like(decoder.rotary.cos))
    decoder.rotary.sin.copy_(torch.randn_like(decoder.rotary.sin))
    decoder(tokens)
    assert torch.equal(*seen["v"])
    assert not torch.equal(*seen["k"])


def test_one_layer_needs_no_route():
    """A decoder of one layer has nothing earlier to look at; the acting routes fall away."""
    tokens = some_tokens(2, 5)
    vanilla = tiny_decoder(num_layers=1, noise=0)(tokens)
    for expression in ("resformer", "neutreno", "gated", "svformer", "cla"):
        found = tiny_decoder(num_layers=1, noise=0, route=expression)(tokens)
        assert torch.equal(found, vanilla), expression


def test_the_plan_names_every_tensor_a_layer_leaves():
    decoder = Decoder(tiny_config(route="then(resformer, neutreno(lam=0.2))"))
    assert decoder.plan.shared_kinds == [{"value"}, set(), set(), set()]
    assert decoder.plan.reads[1] == {Read("value", 0)}
    assert Decoder(tiny_config()).plan.shared_kinds == [set()] * 4


# ------------------------------------------------------------------ what is refused

REFUSED = {
    # A borrowing layer never mixes.
    "then(svformer, resformer)": r"resformer mixes the value of layer 1.*borrows layer 0",
    "then(resformer, svformer)": r"resformer mixes the value of layer 1",
    "then(svformer, gated)": r"gated mixes the value of layer 1",
    "then(cla, resformer)": r"resformer mixes the value of layer 1",
    "then(svformer, value_embedding(every=1))": r"value_embedding.* mixes the value of layer 1",
    # Two owners for one projection.
    "then(cla, svformer)": r"(?s)cla.*svformer.*both decide.*layer 3's value",
    "then(cla(group=3), on_layers([2], svformer(anchors=[0, 1])))": r"(?s)cla.*svformer.*both",
    # Nothing to add.
    "then(svformer, neutreno)": r"neutreno would add nothing at layer 1",
    "then(neutreno, svformer)": r"neutreno would add nothing at layer 1",
    "then(cla, neutreno)": r"neutreno would add nothing at layer 1",
    # One attention a layer.
    "then(differential, differential)": r"both replace the attention of layer 0",
    # A chain of borrowers, or a reading of what is not there.
    "then(cla(group=2), cla(group=3))": r"layer 3 would borrow its key from layer 2, which has",
    # Layers that are not there.
    "on_layers([4], resformer)": r"on_layers names the layers \[4\].*0 to 3",
    "on_layers(range(2, 9), resformer)": r"0 to 3",
    "on_layers([], resformer)": r"0 to 3",
    "on_layers([-1], resformer)": r"layer numbers from 0",
    "on_layers([1.5], resformer)": r"layer numbers from 0",
    # Layer 0 is the formulas' layer 1.
    "on_layers([0], resformer)": r"changes nothing: resformer .* layers \[0\].*counted from 0 here",
    "on_layers([0], svformer)": r"changes nothing",
    "on_layers([0], then(gated, neutreno))": r"changes nothing",
    "then(svformer, on_layers([0], resformer))": r"changes nothing",
    "on_layers([1], on_layers([2], resformer))": r"changes nothing",
    "on_layers([0, 2], cla)": r"changes nothing",
    "on_layers(2, resformer)": r"layer numbers from 0",
    "on_layers([1])": r"route",
    "on_layers([1], 3)": r"takes a route",
    "svformer(anchors=[0, 4])": r"anchor 4 is past the last layer 3",
    "svformer(anchors=[1, 2])": r"ascending layer numbers starting at 0",
    'output_gate(per="layer")': r"per must be 'head' or 'channel'",
    'gated(gate="tanh")': r"gate must be 'sigmoid' or 'relu' or 'mix', got 'tanh'",
    'gated(gate="relu", start=1.0)': r'start is used by gate="sigmoid" and "mix" only',
    "gated(channels=17)": r"gated: channels must be at most the width 16.*, got 17",
    "output_gate(channels=-1)": r"output_gate: channels must be at most the width 16.*, got -1",
    "value_embedding(every=0)": r"every must be at least 1 layer, got 0",
    "on_layers([0], value_embedding)": r"changes nothing",
    "svformer(anchors=[])": r"ascending",
    "svformer(anchors=[0, 2, 1])": r"ascending",
    "svformer(anchors=[0, True])": r"anchors must be",
    # Options that would be ignored, or make no sense.
    "resformer(scale=3.0)": r'scale is used by mode="constant"',
    "resformer(init=(0.0, 1.0))": r'init is used by mode="learnable"',
    'resformer(mode="learnable", init=(1.0,))': r"init must be tuple\[float, float\]",
    'resformer(mode="learnable", init=3)': r"init must be tuple\[float, float\], got 3",
    'resformer(mode="learnable", init=("a", 1.0))': r"init must be tuple",
    "resformer(mode=3)": r"mode must be 'identity' or .*, got 3",
    "svformer(anchors=3)": r"anchors must be list\[int\] | tuple\[int, ...\], got 3",
    "svformer(anchors='ab')": r"anchors must be",
    "svformer(anchors={0: 1})": r"anchors must be",
    "on_layers('ab', resformer)": r"layer numbers from 0",
    'resformer(mode="nonsense")': r"mode must be 'identity' or .*, got 'nonsense'",
    "cla(group=0)": r"at least 1 layer",
    "then()": r"at least one route",
    "then(3)": r"takes routes",
}


@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize("expression", REFUSED)
def test_what_makes_no_sense_is_refused_by_name(expression):
    with pytest.raises(WakefulError, match=REFUSED[expression]):
        Decoder(tiny_config(route=expression))


def test_a_route_kept_from_borrowing_layers_is_allowed():
    for expression in (
        "then(svformer(anchors=[0, 2]), on_layers([2], resformer))",
        "then(svformer(anchors=[0, 2]), on_layers([2, 3], neutreno))",
        "on_layers([0], own)",
        "on_layers([0, 1], resformer)",
        "then(resformer, on_layers([3], differential))",
        "on_layers([1, 2], svformer)",
        "on_layers([1, 2], cla(group=3))",
        "on_layers(which=[1, 2], route=resformer)",
        "then(then(resformer), on_layers([2], then(neutreno)))",
    ):
        decoder = tiny_decoder(route=expression)
        assert decoder(some_tokens(1, 5)).isfinite().all(), expression
        assert str(build("routes", str(decoder.route))) == str(decoder.route)
