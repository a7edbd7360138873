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
    known: Iterable[SinkTrial] = (),
    on_progress: OnProgress = ignore_progress,
) -> SinkChoice:
    """Choose the token that, stored before a text, takes the attention sink at no loss.

    Of the candidates whose loss is as good as the best, that is the one after which the text's
    first token is no sink; of several the preferred one, else the one of least loss.

    Args:
        decoder: is not changed.
        windows: text to measure on.
        candidates: token ids, at least one.
        preferred: BOS, which is chosen if it is as good as the best.
        opening: tokens that the uncured model reads before each window.
        known: trials on these windows that need not be measured again.
        on_progress: called with the number of candidates measured and of all candidates.

    Raises:
        WakefulError: an id is past the vocabulary, or the model has a stored prefix already.
    """
    trial_by_tokens = {trial.tokens: trial for trial in known}
    uncured = trial_by_tokens.get(()) or measure_trial(decoder, windows, (), opening=opening)
    known_by_candidate = {tokens[0]: trial for tokens, trial in trial_by_tokens.items() if tokens}

    def with_stored(token: int) -> Decoder:
        return store_prefix(decoder, [token])

    trials = race_tokens(
        candidates,
        windows,
        losses_of=lambda token, rows: losses_after_opening(with_stored(token), rows),
        begin=lambda token, rows: measure_trial(with_stored(token), rows, (token,)),
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
    """Return the trials, on all windows, of the candidate tokens that are not clearly worse than
    another, by token.

    Of many candidates, the `FINALISTS` of least loss on the beginnings of a few windows go on. Of
    those, the ones that are not worse than another on the first `SHARE_WINDOWS` windows are
    measured on the rest.

    Args:
        candidates: token ids.
        windows: text to measure on.
        losses_of: returns a candidate's losses on windows.
        begin: returns a candidate's trial on the first windows.
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
            finalists[-1] = preferred
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
    """Choose among trials, given by their last token, and `none`, the model as it is.

    Of the trials as good in loss as the best, take the first by preference after which the text's
    first token is no sink (`share` ≤ `free`), or else the one with the least share. The choice's
    `best` is that trial if it does no harm to the loss, and otherwise `none`.
    """
    tied = [trials[token] for token in by_preference(trials, preferred)]
    without_sink = [trial for trial in tied if trial.share <= free]
    chosen = without_sink[0] if without_sink else min(tied, key=lambda trial: trial.share)
    is_harmless = LossChange.between(none.losses, chosen.losses).is_harmless
    return SinkChoice(chosen if is_harmless else none, chosen, (none, *trials.values()))


def by_preference(trials: Mapping[int, SinkTrial], preferred: int | None) -> list[int]:
    """Return the tokens as good in loss as the best, the preferred first, then by their loss."""
    by_loss = sorted(trials, key=lambda token: sum(trials[token].losses))
    best_losses = trials[by_loss[0]].losses
    tied = [
        token
        for token in by_loss
        if LossChange.between(best_losses, trials[token].losses).is_harmless
    ]
    return sorted(tied, key=lambda token: token != preferred)  # the others keep their order


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
    """Return the share of (query, head) pairs whose most attended key is the sequence's first
    token, and the mean attention on that token, without queries of the first token itself: means
    over layers, 0 where nothing was measured.
    """
    rows = sinks.rows()
    layer_rows = rows.filter(rows["head"].is_null())  # means over a layer's heads
    share = mean_over_layers(layer_rows.filter(metric="first_key_share_without_row_0"))
    mass = mean_over_layers(layer_rows.filter(metric="first_key_mass_without_row_0"))
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

    The model reads the tokens `opening` before each window. Windows are read in batches of about
    `together` tokens; `together` = 1 reads each alone, for a model whose quantization scales are
    computed from a whole batch.
    """
    if not len(windows):
        return ()
    losses: list[float] = []
    for rows in windows.split(max(1, together // windows.shape[1])):
        logits = logits_of(model, prepend_tokens(opening, rows))[:, len(opening) : -1].float()
        token_losses = cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
        losses += token_losses.double().view(len(rows), -1).mean(1).tolist()
    return tuple(losses)
