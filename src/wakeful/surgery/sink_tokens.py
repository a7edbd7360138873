"""`choose_sink_tokens`: which tokens, stored before a text, take its sink at no loss.

Which token attention parks on is the model's own affair: BOS where it was trained with one, any
token at the beginning, or a delimiter. So it is measured on windows of text:

1. The loss. Every candidate is stored, and the windows' losses are paired with those of the model
   as it reads them now. A candidate is as good as the one of least loss where the 95% interval of
   their paired difference includes zero and the difference itself is small: of few windows an
   interval includes almost everything.
2. The sink that remains: of those, the ones after which the text's first token is the most attended
   key of few (query, head) pairs.
3. BOS if it is among them, else the one of least loss.

Storing nothing is a candidate as well. It wins where every token makes the loss worse. Of many
candidates, the best few on the beginnings of windows are read on whole ones, and the rest of the
windows only after those that are not worse than another on the first (`race_tokens`).
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from wakeful.estimates import LossChange
from wakeful.model.decoder import Decoder
from wakeful.probes.attention import Sinks
from wakeful.probes.base import mean_over_layers
from wakeful.probes.exact import even_shares
from wakeful.probes.running import logits_of
from wakeful.probes.watch import watch
from wakeful.surgery.prefix import store_prefix
from wakeful.terminal.display import OnProgress, ignore_progress

FREED = 0.05
"""Share of (query, head) pairs led by the text's first token, over that of even attention, up to
which it is no sink."""
FINALISTS = 4
"""Candidates that are measured on whole windows; more are first read on a few short ones."""
SCREENED = 4, 64
"""Windows, and the first tokens of each, that more candidates than those are first read on."""
SHARE_WINDOWS = 4
"""Windows on which the share of attention is measured, and clearly worse candidates drop out."""
TOGETHER = 256
"""Tokens of windows that are read at once."""


@dataclass(frozen=True)
class SinkTrial:
    """A prefix and what it does to windows of text."""

    tokens: tuple[int, ...]
    """The stored ids; none is the model as it is."""
    losses: tuple[float, ...]
    """Mean loss of each window, in nats per token."""
    share: float = math.nan
    """Share of (query, head) pairs led by the text's first token, row 0 left out."""
    mass: float = math.nan
    """Mean attention on that token, likewise."""


@dataclass(frozen=True)
class SinkChoice:
    """The prefix that was chosen, and all that were measured on every window."""

    best: SinkTrial
    """The prefix that takes the sink without loss; no tokens if there is none."""
    token: SinkTrial
    """The same of prefixes alone, whatever they cost."""
    trials: tuple[SinkTrial, ...]
    """The model as it is first."""

    def change(self, trial: SinkTrial) -> LossChange:
        """Return what a trial changes in the loss."""
        return LossChange.between(self.trials[0].losses, trial.losses)


def free_share(length: int) -> float:
    """Return the largest share of (query, head) pairs which may attend most to the first of
    `length` tokens without this token being called a sink.
    """
    return FREED + float(even_shares(length)[0])


@torch.no_grad()
def choose_sink_tokens(
    decoder: Decoder,
    windows: Int[Tensor, "B L"],
    candidates: Sequence[int],
    *,
    preferred: int | None = None,
    opening: Sequence[int] = (),
    known: Iterable[SinkTrial] = (),
    on_progress: OnProgress = ignore_progress,
) -> SinkChoice:
    """Choose the token that, stored before a text, becomes the attention sink in place of the
    text's first token, and does not make the loss worse.

    Candidates are compared by the rules of `choose_sink_cure`. If the one that they choose does
    harm to the loss, storing nothing is best.

    Args:
        decoder: is not changed.
        windows: text to measure on.
        candidates: token ids, at least one.
        preferred: BOS, which is chosen from several equally good candidates.
        opening: tokens that the model without a stored token reads before each window.
        known: trials on these windows that need not be measured again.
        on_progress: called with the number of candidates measured and of all candidates.

    Raises:
        WakefulError: an id is past the vocabulary, or the model has a stored prefix already.
    """
    known_by_tokens = {trial.tokens: trial for trial in known}  # () is the model as it is
    uncured = known_by_tokens.get(()) or measure_trial(decoder, windows, (), opening=opening)
    known_by_candidate = {tokens[0]: trial for tokens, trial in known_by_tokens.items() if tokens}

    def store_token(token: int) -> Decoder:
        return store_prefix(decoder, [token])

    trials = race_tokens(
        candidates,
        windows,
        losses_of=lambda token, rows: losses_after_opening(store_token(token), rows),
        begin=lambda token, rows: measure_trial(store_token(token), rows, (token,)),
        known=known_by_candidate,
        preferred=preferred,
        on_progress=on_progress,
    )
    return choose_sink_cure(uncured, trials, preferred=preferred, free=free_share(windows.shape[1]))


def race_tokens(
    candidates: Sequence[int],
    windows: Int[Tensor, "B L"],
    *,
    losses_of: Callable[[int, Tensor], tuple[float, ...]],
    begin: Callable[[int, Tensor], SinkTrial],
    known: Mapping[int, SinkTrial],
    preferred: int | None = None,
    on_progress: OnProgress = ignore_progress,
) -> dict[int, SinkTrial]:
    """Measure candidate tokens in rounds, after which bad ones drop out. Return the trials, on all
    windows, of those that are left, by token.

    If there are more than `FINALISTS`, those of least loss on the beginnings of a few windows go
    on. These are measured on the first `SHARE_WINDOWS` windows, and those whose loss is not clearly
    worse there than the best one's are measured on the rest.

    Args:
        candidates: token ids.
        windows: text to measure on.
        losses_of: takes a token and windows; returns the windows' losses with the token stored.
        begin: takes a token and the first windows; returns a trial on them.
        known: trials on all windows that need not be measured again, by token.
        preferred: a candidate that is a finalist in any case.
        on_progress: called with the number of candidates measured and of all candidates.
    """
    trials = {token: known[token] for token in candidates if token in known}
    finalists = [token for token in dict.fromkeys(candidates) if token not in trials]
    total = len(finalists) + FINALISTS
    if len(finalists) > FINALISTS:
        num_rows, length = SCREENED
        screening_windows = windows[:num_rows, :length]
        screening_losses: dict[int, float] = {}
        for number, token in enumerate(finalists):
            on_progress(number, total)
            screening_losses[token] = sum(losses_of(token, screening_windows))
        finalists = sorted(screening_losses, key=screening_losses.__getitem__)[:FINALISTS]
        if preferred in screening_losses and preferred not in finalists:
            finalists[-1] = preferred  # in place of the worst
    first, rest = windows[:SHARE_WINDOWS], windows[SHARE_WINDOWS:]
    first_trials = dict[int, SinkTrial]()
    for number, token in enumerate(finalists):
        on_progress(total - FINALISTS + number, total)
        first_trials[token] = begin(token, first)
    all_trials = (*trials.values(), *first_trials.values())
    best_losses = min((trial.losses[: len(first)] for trial in all_trials), key=sum)
    for token, trial in first_trials.items():
        if not LossChange.between(best_losses, trial.losses).is_worse:
            trials[token] = replace(trial, losses=trial.losses + losses_of(token, rest))
    on_progress(total, total)
    return trials


def choose_sink_cure(
    none: SinkTrial, trials: Mapping[int, SinkTrial], *, preferred: int | None, free: float
) -> SinkChoice:
    """Choose among the trials of stored tokens, by token, and `none`, the model as it is.

    Of the trials whose loss is as good as the best, take one after which the text's first token is
    no sink (`share` ≤ `free`): that of the `preferred` token, else that of least loss. If there is
    none, take the trial with the least share. The choice's `token` is this trial; its `best` is it
    too if it does no harm to the loss, and otherwise `none`.
    """
    tied = [trials[token] for token in by_preference(trials, preferred)]  # equally good in loss
    without_sink = [trial for trial in tied if trial.share <= free]
    chosen = without_sink[0] if without_sink else min(tied, key=lambda trial: trial.share)
    is_harmless = LossChange.between(none.losses, chosen.losses).is_harmless
    return SinkChoice(chosen if is_harmless else none, chosen, (none, *trials.values()))


def by_preference(trials: Mapping[int, SinkTrial], preferred: int | None) -> list[int]:
    """Return the tokens whose loss is as good as the best: the preferred one first, if it is among
    them, then the others from least loss.
    """
    by_loss = sorted(trials, key=lambda token: sum(trials[token].losses))
    best_losses = trials[by_loss[0]].losses
    tied = [
        token
        for token in by_loss
        if LossChange.between(best_losses, trials[token].losses).is_harmless
    ]
    return sorted(tied, key=lambda token: token != preferred)  # stable: others keep their order


def measure_trial(
    model: nn.Module,
    windows: Int[Tensor, "B L"],
    tokens: tuple[int, ...],
    *,
    opening: Sequence[int] = (),
) -> SinkTrial:
    """Measure a model that has the `tokens` stored: the loss of every window, read after the tokens
    `opening`, and the sink that remains at the text's first token.

    The sink is measured on the first `SHARE_WINDOWS` windows only.
    """
    sinks = Sinks()
    with torch.inference_mode(), watch(model, sinks):
        first_losses = losses_after_opening(model, windows[:SHARE_WINDOWS], opening)
    other_losses = losses_after_opening(model, windows[SHARE_WINDOWS:], opening)
    share, mass = remaining_sink(sinks)
    return SinkTrial(tokens, first_losses + other_losses, share, mass)


def remaining_sink(sinks: Sinks) -> tuple[float, float]:
    """Return (share, mass) of the sink at the text's first token, as means over layers; 0 if
    nothing was measured.

    `share` is the share of (query, head) pairs whose most attended key is this token, and `mass`
    the mean attention on it. The token's own query (row 0) is left out: it sees nothing else.
    """
    rows = sinks.rows()
    layer_rows = rows.filter(rows["head"].is_null())  # rows without a head: means over heads
    share = mean_over_layers(layer_rows.filter(metric="first_key_share_without_row_0"))
    mass = mean_over_layers(layer_rows.filter(metric="first_key_mass_without_row_0"))
    return share or 0.0, mass or 0.0


def prepend_tokens(opening: Sequence[int], text: Int[Tensor, "B L"]) -> Int[Tensor, "B S"]:
    """Return the token ids of texts, each with the tokens `opening` put before it."""
    first = torch.tensor([list(opening)], dtype=text.dtype, device=text.device)
    return torch.cat([first.expand(len(text), -1), text], 1)


@torch.inference_mode()
def losses_after_opening(
    model: nn.Module,
    windows: Int[Tensor, "B L"],
    opening: Sequence[int] = (),
    *,
    together: int = TOGETHER,
) -> tuple[float, ...]:
    """Return the mean loss of each window's tokens after its first, in nats per token.

    The model reads the tokens `opening` before each window; they have no loss. Windows are read in
    batches of about `together` tokens. With `together` = 1 each is read alone, for a model whose
    quantization scales are computed from a whole batch.
    """
    if not len(windows):  # a tensor without rows cannot be split
        return ()
    losses: list[float] = []
    for rows in windows.split(max(1, together // windows.shape[1])):
        # Of the window's tokens but the last: each predicts the token after it.
        logits = logits_of(model, prepend_tokens(opening, rows))[:, len(opening) : -1].float()
        token_losses = cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
        losses += token_losses.double().view(len(rows), -1).mean(1).tolist()
    return tuple(losses)
