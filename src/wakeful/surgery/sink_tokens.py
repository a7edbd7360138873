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
    """Return the share of (query, head) pairs up to which the first of `length` tokens is no
    sink.
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
    before: Sequence[int] = (),
    known: Iterable[SinkTrial] = (),
    on_progress: OnProgress = ignore_progress,
) -> SinkChoice:
    """Choose the candidate that is best stored before a text, by the order above.

    Args:
        decoder: is not changed.
        windows: text to measure on.
        candidates: token ids, at least one.
        preferred: BOS, which is chosen if it is as good as the best.
        opening: tokens that the uncured model reads before each window.
        before: tokens already chosen, which are stored before the candidate.
        known: trials on these windows that need not be measured again.
        on_progress: called with the number of candidates measured and of all candidates.

    Raises:
        WakefulError: an id is past the vocabulary, or the model has a stored prefix already.
    """
    done = {trial.tokens: trial for trial in known}
    uncured = done.get(()) or measure_trial(decoder, windows, (), opening=opening)

    def prefixed(token: int) -> Decoder:
        return store_prefix(decoder, [*before, token])

    trials = race_tokens(
        candidates,
        windows,
        losses_of=lambda token, rows: losses_after_opening(prefixed(token), rows),
        begin=lambda token, rows: measure_trial(prefixed(token), rows, (*before, token)),
        known={
            tokens[-1]: trial
            for tokens, trial in done.items()
            if tokens and tokens[:-1] == (*before,)
        },
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
    """Return the trials on all windows of the candidates that stay in the race.

    Of many candidates, the `FINALISTS` of least loss on the beginnings of a few windows run on, and
    of those, the ones that are not worse than another on the first `SHARE_WINDOWS` windows.

    Args:
        candidates: token ids.
        windows: text to measure on.
        losses_of: returns a candidate's losses on windows.
        begin: returns its trial on the first windows.
        known: trials on all windows that need not be measured again.
        preferred: runs on from the beginnings of windows in any case.
        on_progress: called with the number of candidates measured and of all candidates.
    """
    trials = {token: known[token] for token in candidates if token in known}
    ids = [token for token in dict.fromkeys(candidates) if token not in trials]
    total = len(ids) + FINALISTS
    if len(ids) > FINALISTS:
        rows, length = SCREENED
        screening_windows = windows[:rows, :length]
        screened: dict[int, float] = {}
        for number, token in enumerate(ids):
            on_progress(number, total)
            screened[token] = sum(losses_of(token, screening_windows))
        ids = sorted(ids, key=screened.__getitem__)[:FINALISTS]
        if preferred in screened and preferred not in ids:
            ids[-1] = preferred
    first, rest = windows[:SHARE_WINDOWS], windows[SHARE_WINDOWS:]
    begun = dict[int, SinkTrial]()
    for number, token in enumerate(ids):
        on_progress(total - FINALISTS + number, total)
        begun[token] = begin(token, first)
    starts = [trial.losses[: len(first)] for trial in (*trials.values(), *begun.values())]
    for token, trial in begun.items():
        if not LossChange.between(min(starts, key=sum), trial.losses).is_worse:
            trials[token] = replace(trial, losses=trial.losses + losses_of(token, rest))
    on_progress(total, total)
    return trials


def choose_sink_cure(
    none: SinkTrial, trials: Mapping[int, SinkTrial], *, preferred: int | None, free: float
) -> SinkChoice:
    """Return which of the trials, by their last token, is best beside storing nothing.

    Up to the share `free` a text's first token is no sink.
    """
    tied = [trials[token] for token in by_preference(trials, preferred)]
    token = next((trial for trial in tied if trial.share <= free), None)
    token = token or min(tied, key=lambda trial: trial.share)
    harmless = LossChange.between(none.losses, token.losses).is_harmless
    return SinkChoice(token if harmless else none, token, (none, *trials.values()))


def by_preference(trials: Mapping[int, SinkTrial], preferred: int | None) -> list[int]:
    """Return the tokens as good in loss as the best, the preferred first, then by their loss."""
    ordered = sorted(trials, key=lambda token: sum(trials[token].losses))
    best = trials[ordered[0]].losses
    tied = [
        token for token in ordered if LossChange.between(best, trials[token].losses).is_harmless
    ]
    return sorted(tied, key=lambda token: token != preferred)


def measure_trial(
    model: nn.Module,
    windows: Int[Tensor, "B L"],
    tokens: tuple[int, ...],
    *,
    opening: Sequence[int] = (),
) -> SinkTrial:
    """Return the trial of a model with the stored `tokens`: its losses on windows after `opening`,
    and the sink that remains in the first `SHARE_WINDOWS` of them, a mean over layers.
    """
    sinks = Sinks()
    with torch.inference_mode(), watch(model, sinks):
        losses = losses_after_opening(model, windows[:SHARE_WINDOWS], opening)
    share, mass = remaining_sink(sinks)
    return SinkTrial(
        tokens, losses + losses_after_opening(model, windows[SHARE_WINDOWS:], opening), share, mass
    )


def remaining_sink(sinks: Sinks) -> tuple[float, float]:
    """Return the share of (query, head) pairs led by each sequence's first token and the attention
    that it takes, row 0 left out: means over layers.
    """
    rows = sinks.rows()
    rows = rows.filter(rows["head"].is_null())
    share, mass = (
        mean_over_layers(rows.filter(metric=f"first_key_{part}_without_row_0"))
        for part in ("share", "mass")
    )
    return share or 0.0, mass or 0.0


def prepend_tokens(opening: Sequence[int], text: Int[Tensor, "B L"]) -> Int[Tensor, "B S"]:
    """Return a text's token ids after the tokens `opening`."""
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

    Windows are read after `opening`, as many at once as have `together` tokens: alone where that
    is 1, as a model is read whose scales are a whole batch's.
    """
    losses: list[float] = []
    for rows in windows.split(max(1, together // windows.shape[1])) if len(windows) else ():
        logits = logits_of(model, prepend_tokens(opening, rows))[:, len(opening) : -1].float()
        tokens = cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
        losses += tokens.double().view(len(rows), -1).mean(1).tolist()
    return tuple(losses)
