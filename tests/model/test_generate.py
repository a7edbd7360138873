"""Generation: what it chooses, and that the cache changes nothing."""

import pytest
import torch

from helpers import tiny_decoder
from wakeful.errors import WakefulError
from wakeful.model.decoder import Decoder
from wakeful.model.generate import choose, generate

PROMPT = [3, 1, 4, 1, 5]


def greedy_by_definition(decoder: Decoder, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(decoder(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(
    "options",
    [{}, {"route": "svformer"}, {"route": "cla"}, {"normalizer": "softmax1(learned=True)"},
     {"route": "then(resformer, neutreno)", "depth": "denseformer"}, {"positions": "learned"}],
)  # fmt: skip
def test_greedy_generation_is_the_argmax_of_full_forwards(options: dict) -> None:
    decoder = tiny_decoder(**options)
    expected = greedy_by_definition(decoder, PROMPT, 12)
    assert list(generate(decoder, PROMPT, num_tokens=12, temperature=0.0)) == expected
    assert list(generate(decoder, PROMPT, num_tokens=12, top_k=1)) == expected
    assert list(generate(decoder, PROMPT, num_tokens=12, top_p=1e-9)) == expected


def test_the_seed_decides() -> None:
    decoder = tiny_decoder()
    first = list(generate(decoder, PROMPT, num_tokens=15, seed=1))
    assert list(generate(decoder, PROMPT, num_tokens=15, seed=1)) == first
    assert list(generate(decoder, PROMPT, num_tokens=15, seed=2)) != first


def test_generation_stops_before_its_stop_token() -> None:
    decoder = tiny_decoder()
    whole = list(generate(decoder, PROMPT, num_tokens=12, temperature=0.0))
    stop = whole[5]
    cut = list(generate(decoder, PROMPT, num_tokens=12, temperature=0.0, stop=stop))
    assert cut == whole[: whole.index(stop)]


def frequencies(**options: float) -> list[float]:
    logits = torch.tensor([0.5, 0.1, 0.3, 0.1]).log()
    generator = torch.Generator().manual_seed(0)
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0} | options
    drawn = [choose(logits, generator=generator, **settings) for _ in range(4000)]  # pyright: ignore[reportArgumentType]
    return [drawn.count(token) / 4000 for token in range(4)]


def test_choices_have_the_distribution_asked_for() -> None:
    assert frequencies() == pytest.approx([0.5, 0.1, 0.3, 0.1], abs=0.03)
    assert frequencies(top_k=2) == pytest.approx([0.625, 0, 0.375, 0], abs=0.03)
    # 0.5 does not reach 0.6, 0.5 + 0.3 does: the smallest set is those two.
    assert frequencies(top_p=0.6) == pytest.approx([0.625, 0, 0.375, 0], abs=0.03)
    assert frequencies(top_p=0.4) == [1.0, 0, 0, 0]
    flat = [p**0.5 for p in (0.5, 0.1, 0.3, 0.1)]
    expected = [p / sum(flat) for p in flat]
    assert frequencies(temperature=2.0) == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "empty prompt"),
        (PROMPT, {"num_tokens": 20}, "more than the model's context of 24"),
        (PROMPT, {"temperature": -1.0}, "must not be negative"),
        (PROMPT, {"top_p": 0.0}, r"top_p must be in \(0, 1\]"),
    ],
)
def test_impossible_requests_are_refused(prompt: list, options: dict, message: str) -> None:
    with pytest.raises(WakefulError, match=message):
        list(generate(tiny_decoder(), prompt, **({"num_tokens": 3} | options)))
