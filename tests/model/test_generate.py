"""Generation: what it chooses, and that the cache changes nothing."""

import math
from typing import Any

import pytest
import torch

from helpers import tiny_decoder
from wakeful.errors import WakefulError
from wakeful.model.decoder import Decoder
from wakeful.model.generate import Sampling, generate_tokens

PROMPT = [3, 1, 4, 1, 5]


def greedy_by_definition(decoder: Decoder, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(decoder(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"route": "svformer"}, {"route": "cla"}, {"normalizer": "softmax1(learned=True)"},
     {"route": "then(resformer, neutreno)", "depth": "denseformer"}, {"positions": "learned"}],
)  # fmt: skip
def test_greedy_generation_is_the_argmax_of_full_forwards(options: dict) -> None:
    decoder = tiny_decoder(**options)
    expected = greedy_by_definition(decoder, PROMPT, 12)
    assert list(generate_tokens(decoder, PROMPT, num_tokens=12, temperature=0.0)) == expected
    assert list(generate_tokens(decoder, PROMPT, num_tokens=12, top_k=1)) == expected
    assert list(generate_tokens(decoder, PROMPT, num_tokens=12, top_p=1e-9)) == expected


@pytest.mark.slow
def test_the_seed_decides() -> None:
    decoder = tiny_decoder()
    first = list(generate_tokens(decoder, PROMPT, num_tokens=15, seed=1))
    assert list(generate_tokens(decoder, PROMPT, num_tokens=15, seed=1)) == first
    assert list(generate_tokens(decoder, PROMPT, num_tokens=15, seed=2)) != first


@pytest.mark.slow
def test_generation_stops_before_its_stop_token() -> None:
    decoder = tiny_decoder()
    whole = list(generate_tokens(decoder, PROMPT, num_tokens=12, temperature=0.0))
    stop = whole[5]
    for ends in ({stop}, (whole[8], stop)):
        cut = list(generate_tokens(decoder, PROMPT, num_tokens=12, temperature=0.0, stop=ends))
        assert cut == whole[: min(whole.index(end) for end in ends)]


def frequencies(**options: float) -> list[float]:
    logits = torch.tensor([0.5, 0.1, 0.3, 0.1]).log()
    generator = torch.Generator().manual_seed(0)
    how = Sampling(**options)  # pyright: ignore[reportArgumentType]
    drawn = [int(how.choose(logits[None], generator)) for _ in range(4000)]
    return [drawn.count(token) / 4000 for token in range(4)]


@pytest.mark.slow
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
        (PROMPT * 5, {}, "25 prompt tokens and 3 new ones are more than the model's context of 24"),
        (PROMPT, {"temperature": -1.0}, "must not be negative"),
        (PROMPT, {"temperature": math.nan}, "must not be negative"),
        (PROMPT, {"top_k": -1}, "must not be negative"),
        (PROMPT, {"top_p": 1.5}, r"top_p must be in \(0, 1\]"),
        (PROMPT, {"top_p": math.nan}, r"top_p must be in \(0, 1\]"),
        (PROMPT, {"num_tokens": -1}, "num_tokens must not be negative"),
        (PROMPT, {"seed": 2**63}, "seed must be between"),
        (PROMPT, {"seed": -1}, "seed must be between"),
        (PROMPT, {"top_p": 0.0}, r"top_p must be in \(0, 1\]"),
    ],
)
def test_impossible_requests_are_refused(prompt: list, options: dict, message: str) -> None:
    with pytest.raises(WakefulError, match=message):
        # At once, before a first token is asked for.
        generate_tokens(tiny_decoder(), prompt, **({"num_tokens": 3} | options))


def test_the_context_can_be_filled_to_its_last_token() -> None:
    decoder = tiny_decoder()
    prompt = PROMPT * 4
    expected = greedy_by_definition(decoder, prompt, 4)
    assert list(generate_tokens(decoder, prompt, num_tokens=4, temperature=0.0)) == expected
    assert list(generate_tokens(decoder, PROMPT, num_tokens=0)) == []


def test_a_token_comes_as_soon_as_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, read = tiny_decoder(), []
    real = Decoder.hidden

    def hidden(self: Decoder, tokens: torch.Tensor, **options: Any) -> torch.Tensor:
        read.append(tokens.shape[1])
        return real(self, tokens, **options)

    monkeypatch.setattr(Decoder, "hidden", hidden)
    stream = generate_tokens(decoder, PROMPT, num_tokens=4)
    assert read == []
    next(stream)
    # The prompt was read once; from now on each token is read alone.
    assert read == [5]
    next(stream)
    assert read == [5, 1]
    list(stream)
    assert read == [5, 1, 1, 1]


@pytest.mark.slow
def test_any_temperature_above_zero_is_a_distribution() -> None:
    decoder = tiny_decoder()
    greedy = list(generate_tokens(decoder, PROMPT, num_tokens=9, temperature=0.0))
    for temperature in (5e-324, 1e-300, 1e-40, 1e-6):
        assert (
            list(generate_tokens(decoder, PROMPT, num_tokens=9, temperature=temperature)) == greedy
        )
    flat = frequencies(temperature=1e300)
    assert flat == pytest.approx([0.25] * 4, abs=0.03)


def test_more_than_the_vocabulary_is_all_of_it() -> None:
    decoder = tiny_decoder()
    everything = list(generate_tokens(decoder, PROMPT, num_tokens=9, top_k=0, seed=4))
    assert list(generate_tokens(decoder, PROMPT, num_tokens=9, top_k=1000, seed=4)) == everything


@pytest.mark.slow
def test_top_k_and_top_p_together_cut_twice() -> None:
    # The three likeliest are 5/9, 3/9 and 1/9; the first two of them reach 0.6.
    assert frequencies(top_k=3, top_p=0.6) == pytest.approx([0.625, 0, 0.375, 0], abs=0.03)
    # The two likeliest are 5/8 and 3/8: the first alone reaches 0.6.
    assert frequencies(top_k=2, top_p=0.6) == [1.0, 0, 0, 0]


def test_generation_leaves_no_graph_and_no_mode_behind() -> None:
    decoder = tiny_decoder()
    stream = generate_tokens(decoder, PROMPT, num_tokens=3)
    next(stream)
    # Between two tokens the caller's own mode holds.
    assert not torch.is_inference_mode_enabled()
    loss = decoder(torch.tensor([PROMPT])).square().mean()
    loss.backward()
    assert decoder.head.weight.grad is not None
    assert len(list(stream)) == 2
