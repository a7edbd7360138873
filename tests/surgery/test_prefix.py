"""A stored prefix gives what the same tokens give when they are read with every text."""

import dataclasses
from typing import Any

import polars as pl
import pytest
import torch
from tests.helpers import EXAMPLES, FIELD
from torch import Tensor

from wakeful.config.model import ModelConfig
from wakeful.errors import WakefulError
from wakeful.model.attention import StoredPrefix
from wakeful.model.decoder import Decoder
from wakeful.model.generate import generate_tokens
from wakeful.probes.base import AttentionEvent, Event, Frame, Probe
from wakeful.probes.streaming import head_weights
from wakeful.probes.watch import watch
from wakeful.surgery import store_prefix

TOKENS = [5, 3]
SMALL = {
    "vocab_size": 61, "max_length": 24, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2,
    "width": 24, "mlp_width": 40,
}  # fmt: skip


def decoder(**changes: object) -> Decoder:
    torch.manual_seed(0)
    made = Decoder(ModelConfig(**{**SMALL, **changes})).double().eval()  # pyright: ignore
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return made


def text(rows: int = 2, length: int = 11) -> Tensor:
    return torch.randint(61, (rows, length), generator=torch.Generator().manual_seed(1))


def after(tokens: Tensor) -> Tensor:
    return torch.cat([torch.tensor([TOKENS] * len(tokens)), tokens], dim=1)


@pytest.mark.parametrize(("folder", "expression"), EXAMPLES)
def test_every_variant_reads_on_from_the_prefix(folder: str, expression: str) -> None:
    plain = decoder(**{FIELD[folder]: expression})
    stored = store_prefix(plain, TOKENS)
    expected = plain(after(text()))[:, 2:]
    torch.testing.assert_close(stored(text()), expected, rtol=1e-10, atol=1e-10)
    cache = stored.new_cache(2, 11)
    parts = [stored(part, cache=cache) for part in text().split([4, 1, 1, 5], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=1e-10, atol=1e-10)


def test_the_prefix_is_put_into_a_cache_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = store_prefix(decoder(), TOKENS)
    expected = stored(text())
    cache = stored.new_cache(2, 3)  # with less room than is needed
    monkeypatch.setattr(StoredPrefix, "forward", None)  # which joins the prefix to keys and values
    parts = []
    for part in text().split(1, dim=1):
        cache.reserve(cache.length + 1)
        parts.append(stored(part, cache=cache))
        if cache.length == 4:
            kept = {slot: cache.read(slot)[:, :2].clone() for slot in stored.cache_slots}
            cache.crop(2)
            assert all(torch.equal(cache.read(slot), kept[slot]) for slot in kept)
            stored(text()[:, 2:4], cache=cache)
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=1e-10, atol=1e-10)
    cache.crop(0)
    cache.reorder(torch.tensor([1, 1, 0]))
    found = stored(text()[[1, 1, 0]], cache=cache)
    torch.testing.assert_close(found, expected[[1, 1, 0]], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("positions", ["rotary", "learned", "none"])
def test_positions_count_the_prefix(positions: str) -> None:
    plain = decoder(positions=positions)
    stored = store_prefix(plain, TOKENS)
    torch.testing.assert_close(stored(text()), plain(after(text()))[:, 2:], rtol=1e-10, atol=1e-10)


def test_padding_stands_after_the_prefix() -> None:
    stored = store_prefix(decoder(), TOKENS)
    valid = torch.tensor([[False] * 3 + [True] * 8, [True] * 11])
    found = stored(text(), valid=valid)
    alone = stored(text()[:1, 3:])
    torch.testing.assert_close(found[:1, 3:], alone, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found[1:], stored(text()[1:]), rtol=1e-10, atol=1e-10)


def test_every_document_sees_the_prefix() -> None:
    stored = store_prefix(decoder(), TOKENS)
    found = stored(text(1), documents=torch.tensor([[0] * 4 + [1] * 7]))
    apart = [stored(part) for part in text(1).split([4, 7], dim=1)]
    torch.testing.assert_close(found, torch.cat(apart, dim=1), rtol=1e-10, atol=1e-10)


def test_gradients_against_finite_differences() -> None:
    stored = store_prefix(decoder(normalizer="softmax1(learned=True)"), TOKENS).requires_grad_(True)
    query = "blocks.1.attention.query.weight"
    stored(text()).square().mean().backward()
    got = stored.get_parameter(query).grad
    assert got is not None
    direction = torch.randn(got.shape, generator=torch.Generator().manual_seed(2)).double()
    step = 1e-6

    def loss(sign: float) -> Tensor:
        with torch.no_grad():
            weight = stored.get_parameter(query)
            weight.add_(sign * step * direction)
            value = stored(text()).square().mean()
            weight.sub_(sign * step * direction)
        return value

    slope = (loss(1) - loss(-1)) / (2 * step)
    torch.testing.assert_close((got * direction).sum(), slope, rtol=1e-6, atol=1e-9)


def test_the_text_has_the_rest_of_the_context() -> None:
    stored = store_prefix(decoder(), TOKENS)
    assert stored.config.context == 22
    stored(text(1, 22))
    with pytest.raises(WakefulError, match="context of 22"):
        stored(text(1, 23))


def test_generation_goes_on_from_the_prefix() -> None:
    plain, prompt = decoder(), [7, 8, 9]
    stored = store_prefix(plain, TOKENS)
    choice = {"num_tokens": 6, "temperature": 0.0}
    assert list(generate_tokens(stored, prompt, **choice)) == list(
        generate_tokens(plain, [*TOKENS, *prompt], **choice)
    )


def test_weights_are_shared_and_the_model_unchanged() -> None:
    plain = decoder(tied=True)
    stored = store_prefix(plain, TOKENS)
    assert stored.embed.weight is plain.embed.weight is stored.head.weight
    assert plain.config.stored_prefix == 0
    assert stored.blocks[0].attention.stored.keys.shape == (2, 2, 6)
    assert all(parameter.requires_grad for parameter in plain.parameters())
    frozen = decoder(tied=True).requires_grad_(False)
    store_prefix(frozen, TOKENS)
    assert not any(parameter.requires_grad for parameter in frozen.parameters())


@pytest.mark.parametrize("tokens", [[], [61], [-1], list(range(24))])
def test_what_cannot_be_a_prefix_is_refused(tokens: list[int]) -> None:
    with pytest.raises(WakefulError):
        store_prefix(decoder(), tokens)


def test_a_second_prefix_is_refused() -> None:
    with pytest.raises(WakefulError, match="already"):
        store_prefix(store_prefix(decoder(), TOKENS), TOKENS)


WINDOW: dict[str, Any] = {"local_layers": (0, 2), "local_theta": 10_000.0, "window": 4}


@torch.no_grad()
def test_no_window_hides_the_prefix() -> None:
    """Against attention layer by layer, where every query sees the prefix and its window."""
    plain = decoder(**WINDOW)
    stored = store_prefix(plain, TOKENS)
    whole = after(text())
    distance = torch.arange(13).unsqueeze(1) - torch.arange(13)
    x, flow = plain.before_blocks(plain.embed(whole), tokens=whole)
    for layer, block in enumerate(plain.blocks):
        near = (distance < 4) | (torch.arange(13) < 2)
        keep = (distance >= 0) & (near if layer in WINDOW["local_layers"] else True)
        x = block(x, dataclasses.replace(flow, keep=keep.unsqueeze(0), near=None))[0]
    expected = plain.logits(plain.after_blocks(x))[:, 2:]
    torch.testing.assert_close(stored(text()), expected, rtol=1e-10, atol=1e-10)
    # Within the window it is the model itself after these tokens.
    short = plain(whole)[:, 2:4]
    torch.testing.assert_close(stored(text())[:, :2], short, rtol=1e-10, atol=1e-10)
    cache = stored.new_cache(2, 11)
    parts = [stored(part, cache=cache) for part in text().split([4, 1, 1, 5], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=1e-10, atol=1e-10)
    valid = torch.tensor([[False] * 3 + [True] * 8, [True] * 11])
    found = stored(text(), valid=valid)[0, 3:]
    torch.testing.assert_close(found, stored(text()[:1, 3:])[0], rtol=1e-10, atol=1e-10)
    with watch(stored, seen := Recorder()):
        stored(text(1))
    for event in seen.events:
        weights = torch.stack([head_weights(event.sequences[0], head) for head in range(4)])
        sums = weights.sum((1, 2)) + event.statistics[0].stored_mass
        torch.testing.assert_close(sums, torch.full((4,), 11.0).double())


@pytest.mark.parametrize("route", ["own", "svformer"])
@pytest.mark.parametrize("normalizer", ["softmax", "softmax1(learned=True)"])
def test_probes_see_the_text_s_own_weights(route: str, normalizer: str) -> None:
    plain = decoder(route=route, normalizer=normalizer)
    stored = store_prefix(plain, TOKENS)
    length = 150  # more than one tile
    longer = {"max_length": 160}
    plain, stored = _longer(plain, longer), _longer(stored, longer)
    tokens = text(1, length)
    seen, whole = Recorder(), Recorder()
    with watch(stored, seen), torch.no_grad():
        stored(tokens)
    with watch(plain, whole), torch.no_grad():
        plain(after(tokens))
    for mine, theirs in zip(seen.events, whole.events, strict=True):
        (a,), (b,) = mine.statistics, theirs.statistics
        weights = torch.stack([head_weights(theirs.sequences[0], h) for h in range(4)])[:, 2:]
        torch.testing.assert_close(a.column_sums, weights[..., 2:].sum(1), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(a.stored_mass, weights[..., :2].sum((1, 2)))
        top = weights.argmax(-1) == 2
        assert torch.equal(a.first_key_rows, top.sum(-1).double())
        assert b.stored_mass is None


class Recorder(Probe):
    def __init__(self) -> None:
        self.events: list[AttentionEvent] = []

    def see(self, event: Event) -> None:
        if isinstance(event, AttentionEvent):
            self.events.append(event)

    def rows(self) -> Frame:
        return pl.DataFrame()


def _longer(model: Decoder, changes: dict[str, int]) -> Decoder:
    made = Decoder(dataclasses.replace(model.config, **changes)).double().eval()
    made.load_state_dict(model.state_dict())
    return made
