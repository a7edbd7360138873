"""Choice of the token that takes the sink: candidates for a model, and windows to measure on.

`wakeful.surgery.sink_tokens` says how they are measured.
"""

from collections.abc import Iterable

import torch
from jaxtyping import Int
from torch import Tensor, nn

from wakeful.config.reading import Bos
from wakeful.errors import WakefulError
from wakeful.estimates import LossChange
from wakeful.loading.chat import user_turn
from wakeful.loading.model import Model
from wakeful.model.decoder import Decoder
from wakeful.probes.attention import KeyShares
from wakeful.probes.running import logits_of
from wakeful.probes.watch import watch
from wakeful.surgery import (
    SinkChoice,
    SinkTrial,
    by_preference,
    choose_sink_tokens,
    free_share,
    losses_after_opening,
    race_tokens,
)
from wakeful.terminal.display import OnProgress, ignore_progress

WINDOWS = 8
"""Windows of text that a choice is measured on, and as many that it is verified on."""
WINDOW = 128
"""Tokens of a window, where the text and the model's context have as many."""
SPREAD = 4
"""Windows lie this many of their lengths apart, where the text is long enough."""
CHOOSING_TOKENS = WINDOWS * WINDOW * SPREAD
"""Tokens of text that windows are taken from."""
_FREQUENT = 6
"""Most frequent tokens of the text that are candidates."""
_ATTENDED = 4
"""Tokens of the text with the most attention that are candidates."""


def windows_of(tokens: Int[Tensor, "N"], context: int) -> Int[Tensor, "B L"]:
    """Return up to `WINDOWS` windows of a text, as far apart as it has room.

    Shorter ones where it has fewer tokens, or the model a shorter context.
    """
    length = max(2, min(WINDOW, context, len(tokens) // WINDOWS))
    windows = tokens[: len(tokens) // length * length].view(-1, length)
    return windows[:: max(1, len(windows) // WINDOWS)][:WINDOWS]


def likely_sink_tokens(loaded: Model, model: nn.Module, windows: Int[Tensor, "B L"]) -> list[int]:
    """Return the tokens that a model may use as a sink, the likeliest first.

    They are BOS, the first token that the tokenizer and the chat template put before a text, the
    end of text, and the most attended and the most frequent tokens of the windows.
    """
    candidates = [] if loaded.bos is None else loaded.start_tokens("on")
    candidates += loaded.opening[:1]
    try:
        turn = user_turn(loaded.wakeful_tokenizer)
    except WakefulError:  # a template without a user's turn says nothing
        turn = None
    candidates += [] if turn is None else turn.before[:1]
    candidates += [] if loaded.end is None else [loaded.end]
    shares = KeyShares()
    watched = windows[:2]
    with torch.inference_mode(), watch(model, shares):
        for row in watched:
            logits_of(model, row[None])
    mass: dict[int, float] = {}
    for row, masses in zip(watched.tolist(), shares.masses, strict=True):
        for token, value in zip(row, masses.tolist(), strict=True):
            mass[token] = max(mass.get(token, 0.0), value)
    attended = sorted(mass, key=mass.__getitem__, reverse=True)[:_ATTENDED]
    counts = torch.bincount(windows.flatten())
    frequent = counts.argsort(descending=True)[:_FREQUENT]
    frequent = [token for token in frequent.tolist() if counts[token]]
    return loaded.check_tokens([*dict.fromkeys([*candidates, *attended, *frequent])])


def choose_prefix(
    loaded: Model,
    decoder: Decoder,
    windows: Int[Tensor, "B L"],
    *,
    num_tokens: int = 1,
    bos: Bos = "auto",
    known: Iterable[SinkTrial] = (),
    on_progress: OnProgress = ignore_progress,
) -> SinkChoice:
    """Choose the tokens to store before a model's text, one after the other.

    BOS is the first where it takes the sink at no loss: no other token is measured then. `known`
    are trials on these windows that need not be measured again.

    Raises:
        WakefulError: the model has a stored prefix already.
    """
    opening, candidates, choice = loaded.start_tokens(bos), list[int](), None
    if loaded.bos is not None:
        choice = choose_sink_tokens(
            decoder, windows, loaded.start_tokens("on"), opening=opening, known=known
        )
        known = choice.trials
    settled = (
        choice is not None
        and choice.best.tokens
        and choice.best.share <= free_share(windows.shape[1])
    )
    if not settled or num_tokens > 1:
        candidates = likely_sink_tokens(loaded, decoder, windows)
    if choice is None or not settled:
        choice = choose_sink_tokens(
            decoder, windows, candidates, preferred=loaded.bos, opening=opening, known=known,
            on_progress=on_progress,
        )  # fmt: skip
    for _ in range(num_tokens - 1):
        choice = choose_sink_tokens(
            decoder, windows, candidates, opening=opening, before=choice.token.tokens,
            known=choice.trials[:1], on_progress=on_progress,
        )  # fmt: skip
    return choice


def choose_opening(loaded: Model, windows: Int[Tensor, "B L"]) -> SinkTrial:
    """Return the token that a model best reads before a text, by the loss; BOS if it is as good."""

    def losses_of(token: int, rows: Tensor) -> tuple[float, ...]:
        return losses_after_opening(loaded.module, rows, (token,))

    trials = race_tokens(
        likely_sink_tokens(loaded, loaded.module, windows), windows, losses_of=losses_of,
        begin=lambda token, rows: SinkTrial((token,), losses_of(token, rows)), known={},
        preferred=loaded.bos,
    )  # fmt: skip
    return trials[by_preference(trials, loaded.bos)[0]]


def loss_change(before: Model, after: Model, text: Int[Tensor, "B L"], bos: Bos) -> LossChange:
    """Return the change of loss from the model `before` to `after` on windows of a text."""
    openings = before.start_tokens(bos), after.start_tokens(bos)
    room = min(before.context, after.context) - max(map(len, openings))
    length = max(2, min(WINDOW, text.shape[1], room))
    rows = text[:, : text.shape[1] // length * length].reshape(-1, length)
    return LossChange.between(
        losses_after_opening(before.module, rows, openings[0]),
        losses_after_opening(after.module, rows, openings[1]),
    )
