"""Advice on a diagnosis: cures tried on a few windows of the text, and the best of them.

What is advised works on that model and was measured there: the loss first, then the sink that
remains, then the outliers. Where no cure that was tried helps without raising the loss, that is
said instead.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from wakeful import surgery
from wakeful.config.reading import Bos
from wakeful.diagnosis.later_sinks import LaterSink, later_sinks
from wakeful.diagnosis.measure import ModelDiagnosis
from wakeful.diagnosis.sink_choice import choose_prefix, windows_of
from wakeful.diagnosis.verdict import findings
from wakeful.errors import WakefulError
from wakeful.estimates import LossChange
from wakeful.finding import Advice
from wakeful.loading.model import Model
from wakeful.model.decoder import Decoder
from wakeful.probes.attention import KeyShares, Sinks
from wakeful.probes.base import Frame, HiddenEvent, Probe, mean_over_layers
from wakeful.probes.experts import is_fused
from wakeful.probes.hidden import Outliers
from wakeful.probes.watch import watch
from wakeful.surgery.rotate import Turning, turning_of
from wakeful.surgery.sink_tokens import SHARE_WINDOWS, remaining_sink
from wakeful.terminal.display import Display

KURTOSIS = 5.0
"""Mean kurtosis up to which nothing is rotated: a Gaussian has 3."""
LARGE = 2_000_000_000
"""Parameters of a mixture of experts past which no rotation of it is tried: it is another copy."""
SILENT = Display()
_SINK = "a sink that no cure removes without raising the loss"
_ROTATE = ("--rotate", "hadamard")


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A cure, or none, measured on windows of the text."""

    cure: str = "as it is"
    """The cure as an imperative, such as "store a token before every text"."""
    options: tuple[str, ...] = ()
    """Options of `wakeful cure`."""
    losses: tuple[float, ...]
    """Mean loss of each window, or of the first windows only."""
    share: float
    """Share of (query, head) pairs led by the first token, row 0 left out."""
    mass: float
    """Mean attention on the first token, row 0 left out."""
    kurtosis: float
    """Mean kurtosis of block outputs at the first token or at the rest, whichever is larger."""
    turned_kurtosis: float = math.nan
    """`kurtosis` of the outputs in a rotated basis; NaN where no rotation was given."""
    later: tuple[LaterSink, ...] = ()
    """Sinks after the first token."""

    def loss_change(self, uncured: "Trial") -> LossChange:
        """Return the change of the loss on the windows that this trial has."""
        return LossChange.between(uncured.losses[: len(self.losses)], self.losses)

    def helps(self, uncured: "Trial", good_share: float) -> bool:
        """Return True if the cure leaves no sink and does not raise the loss. The first token is a
        sink if its share is over `good_share`.
        """
        harmless = self.loss_change(uncured).is_harmless
        return harmless and self.share <= good_share and not self.later

    def eases(self, uncured: "Trial", good_share: float) -> bool:
        """Return True if the cure removes the first token's sink and does not raise the loss.

        Sinks after the first token may stay, but no new one may appear. The first token is a sink
        if its share is over `good_share`.
        """
        return (
            self.loss_change(uncured).is_harmless
            and self.share <= good_share < uncured.share
            and {sink.name for sink in self.later} <= {sink.name for sink in uncured.later}
        )

    def with_rotation(self, cure: str) -> "Trial":
        """Return this trial as it would be with a rotation besides; `cure` names both in words.

        A rotation is exact: losses and sinks stay, and only the kurtosis changes.
        """
        options = (*_ROTATE, *self.options)
        return dataclasses.replace(self, cure=cure, options=options, kurtosis=self.turned_kurtosis)

    def describe_change(self, uncured: "Trial") -> str:
        """Return a clause on how loss, first-token share and kurtosis change, and on the sinks
        after the first token that are left.
        """
        change = (
            f"the loss changes by {self.loss_change(uncured)}, the first-token share from "
            f"{uncured.share:.1%} to {self.share:.1%}, and kurtosis from {uncured.kurtosis:,.1f} "
            f"to {self.kurtosis:,.1f}"
        )
        if not self.later:
            return change
        names = ", ".join(sink.name for sink in self.later)
        return f"{change}; {'sinks are' if self.later[1:] else 'a sink is'} left: {names}"


def advise(
    loaded: Model,
    diagnosis: ModelDiagnosis,
    sequences: Sequence[Sequence[int]],
    *,
    bos: Bos = "auto",
    show: Display = SILENT,
) -> Advice | None:
    """Try cures on windows of the diagnosed text and return the best one as advice; None for a
    model without sinks and outliers.

    Against a sink, a stored prefix is tried first, and learned sinks if it does not help. If
    neither helps, or there are only outliers, a rotation alone is tried. Where nothing helps, or
    nothing can be tried, the advice says why and names no options.

    Args:
        loaded: the model.
        diagnosis: its diagnosis.
        sequences: tokens of the text, without BOS.
        bos: whether the model reads BOS before every sequence.
        show: shows which cures are tried.
    """
    levels = {finding.title: finding.level for finding in findings(diagnosis)}
    has_sink = levels["Attention sinks"] != "good"
    if not has_sink and levels["Outlier activations"] == "good":
        return None
    if loaded.is_quantized:
        return Advice(words=f"{loaded.name} is quantized: cure the model that it was made from")
    show.note("trying cures on the text")
    all_tokens = [token for sequence in sequences for token in sequence]
    # Leaves room in the context for the start tokens or a stored token before a window.
    longest = loaded.context - max(1, len(loaded.start_tokens(bos)))
    windows = windows_of(torch.tensor(all_tokens, device=loaded.device), longest)
    if any(map(is_fused, loaded.module.modules())):  # our decoder holds no experts
        return _advise_on_experts(loaded, windows, bos, has_sink=has_sink)
    try:
        decoder = loaded.decoder()
    except WakefulError as error:
        return Advice(words=f"no cure can be made of {loaded.name}: {error}")
    cures = _CureTrials(loaded, decoder, windows, bos, show)
    trials, best = _try_cures(cures, has_sink=has_sink)
    if best is None:
        problem = _SINK if has_sink else "outliers"
        reason = cures.why_not_rotatable  # if nothing could be tried
        if trials:
            reason = f"Tried on {_describe_windows(windows)}. " + ". ".join(
                f"If you {trial.cure}, {trial.describe_change(cures.uncured)}" for trial in trials
            )
        return Advice(words=f"{loaded.name} has {problem}. {reason}")
    return Advice(words=_describe_advice(best, cures, has_sink), arguments=" ".join(best.options))


def _try_cures(cures: "_CureTrials", *, has_sink: bool) -> tuple[list[Trial], Trial | None]:
    """Try cures until one helps; return all trials, and the best of them, None if none is good.

    The best is one that leaves no sink, else one that removes the first token's sink, else a
    rotation that removes outliers. None of them raises the loss.
    """
    uncured, good_share = cures.uncured, cures.good_share
    trials: list[Trial] = []
    for try_cure in (cures.try_prefix, cures.try_sinks) if has_sink else ():
        trial = try_cure()
        if trial is None:  # the model cannot have this cure
            continue
        trials.append(trial)
        if trial.helps(uncured, good_share):
            return trials, trial
    for trial in trials:
        if trial.eases(uncured, good_share):
            return trials, trial
    rotated = cures.try_rotation()
    if rotated is None:
        return trials, None
    removes_outliers = rotated.kurtosis <= KURTOSIS < uncured.kurtosis
    return [*trials, rotated], rotated if removes_outliers else None


def _describe_windows(windows: Int[Tensor, "B L"]) -> str:
    return f"{len(windows)} windows of {windows.shape[1]} tokens"


def _describe_advice(best: Trial, cures: "_CureTrials", has_sink: bool) -> str:
    """Return sentences that name the best cure, what it changes, and what it leaves as it was.

    They begin in lower case, after "Next: ", and end without a full stop.
    """
    uncured, good_share = cures.uncured, cures.good_share
    windows = _describe_windows(cures.windows)
    sentences = [best.cure, f"On {windows}, {best.describe_change(uncured)}"]
    if has_sink and not best.helps(uncured, good_share):
        if best.eases(uncured, good_share):
            sentences.append(f"No cure removes {'them' if best.later[1:] else 'it'}")
        else:  # a rotation alone
            sentences.append(f"The model keeps {_SINK}")
    if best.kurtosis > KURTOSIS and cures.turn is None:
        sentences.append(
            f"Outliers stay, because a rotation would not be exact: {cures.why_not_rotatable}"
        )
    return ". ".join(sentences)


@torch.inference_mode()
def measure_trial(
    model: nn.Module,
    windows: Int[Tensor, "B L"],
    opening: Sequence[int] = (),
    *,
    turn: Turning | None = None,
    text_of: Callable[[int], str] = str,
) -> Trial:
    """Measure a model on windows: losses on all of them, sinks and outliers on the first
    `SHARE_WINDOWS`.

    The model reads the tokens `opening` before each window. With `turn`, a rotation of hidden
    states, outliers of the rotated states are measured too (`turned_kurtosis`). `text_of` returns
    the text of a token.
    """
    sinks, outliers, key_shares, turned_outliers = Sinks(), Outliers(), KeyShares(), Outliers()
    probes: list[Probe] = [sinks, outliers, key_shares]
    if turn is not None:
        probes.append(_Turned(turned_outliers, turn))
    watched, unwatched = windows[:SHARE_WINDOWS], windows[SHARE_WINDOWS:]
    with watch(model, *probes):
        losses = surgery.losses_after_opening(model, watched, opening)
    share, mass = remaining_sink(sinks)
    sequences = surgery.prepend_tokens(opening, watched).tolist()
    return Trial(
        losses=losses + surgery.losses_after_opening(model, unwatched, opening),
        share=share,
        mass=mass,
        kurtosis=_larger_kurtosis(outliers),
        turned_kurtosis=math.nan if turn is None else _larger_kurtosis(turned_outliers),
        later=later_sinks(sequences, key_shares.shares, key_shares.masses, text_of),
    )


def _larger_kurtosis(outliers: Outliers) -> float:
    """Return the mean kurtosis over layers of the first token or the rest, whichever is larger."""
    rows = outliers.rows().filter(metric="kurtosis")
    means = (mean_over_layers(rows.filter(position=part)) for part in ("first", "rest"))
    return max(mean or 0.0 for mean in means)


@dataclass
class _CureTrials:
    """One model and windows of its text: carries out cures and measures them."""

    loaded: Model
    decoder: Decoder
    windows: Int[Tensor, "B L"]
    bos: Bos
    show: Display = SILENT

    def __post_init__(self) -> None:
        """Measure the model as it is (`uncured`), and find out how a rotation would turn its hidden
        states (`turn`), or why none would be exact (`why_not_rotatable`; `turn` is then None).
        """
        self.turn, self.why_not_rotatable = None, ""
        try:
            self.turn = turning_of(self.decoder)
        except WakefulError as error:
            self.why_not_rotatable = str(error).split("; ")[0]  # without the advice after it
        opening = self.loaded.start_tokens(self.bos)
        self.uncured = self._measure(self.decoder, self.windows, opening)
        self.good_share = surgery.free_share(self.windows.shape[1])

    @cached_property
    def stored_bos(self) -> Trial | None:
        """The trial of the model with BOS stored; None if it has no BOS token."""
        if self.loaded.bos is None:
            return None
        cured = surgery.store_prefix(self.decoder, self.loaded.start_tokens("on"))
        return self._measure(cured, self.windows)

    @cached_property
    def choice(self) -> surgery.SinkChoice:
        """Choice of the token that takes the sink if it is stored before every text; measured once,
        for the prefix and for the sinks.
        """
        # Nothing stored and BOS stored are measured already: (stored tokens, trial).
        measured: list[tuple[tuple[int, ...], Trial]] = [((), self.uncured)]
        if self.stored_bos is not None:
            measured.append(((*self.loaded.start_tokens("on"),), self.stored_bos))
        return choose_prefix(
            self.loaded, self.decoder, self.windows, bos=self.bos,
            known=[
                surgery.SinkTrial(tokens, trial.losses, trial.share, trial.mass)
                for tokens, trial in measured
            ],
            on_progress=partial(self.show.count, "tokens that may take the sink"),
        )  # fmt: skip

    def try_rotation(self) -> Trial | None:
        """Try a rotation alone; return None where the model cannot be rotated."""
        if self.turn is None:
            return None
        return self.uncured.with_rotation("rotate the outliers away")

    def try_prefix(self) -> Trial | None:
        """Store the best token before every text and measure that, with a rotation if outliers
        stay; return None if the model cannot store one.
        """
        try:
            surgery.check_stores(self.decoder, 1)
        except WakefulError:
            return None
        token, trial = self.choice.token, self.stored_bos
        # `stored_bos` is the trial of BOS, if BOS was tried: only another token is measured here.
        if trial is None or [*token.tokens] != self.loaded.start_tokens("on"):
            cured = surgery.store_prefix(self.decoder, token.tokens)
            # Only sinks and outliers are measured here, on the first windows. The losses on all
            # windows are those that were measured when the token was chosen.
            trial = self._measure(cured, self.windows[:SHARE_WINDOWS])
            trial = dataclasses.replace(trial, losses=token.losses)
        return self._finish(trial, "store a token before every text", "--prefix", "auto")

    def try_sinks(self) -> Trial | None:
        """Put a learned sink into every head, fitted to replace the best stored token, and measure
        that, with a rotation if outliers stay; return None if the model cannot have sinks.

        If the loss on the first windows is worse, the trial has losses of those alone.
        """
        try:
            surgery.check_replaceable(self.decoder)
        except WakefulError:
            return None
        first, rest = self.windows[:SHARE_WINDOWS], self.windows[SHARE_WINDOWS:]
        cured = surgery.learned_sinks(self.decoder, self.choice.token.tokens[0], first)
        trial = self._measure(cured, first)
        if not trial.loss_change(self.uncured).is_worse:
            losses = trial.losses + surgery.losses_after_opening(cured, rest)
            trial = dataclasses.replace(trial, losses=losses)
        return self._finish(trial, "put a learned sink into every head", "--sinks")

    def _finish(self, trial: Trial, cure: str, *options: str) -> Trial:
        """Return the trial with its cure's name and options, and with a rotation if outliers stay
        and the model can be rotated.
        """
        trial = dataclasses.replace(trial, cure=cure, options=options)
        if trial.kurtosis <= KURTOSIS or self.turn is None:
            return trial
        return trial.with_rotation(f"{cure} and rotate the outliers away")

    def _measure(
        self, decoder: Decoder, windows: Int[Tensor, "B L"], opening: Sequence[int] = ()
    ) -> Trial:
        """Measure a version of the decoder on windows, each read after the tokens `opening`."""
        return measure_trial(
            decoder, windows, opening, turn=self.turn, text_of=self.loaded.token_text
        )


class _Turned(Probe):
    """A probe that passes hidden states on to the probe `inner`, rotated by `turn`."""

    def __init__(self, inner: Outliers, turn: Turning) -> None:
        self.inner, self.turn = inner, turn

    def see_hidden(self, event: HiddenEvent) -> None:
        """Turn the states, in float64, and show them to the inner probe."""
        turned: Float[Tensor, "B L D"] = self.turn(event.h.double()).to(event.h.dtype)
        self.inner.see_hidden(dataclasses.replace(event, h=turned))

    def rows(self) -> Frame:
        return self.inner.rows()


def _advise_on_experts(
    loaded: Model, windows: Int[Tensor, "B L"], bos: Bos, *, has_sink: bool
) -> Advice:
    """Try the one cure that exists for a mixture of experts, a rotation.

    The advice has options if the rotation removes outliers and does not raise the loss; otherwise
    it says what was tried, or why nothing was.
    """
    sink_stays = ". No cure removes the sink of a mixture of experts" if has_sink else ""
    size = sum(parameter.numel() for parameter in loaded.module.parameters())
    # `rotate_experts` takes a Transformers model alone.
    if not isinstance(loaded.module, PreTrainedModel) or size > LARGE:
        text = f"{loaded.name} is too large to try cures on. --rotate hadamard is one"
        return Advice(words=f"{text}{sink_stays}")
    try:
        rotated = surgery.rotate_experts(loaded.module, "hadamard")
    except WakefulError as error:
        return Advice(words=f"no rotation can be made of {loaded.name}: {error}{sink_stays}")
    uncured, trial = (
        measure_trial(model, windows, loaded.start_tokens(bos), text_of=loaded.token_text)
        for model in (loaded.module, rotated)
    )
    measured = f"On {_describe_windows(windows)}, {trial.describe_change(uncured)}{sink_stays}"
    cure = "rotate the outliers away"
    if trial.kurtosis <= KURTOSIS < uncured.kurtosis and trial.loss_change(uncured).is_harmless:
        return Advice(words=f"{cure}. {measured}", arguments=" ".join(_ROTATE))
    return Advice(words=f"nothing helps {loaded.name}. Tried: {cure}. {measured}")
