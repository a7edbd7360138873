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
    choose_sink_tokens,
    free_share,
    losses_after_opening,
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
    """Return up to `WINDOWS` windows of a text of N tokens, spread evenly over it.

    A window has `WINDOW` tokens, or fewer where the text or the model's `context` is too short.
    """
    length = max(2, min(WINDOW, context, len(tokens) // WINDOWS))  # at least one to predict
    windows = tokens[: len(tokens) // length * length].view(-1, length)
    return windows[:: max(1, len(windows) // WINDOWS)][:WINDOWS]


def likely_sink_tokens(loaded: Model, model: nn.Module, windows: Int[Tensor, "B L"]) -> list[int]:
    """Return the tokens that a model may use as a sink, the likeliest first.

    They are BOS, the first token that the tokenizer puts before a text, the first that the chat
    template puts before a user's turn, the end of text, and the most attended and the most frequent
    tokens of the windows. `model` is the module to watch: the loaded one, or a decoder made of it.

    Raises:
        WakefulError: a candidate has no embedding.
    """
    candidates = [] if loaded.bos is None else loaded.start_tokens("on")  # BOS alone
    candidates += loaded.opening[:1]  # what the tokenizer puts before a text
    try:
        turn = user_turn(loaded.wakeful_tokenizer)
    except WakefulError:  # the chat template has no user's turn
        turn = None
    if turn is not None:
        candidates += turn.before[:1]
    if loaded.end is not None:
        candidates.append(loaded.end)
    shares = KeyShares()
    watched = windows[:2]  # enough to see what takes much attention
    with torch.inference_mode(), watch(model, shares):
        for row in watched:
            logits_of(model, row[None])
    largest_mass: dict[int, float] = {}
    for row, masses in zip(watched.tolist(), shares.masses, strict=True):
        for token, mass in zip(row, masses.tolist(), strict=True):
            largest_mass[token] = max(largest_mass.get(token, 0.0), mass)
    attended = sorted(largest_mass, key=largest_mass.__getitem__, reverse=True)[:_ATTENDED]
    counts = torch.bincount(windows.flatten())
    most_frequent = counts.argsort(descending=True)[:_FREQUENT].tolist()
    frequent = [token for token in most_frequent if counts[token] > 0]
    without_repeats = [*dict.fromkeys([*candidates, *attended, *frequent])]
    return loaded.check_tokens(without_repeats)


def choose_prefix(
    loaded: Model,
    decoder: Decoder,
    windows: Int[Tensor, "B L"],
    *,
    bos: Bos = "auto",
    known: Iterable[SinkTrial] = (),
    on_progress: OnProgress = ignore_progress,
) -> SinkChoice:
    """Choose the token to store before a model's text.

    It is BOS, without measuring other tokens, if the model's loss with BOS stored is no higher than
    without and the text's first token is then no sink; otherwise the best of the likely sink
    tokens. `bos` says whether the model as it is reads BOS before a window. `known` are trials on
    these windows that need not be measured again.

    Raises:
        WakefulError: the model has a stored prefix already.
    """
    opening = loaded.start_tokens(bos)
    if loaded.bos is not None:
        choice = choose_sink_tokens(
            decoder, windows, loaded.start_tokens("on"), opening=opening, known=known
        )
        known = choice.trials
        # `best` has no tokens if storing nothing is best; its share is that of the text's first
        # token in the attention.
        if choice.best.tokens and choice.best.share <= free_share(windows.shape[1]):
            return choice
    return choose_sink_tokens(
        decoder, windows, likely_sink_tokens(loaded, decoder, windows), preferred=loaded.bos,
        opening=opening, known=known, on_progress=on_progress,
    )  # fmt: skip


def loss_change(before: Model, after: Model, text: Int[Tensor, "B L"], bos: Bos) -> LossChange:
    """Return the change of loss from the model `before` to `after` on windows of a text.

    Both read the same windows, each after its own start tokens; `bos` says whether these have BOS.
    """
    opening_before, opening_after = before.start_tokens(bos), after.start_tokens(bos)
    context = min(before.context, after.context)
    longest = context - max(len(opening_before), len(opening_after))
    length = max(2, min(WINDOW, text.shape[1], longest))  # at least one token to predict
    windows = text[:, : text.shape[1] // length * length].reshape(-1, length)
    return LossChange.between(
        losses_after_opening(before.module, windows, opening_before),
        losses_after_opening(after.module, windows, opening_after),
    )
