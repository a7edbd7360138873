"""Advice on a diagnosis: cures tried on a few windows of the text, and the best of them.

What is advised works on that model and was measured there: the loss first, then the sink that
remains, then the outliers. Where no cure that was tried helps at no loss, that is said instead.
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
_SINK = "a sink that no cure removes at no loss"
_ROTATE = ("--rotate", "hadamard")


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A cure, or none, measured on windows of the text."""

    cure: str = "as it is"
    """The cure in words."""
    options: tuple[str, ...] = ()
    """Options of `wakeful cure`."""
    losses: tuple[float, ...]
    """Of each window, or of the first ones."""
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
        """Return True if the cure leaves no sink, at no loss. A sink of the first token is one with
        a share over `good_share`.
        """
        harmless = self.loss_change(uncured).is_harmless
        return harmless and self.share <= good_share and not self.later

    def eases(self, uncured: "Trial", good_share: float) -> bool:
        """Return True if the cure removes the first token's sink, at no loss and without a later
        sink that the model did not have.
        """
        return (
            self.loss_change(uncured).is_harmless
            and self.share <= good_share < uncured.share
            and {sink.name for sink in self.later} <= {sink.name for sink in uncured.later}
        )

    def rotated(self, cure: str) -> "Trial":
        """Return the trial of this cure with a rotation, which is exact: losses and sinks stay."""
        options = (*_ROTATE, *self.options)
        return dataclasses.replace(self, cure=cure, options=options, kurtosis=self.turned_kurtosis)

    def describe_change(self, uncured: "Trial") -> str:
        """Return the changes of loss, first-token share and kurtosis, as text."""
        return (
            f"{self.cure}: the loss changes by {self.loss_change(uncured)}, the first-token share "
            f"{uncured.share:.1%} → {self.share:.1%}, kurtosis {uncured.kurtosis:,.1f} → "
            f"{self.kurtosis:,.1f}" + "".join(f", {sink.name} is a sink" for sink in self.later)
        )


def advise(
    loaded: Model,
    diagnosis: ModelDiagnosis,
    sequences: Sequence[Sequence[int]],
    *,
    bos: Bos = "auto",
    show: Display = SILENT,
) -> Advice | None:
    """Try cures on windows of the diagnosed text and return the best one as advice.

    Against a sink a stored prefix is tried, then learned sinks if the prefix does not help; where
    neither does, a rotation alone. Return None for a model without sinks and outliers.

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
    tokens = torch.tensor([token for row in sequences for token in row], device=loaded.device)
    room = loaded.context - max(1, len(loaded.start_tokens(bos)))
    windows = windows_of(tokens, room)
    if any(map(is_fused, loaded.module.modules())):
        return _advise_on_experts(loaded, windows, bos, has_sink=has_sink)
    try:
        decoder = loaded.decoder()
    except WakefulError as error:
        return Advice(words=f"no cure can be made of {loaded.name}: {error}")
    cures = _CureTrials(loaded, decoder, windows, bos, show)
    uncured, good_share = cures.uncured, surgery.free_share(windows.shape[1])
    trials: list[Trial] = []
    for try_cure in (cures.try_prefix, cures.try_sinks) if has_sink else ():
        trial = try_cure()
        if trial is None:  # the model cannot have this cure
            continue
        trials.append(trial)
        if trial.helps(uncured, good_share):
            break
    best = next((trial for trial in trials if trial.helps(uncured, good_share)), None)
    best = best or next((trial for trial in trials if trial.eases(uncured, good_share)), None)
    if best is None and (rotated := cures.try_rotation()) is not None:
        trials.append(rotated)
        if rotated.kurtosis <= KURTOSIS < uncured.kurtosis:
            best = rotated
    text_read = f"on {len(windows)} windows of {windows.shape[1]} tokens"
    if best is None:
        results = "; ".join(trial.describe_change(uncured) for trial in trials)
        results = f"tried {text_read}: {results}" if results else cures.why_not_rotatable
        problem = _SINK if has_sink else "outliers"
        return Advice(words=f"{loaded.name} has {problem}; {results}")
    remarks = list[str]()
    if has_sink and not best.helps(uncured, good_share):
        eases = best.eases(uncured, good_share)
        remarks.append("no cure removes that later sink" if eases else f"{_SINK} stays")
    if best.kurtosis > KURTOSIS and cures.turn is None:
        remarks.append(
            f"outliers stay, for a rotation would not be exact: {cures.why_not_rotatable}"
        )
    text = "; ".join([f"{best.describe_change(uncured)}, {text_read}", *remarks])
    return Advice(words=text, arguments=" ".join(best.options))


@torch.inference_mode()
def measure_trial(
    model: nn.Module,
    windows: Int[Tensor, "B L"],
    opening: Sequence[int] = (),
    *,
    turn: Turning | None = None,
    text_of: Callable[[int], str] = str,
) -> Trial:
    """Measure a model on windows, each read after the tokens `opening`: the losses of all windows,
    and sinks and outliers on the first `SHARE_WINDOWS` of them.

    With `turn`, the outliers in the basis that it turns hidden states to are measured too.
    `text_of` returns the text of a token.
    """
    sinks, outliers, key_shares, turned = Sinks(), Outliers(), KeyShares(), Outliers()
    probes: list[Probe] = [sinks, outliers, key_shares]
    if turn is not None:
        probes.append(_Turned(turned, turn))
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
        turned_kurtosis=math.nan if turn is None else _larger_kurtosis(turned),
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
        """Measure the model as it is, and find out whether a rotation of it would be exact."""
        self.turn, self.why_not_rotatable = None, ""
        try:
            self.turn = turning_of(self.decoder)
        except WakefulError as error:
            self.why_not_rotatable = str(error).split("; ")[0]  # without the advice after it
        opening = self.loaded.start_tokens(self.bos)
        self.uncured = self._measure(self.decoder, self.windows, opening)

    @cached_property
    def stored_bos(self) -> Trial | None:
        """The model with BOS stored; None where it has none."""
        if self.loaded.bos is None:
            return None
        cured = surgery.store_prefix(self.decoder, self.loaded.start_tokens("on"))
        return self._measure(cured, self.windows)

    @cached_property
    def choice(self) -> surgery.SinkChoice:
        """The token to store before every text so that it takes the sink, chosen by trials of all
        candidates.
        """
        # Nothing stored and BOS stored have been measured already.
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
        return self.uncured.rotated("rotate the outliers away")

    def try_prefix(self) -> Trial | None:
        """Store the best token before every text and measure that; return None where the model
        cannot store one.
        """
        try:
            surgery.check_stores(self.decoder, 1)
        except WakefulError:
            return None
        token, trial = self.choice.token, self.stored_bos
        if trial is None or [*token.tokens] != self.loaded.start_tokens("on"):
            cured = surgery.store_prefix(self.decoder, token.tokens)
            trial = self._measure(cured, self.windows[:SHARE_WINDOWS])
            # Its losses on all windows are known from the choice.
            trial = dataclasses.replace(trial, losses=token.losses)
        return self._name(trial, "store a token before every text", "--prefix", "auto")

    def try_sinks(self) -> Trial | None:
        """Put sinks that replace the best stored token into every head, fitted without training,
        and measure that; return None where the model cannot have them.
        """
        try:
            surgery.check_replaceable(self.decoder)
        except WakefulError:
            return None
        first, rest = self.windows[:SHARE_WINDOWS], self.windows[SHARE_WINDOWS:]
        cured = surgery.learned_sinks(self.decoder, self.choice.token.tokens[0], first)
        trial = self._measure(cured, first)
        # Where the first windows show a loss already, the others need not be read.
        if not trial.loss_change(self.uncured).is_worse:
            losses = trial.losses + surgery.losses_after_opening(cured, rest)
            trial = dataclasses.replace(trial, losses=losses)
        return self._name(trial, "put a learned sink into every head", "--sinks")

    def _name(self, trial: Trial, cure: str, *options: str) -> Trial:
        """Return the trial with its cure's name; where outliers stay and the model can be rotated,
        the trial of that cure with a rotation.
        """
        trial = dataclasses.replace(trial, cure=cure, options=options)
        if trial.kurtosis <= KURTOSIS or self.turn is None:
            return trial
        return trial.rotated(f"{cure} and rotate its outliers away")

    def _measure(
        self, decoder: Decoder, windows: Int[Tensor, "B L"], opening: Sequence[int] = ()
    ) -> Trial:
        return measure_trial(
            decoder, windows, opening, turn=self.turn, text_of=self.loaded.token_text
        )


class _Turned(Probe):
    """A probe that shows `inner` the hidden states in another basis, to which `turn` turns them."""

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
    """Try the one cure that exists for a mixture of experts, a rotation, and return it as advice if
    it helps.
    """
    sink_stays = "; no cure removes the sink of a mixture of experts" if has_sink else ""
    size = sum(parameter.numel() for parameter in loaded.module.parameters())
    if not isinstance(loaded.module, PreTrainedModel) or size > LARGE:
        text = f"{loaded.name} is too large to try cures on: --rotate hadamard is one"
        return Advice(words=f"{text}{sink_stays}")
    try:
        rotated = surgery.rotate_experts(loaded.module, "hadamard")
    except WakefulError as error:
        return Advice(words=f"no rotation can be made of {loaded.name}: {error}{sink_stays}")
    uncured, trial = (
        measure_trial(model, windows, loaded.start_tokens(bos), text_of=loaded.token_text)
        for model in (loaded.module, rotated)
    )
    trial = dataclasses.replace(trial, cure="rotate the outliers away", options=_ROTATE)
    words = f"{trial.describe_change(uncured)}{sink_stays}"
    if trial.kurtosis <= KURTOSIS < uncured.kurtosis and trial.loss_change(uncured).is_harmless:
        return Advice(words=words, arguments=" ".join(_ROTATE))
    return Advice(words=f"nothing helps {loaded.name}; tried: {words}")
