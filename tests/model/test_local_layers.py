"""Layers whose positions are of another kind: other bases, or none."""

import dataclasses
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from helpers import EXAMPLES, some_tokens, tiny_config, tiny_decoder
from wakeful.config.model import ModelConfig
from wakeful.config.tables import from_table, to_table
from wakeful.errors import WakefulError
from wakeful.inheritance.blocks import inherit_blocks
from wakeful.inheritance.layers import named_layers
from wakeful.probes import AttentionEvent
from wakeful.probes.streaming import head_weights
from wakeful.probes.watch import DecoderSource
from wakeful.surgery import learned_sinks, store_prefix

TOKENS = some_tokens(2, 11)
LOCAL: list[dict[str, Any]] = [
    {"local_layers": (1, 3)},
    {"local_layers": (0, 1), "local_theta": 50.0, "rope": "linear(factor=3.0)"},
]
WINDOW: dict[str, Any] = {"local_layers": (0, 2), "local_theta": 10_000.0, "window": 4}


@torch.no_grad()
def test_they_are_what_their_positions_are_everywhere_else() -> None:
    plain = tiny_decoder(rope_theta=50.0)(TOKENS)
    every = tiny_decoder(local_layers=(0, 1, 2, 3), local_theta=50.0)
    assert torch.equal(every(TOKENS), plain)
    none = tiny_decoder(positions="none")(TOKENS)
    assert torch.equal(tiny_decoder(local_layers=(0, 1, 2, 3))(TOKENS), none)
    assert torch.equal(tiny_decoder(local_layers=(0, 1, 2, 3), rope_theta=9.0)(TOKENS), none)
    one = tiny_decoder(local_layers=(2,), local_theta=50.0, rope="linear(factor=3.0)")
    assert not torch.allclose(one(TOKENS), plain)
    # Block by block: each is the block of the decoder that has its positions everywhere.
    others = {"rotary": tiny_decoder(rope="linear(factor=3.0)"), "local_rotary": every}
    x, flow = one.before_blocks(one.embed(TOKENS), tokens=TOKENS)
    for layer, block in enumerate(one.blocks):
        other = others[one.config.rope_table_name(layer)]
        _, theirs = other.before_blocks(other.embed(TOKENS), tokens=TOKENS)
        assert torch.equal(block(x, flow)[0], other.blocks[layer](x, theirs)[0])
        x = block(x, flow)[0]


@pytest.mark.parametrize("local", [*LOCAL, WINDOW])
@pytest.mark.parametrize("route", [name for folder, name in EXAMPLES if folder == "routes"])
@torch.no_grad()
def test_every_route_decodes_or_is_refused_by_name(route: str, local: dict[str, Any]) -> None:
    options = local | {"route": route}
    apart = _reads_apart(options)
    if apart:
        with pytest.raises(WakefulError, match=r"positions are of another kind \(model.local_lay"):
            tiny_decoder(**options)
        return
    decoder = tiny_decoder(**options)
    whole = decoder(TOKENS)
    cache = decoder.new_cache(2, 11)
    pieces = [decoder(piece, cache=cache) for piece in TOKENS.split([5, 1, 5], 1)]
    assert_close(torch.cat(pieces, 1), whole, rtol=0, atol=1e-12)


def _reads_apart(options: dict[str, Any]) -> bool:
    """Whether a layer reads queries or keys of one with other positions."""
    plan = tiny_decoder(route=options["route"]).plan
    local = options["local_layers"]
    return any(
        read.kind in ("query", "key", "keys") and (read.layer in local) != (layer in local)
        for layer, reads in enumerate(plan.reads)
        for read in reads
    )


@pytest.mark.slow
@pytest.mark.parametrize("local", LOCAL)
@torch.no_grad()
def test_prefixes_sinks_and_padding_keep_each_layers_positions(local: dict[str, Any]) -> None:
    decoder = tiny_decoder(**local)
    prefixed = store_prefix(decoder, [7])
    first = torch.full((2, 1), 7)
    assert_close(prefixed(TOKENS), decoder(torch.cat([first, TOKENS], 1))[:, 1:])
    valid = torch.arange(11) >= torch.tensor([[0], [4]])
    assert_close(decoder(TOKENS, valid=valid)[1:, 4:], decoder(TOKENS[1:, 4:]))
    if not local.get("local_theta"):  # exact where no position turns the shift
        local = local | {"local_layers": (0, 1, 2, 3)}
        decoder = tiny_decoder(**local)
        with_sinks = learned_sinks(decoder, 7, TOKENS)
        assert_close(with_sinks(TOKENS), store_prefix(decoder, [7])(TOKENS))
    else:
        assert torch.isfinite(learned_sinks(decoder, 7, TOKENS)(TOKENS)).all()


@pytest.mark.slow
@torch.no_grad()
def test_a_window_hides_what_is_further_away() -> None:
    plain, narrow = tiny_decoder(), tiny_decoder(**WINDOW)
    assert torch.equal(narrow(TOKENS[:, :4]), plain(TOKENS[:, :4]))
    whole = narrow(TOKENS)
    assert not torch.allclose(whole[:, 4:], plain(TOKENS)[:, 4:])
    # Layer by layer, by the definition.
    distance = torch.arange(11).unsqueeze(1) - torch.arange(11)
    x, flow = plain.before_blocks(plain.embed(TOKENS), tokens=TOKENS)
    for layer, block in enumerate(plain.blocks):
        keep = (distance >= 0) & (distance < (4 if layer in (0, 2) else 99))
        x = block(x, dataclasses.replace(flow, keep=keep.unsqueeze(0)))[0]
    assert_close(plain.head(plain.after_blocks(x)), whole, rtol=0, atol=1e-12)
    valid = torch.arange(11) >= torch.tensor([[0], [3]])
    assert_close(narrow(TOKENS, valid=valid)[1:, 3:], narrow(TOKENS[1:, 3:]))
    documents = (torch.arange(11) >= 5).long().expand(2, -1)
    assert_close(narrow(TOKENS, documents=documents)[:, 5:], narrow(TOKENS[:, 5:]))
    heir = inherit_blocks(narrow, named_layers([1, 2], of=4))
    assert (heir.config.local_layers, heir.config.window) == ((1,), 4)


@torch.no_grad()
def test_probes_see_the_window() -> None:
    events: list[Any] = []
    narrow = tiny_decoder(**WINDOW)
    with DecoderSource(narrow).open(events.append):
        narrow(TOKENS)
    seen = {e.layer: e for e in events if isinstance(e, AttentionEvent)}
    for layer in range(4):
        weights = torch.stack([head_weights(seen[layer].sequences[0], head) for head in range(4)])
        assert bool((weights[:, 10, :7] == 0).all()) == (layer in (0, 2))
        assert (weights[:, 10, 7:] > 0).all()


@pytest.mark.slow
def test_heirs_keep_the_positions_of_the_layers_that_stay() -> None:
    reference = tiny_decoder(**LOCAL[0])
    heir = inherit_blocks(reference, named_layers([0, 3], of=4))
    assert heir.config.local_layers == (1,)
    assert inherit_blocks(reference, named_layers([0, 2], of=4)).config.local_layers == ()
    assert inherit_blocks(reference, named_layers([1, 3, 1], of=4)).config.local_layers == (0, 1, 2)


def test_descriptions_of_before_and_after() -> None:
    config = tiny_config(**LOCAL[1])
    assert from_table(ModelConfig, to_table(config)) == config
    old = {name: value for name, value in to_table(tiny_config()).items() if "local" not in name}
    assert from_table(ModelConfig, old) == tiny_config()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"local_layers": (1, 4)}, "local_layers must be ascending numbers from 0 to 3"),
        ({"local_layers": (2, 1)}, "local_layers must be ascending"),
        ({"local_layers": (-1,)}, "local_layers must be ascending"),
        ({"window": -1}, "window must not be negative"),
        ({"local_theta": -1.0}, "local_theta must not be negative"),
        ({"local_layers": (1,), "positions": "learned"}, "are for rotary positions"),
    ],
)
def test_what_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(WakefulError, match=words):
        tiny_config(**options)


def test_surgery_refuses_a_window() -> None:
    with pytest.raises(WakefulError, match="sinks stand for one token that every layer sees"):
        learned_sinks(tiny_decoder(**WINDOW), 7, TOKENS)
