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


@dataclass(frozen=True)
class Trial:
    """A cure on windows of the text."""

    options: tuple[str, ...]
    """Options of `wakeful cure`."""
    cure: str
    """The cure in words."""
    loss: LossChange
    share: float
    """Share of (query, head) pairs led by the first token, row 0 left out."""
    kurtosis: float
    """Mean kurtosis of the first token or of the rest, whichever is larger."""
    later: tuple[LaterSink, ...] = ()
    """Sinks after the first token."""

    def eases(self, uncured: "Trial", good_share: float) -> bool:
        """Return True if the cure removes the first token's sink, at no loss and without a later
        sink that the model did not have.

        A sink is one with a share over `good_share`.
        """
        return (
            self.loss.is_harmless
            and self.share <= good_share < uncured.share
            and {sink.name for sink in self.later} <= {sink.name for sink in uncured.later}
        )

    def describe_change(self, uncured: "Trial") -> str:
        """Return the changes of loss, first-token share and kurtosis, as text."""
        return (
            f"{self.cure}: the loss changes by {self.loss}, the first-token share "
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
    trials: list[Trial] = []
    for try_cure in (cures.try_prefix, cures.try_sinks) if has_sink else ():
        trial = try_cure()
        if trial is None:  # the model cannot have this cure
            continue
        trials.append(trial)
        if cures.helps(trial):
            break
    best = next(filter(cures.helps, trials), None) or next(filter(cures.eases, trials), None)
    if best is None and (rotated := cures.try_rotation()) is not None:
        trials.append(rotated)
        if rotated.kurtosis <= KURTOSIS < cures.plain.kurtosis:
            best = rotated
    text_read = f"on {len(windows)} windows of {windows.shape[1]} tokens"
    if best is None:
        results = "; ".join(trial.describe_change(cures.plain) for trial in trials)
        results = f"tried {text_read}: {results}" if results else cures.why_not_rotatable
        problem = _SINK if has_sink else "outliers"
        return Advice(words=f"{loaded.name} has {problem}; {results}")
    remarks = list[str]()
    if has_sink and not cures.helps(best):
        remarks.append("no cure removes that later sink" if cures.eases(best) else f"{_SINK} stays")
    if best.kurtosis > KURTOSIS and cures.turn is None:
        remarks.append(
            f"outliers stay, for a rotation would not be exact: {cures.why_not_rotatable}"
        )
    text = "; ".join([f"{best.describe_change(cures.plain)}, {text_read}", *remarks])
    return Advice(words=text, arguments=" ".join(best.options))


@dataclass(frozen=True)
class Look:
    """Measurements of a model on windows of text."""

    losses: tuple[float, ...]
    share: float
    """Share of (query, head) pairs led by the first token, row 0 left out."""
    mass: float
    """Mean attention on the first token, row 0 left out."""
    kurtosis: float
    """Mean kurtosis of block outputs at the first token or at the rest, whichever is larger."""
    turned_kurtosis: float
    """`kurtosis` of the outputs in a rotated basis; NaN where no rotation was given."""
    later: tuple[LaterSink, ...]
    """Sinks after the first token."""


@torch.inference_mode()
def look_at(
    model: nn.Module,
    windows: Int[Tensor, "B L"],
    opening: Sequence[int] = (),
    *,
    turn: Turning | None = None,
    text_of: Callable[[int], str] = str,
) -> Look:
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
    return Look(
        losses=losses + surgery.losses_after_opening(model, unwatched, opening),
        share=share,
        mass=mass,
        kurtosis=_larger_kurtosis(outliers),
        turned_kurtosis=math.nan if turn is None else _larger_kurtosis(turned),
        later=later_sinks(sequences, key_shares.shares, key_shares.masses, text_of),
    )


def trial_of(
    options: tuple[str, ...], cure: str, before: Look, after: Look, *, turned: bool = False
) -> Trial:
    """Return the trial of a cure from the measurements `before` it and `after` it, the latter
    perhaps on fewer windows. With `turned` its outliers are those of the rotated basis.
    """
    change = LossChange.between(before.losses[: len(after.losses)], after.losses)
    kurtosis = after.turned_kurtosis if turned else after.kurtosis
    return Trial(options, cure, change, after.share, kurtosis, after.later)


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
        self.seen = self._look(self.decoder, self.windows, self.loaded.start_tokens(self.bos))
        self.plain = trial_of((), "as it is", self.seen, self.seen)
        self.good_share = surgery.free_share(self.windows.shape[1])

    @cached_property
    def stored_bos(self) -> Look | None:
        """Measurements of the model with BOS stored; None where it has none."""
        if self.loaded.bos is None:
            return None
        cured = surgery.store_prefix(self.decoder, self.loaded.start_tokens("on"))
        return self._look(cured, self.windows)

    @cached_property
    def choice(self) -> surgery.SinkChoice:
        """The token to store before every text so that it takes the sink, chosen by trials of all
        candidates.
        """
        # Nothing stored and BOS stored have been measured already.
        looks: list[tuple[tuple[int, ...], Look]] = [((), self.seen)]
        if self.stored_bos is not None:
            looks.append(((*self.loaded.start_tokens("on"),), self.stored_bos))
        return choose_prefix(
            self.loaded, self.decoder, self.windows, bos=self.bos,
            known=[
                surgery.SinkTrial(tokens, look.losses, look.share, look.mass)
                for tokens, look in looks
            ],
            on_progress=partial(self.show.count, "tokens that may take the sink"),
        )  # fmt: skip

    def helps(self, trial: Trial) -> bool:
        """Return True if a cure removes all sinks at no loss."""
        return trial.loss.is_harmless and trial.share <= self.good_share and not trial.later

    def eases(self, trial: Trial) -> bool:
        """Return True if a cure removes the first token's sink at no loss; a later sink that the
        model has may stay.
        """
        return trial.eases(self.plain, self.good_share)

    def try_rotation(self) -> Trial | None:
        """Try a rotation alone; return None where the model cannot be rotated."""
        if self.turn is None:
            return None
        options, cure = ("--rotate", "hadamard"), "rotate the outliers away"
        # A rotation is exact: the losses and the sinks stay, and `seen` has the turned outliers.
        return trial_of(options, cure, self.seen, self.seen, turned=True)

    def try_prefix(self) -> Trial | None:
        """Store the best token before every text and measure that; return None where the model
        cannot store one.
        """
        try:
            surgery.check_stores(self.decoder, 1)
        except WakefulError:
            return None
        token, look = self.choice.token, self.stored_bos
        if look is None or [*token.tokens] != self.loaded.start_tokens("on"):
            cured = surgery.store_prefix(self.decoder, token.tokens)
            look = self._look(cured, self.windows[:SHARE_WINDOWS])
            # Its losses on all windows are known from the choice.
            look = dataclasses.replace(look, losses=token.losses)
        return self._try_cured(("--prefix", "auto"), "store a token before every text", look)

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
        look = self._look(cured, first)
        # Where the first windows show a loss already, the others need not be read.
        if not LossChange.between(self.seen.losses[: len(first)], look.losses).is_worse:
            losses = look.losses + surgery.losses_after_opening(cured, rest)
            look = dataclasses.replace(look, losses=losses)
        return self._try_cured(("--sinks",), "put a learned sink into every head", look)

    def _try_cured(self, options: tuple[str, ...], cure: str, look: Look) -> Trial:
        """Return the trial of a cure that `look` measured; where outliers stay and the model can be
        rotated, of that cure with a rotation.
        """
        if look.kurtosis <= KURTOSIS or self.turn is None:
            return trial_of(options, cure, self.seen, look)
        options, cure = ("--rotate", "hadamard", *options), f"{cure} and rotate its outliers away"
        return trial_of(options, cure, self.seen, look, turned=True)

    def _look(
        self, decoder: Decoder, windows: Int[Tensor, "B L"], opening: Sequence[int] = ()
    ) -> Look:
        return look_at(decoder, windows, opening, turn=self.turn, text_of=self.loaded.token_text)


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
    """Try the one cure that exists for a mixture of experts, a rotation; return it as advice where
    it helps.
    """
    sink_stays = "; no cure removes the sink of a mixture of experts" if has_sink else ""
    size = sum(parameter.numel() for parameter in loaded.module.parameters())
    if not isinstance(loaded.module, PreTrainedModel) or size > LARGE:
        text = f"{loaded.name} is too large to try cures on: --rotate hadamard is one"
        return Advice(words=f"{text}{sink_stays}")
    start = loaded.start_tokens(bos)
    before = look_at(loaded.module, windows, start, text_of=loaded.token_text)
    uncured = trial_of((), "as it is", before, before)
    try:
        rotated = surgery.rotate_experts(loaded.module, "hadamard")
    except WakefulError as error:
        result = f"no rotation can be made of it: {error}"
    else:
        after = look_at(rotated, windows, start, text_of=loaded.token_text)
        trial = trial_of(("--rotate", "hadamard"), "rotate the outliers away", before, after)
        result = trial.describe_change(uncured)
        if trial.kurtosis <= KURTOSIS < uncured.kurtosis and trial.loss.is_harmless:
            return Advice(words=f"{result}{sink_stays}", arguments=" ".join(trial.options))
    return Advice(words=f"nothing helps {loaded.name}; tried: {result}{sink_stays}")
