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
from wakeful.diagnosis.sink_choice import choose_opening, choose_prefix, windows_of
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
    """Of `wakeful cure`."""
    cure: str
    """The cure in words."""
    loss: LossChange
    share: float
    """Share of (query, head) pairs led by the first token, row 0 left out."""
    kurtosis: float
    """Of the first token or the rest, whichever is larger."""
    later: tuple[LaterSink, ...] = ()
    """Sinks after the first token."""

    def eases(self, uncured: "Trial", good_share: float) -> bool:
        """Return True if the first token's sink goes, at no loss and without a new later sink."""
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

    A model with a sink is tried with a stored prefix, then with learned sinks; a rotation is tried
    alone where neither helps. None for a model without sinks and outliers.

    Args:
        loaded: the model.
        diagnosis: its diagnosis.
        sequences: tokens of the text, without BOS.
        bos: whether the model reads BOS before every sequence.
        show: shows which cures are tried.
    """
    levels = {finding.title: finding.level for finding in findings(diagnosis)}
    sunk = levels["Attention sinks"] != "good"
    if not sunk and levels["Outlier activations"] == "good":
        return None
    if loaded.is_quantized:
        return Advice(words=f"{loaded.name} is quantized: cure the model that it was made from")
    show.note("trying cures on the text")
    tokens = torch.tensor([token for row in sequences for token in row], device=loaded.device)
    room = loaded.context - max(1, len(loaded.start_tokens(bos)))
    windows = windows_of(tokens, room)
    if any(map(is_fused, loaded.module.modules())):
        return _advise_on_experts(loaded, windows, bos, sunk=sunk)
    try:
        decoder = loaded.decoder()
    except WakefulError as error:
        return Advice(words=f"no cure can be made of {loaded.name}: {error}")
    cures = _CureTrials(loaded, decoder, windows, bos, show)
    trials: list[Trial] = []
    for try_cure in (cures.try_prefix, cures.try_sinks) if sunk else ():
        trial = try_cure()
        trials += [] if trial is None else [trial]
        if trial is not None and cures.helps(trial):
            break
    best = next(filter(cures.helps, trials), None) or next(filter(cures.eases, trials), None)
    if best is None and (rotated := cures.try_rotation()) is not None:
        trials.append(rotated)
        if rotated.kurtosis <= KURTOSIS < cures.plain.kurtosis:
            best = rotated
    on = f"on {len(windows)} windows of {windows.shape[1]} tokens"
    if best is None:
        results = "; ".join(trial.describe_change(cures.plain) for trial in trials)
        results = f"tried {on}: {results}" if results else cures.fixed
        return Advice(words=f"{loaded.name} has {_SINK if sunk else 'outliers'}; {results}")
    remarks = list[str]()
    if sunk and not cures.helps(best):
        remarks.append("no cure removes that later sink" if cures.eases(best) else f"{_SINK} stays")
    if best.kurtosis > KURTOSIS and cures.turn is None:
        remarks.append(f"outliers stay, for a rotation would not be exact: {cures.fixed}")
    text = "; ".join([f"{best.describe_change(cures.plain)}, {on}", *remarks])
    return Advice(words=text, arguments=" ".join(best.options))


@dataclass(frozen=True)
class Look:
    """Measurements of a model on windows of text."""

    losses: tuple[float, ...]
    share: float
    """Share of (query, head) pairs led by the first token, row 0 left out."""
    mass: float
    """Mean attention on that token, likewise."""
    kurtosis: float
    """The larger mean kurtosis of block outputs, of the first token or the rest."""
    turned_kurtosis: float
    """The same of the outputs after a rotation; NaN where there is none."""
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
    """Measure a model on windows that it reads after `opening`: the losses of all, and the rest on
    the first `SHARE_WINDOWS` of them.
    """
    sinks, outliers, keys, turned = Sinks(), Outliers(), KeyShares(), Outliers()
    probes: list[Probe] = [sinks, outliers, keys]
    probes += [] if turn is None else [_Turned(turned, turn)]
    watched, rest = windows[:SHARE_WINDOWS], windows[SHARE_WINDOWS:]
    with watch(model, *probes):
        losses = surgery.losses_after_opening(model, watched, opening)
    share, mass = remaining_sink(sinks)
    rows = surgery.prepend_tokens(opening, watched).tolist()
    return Look(
        losses=losses + surgery.losses_after_opening(model, rest, opening),
        share=share,
        mass=mass,
        kurtosis=_kurtosis(outliers),
        turned_kurtosis=math.nan if turn is None else _kurtosis(turned),
        later=later_sinks(rows, keys.shares, keys.masses, text_of),
    )


def trial_of(
    options: tuple[str, ...], cure: str, before: Look, after: Look, *, turned: bool = False
) -> Trial:
    """Return the trial of a cure by what was measured before and after it, which may have read
    fewer windows, and the outliers `turned` by a rotation.
    """
    change = LossChange.between(before.losses[: len(after.losses)], after.losses)
    kurtosis = after.turned_kurtosis if turned else after.kurtosis
    return Trial(options, cure, change, after.share, kurtosis, after.later)


def _kurtosis(outliers: Outliers) -> float:
    rows = outliers.rows().filter(metric="kurtosis")
    parts = (mean_over_layers(rows.filter(position=part)) for part in ("first", "rest"))
    return max(value or 0.0 for value in parts)


@dataclass
class _CureTrials:
    """One model and windows of its text: carries out cures and measures them."""

    loaded: Model
    decoder: Decoder
    windows: Int[Tensor, "B L"]
    bos: Bos
    show: Display = SILENT

    def __post_init__(self) -> None:
        self.turn, self.fixed = None, ""
        try:
            self.turn = turning_of(self.decoder)
        except WakefulError as error:  # why it cannot be turned
            self.fixed = str(error).split("; ")[0]
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
        """The token that is best stored, of all that the model may park on."""
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
        """Tell whether a trial removes the sink at no loss."""
        return trial.loss.is_harmless and trial.share <= self.good_share and not trial.later

    def eases(self, trial: Trial) -> bool:
        """Tell whether a trial removes the first token's sink at no loss and a later one stays."""
        return trial.eases(self.plain, self.good_share)

    def try_rotation(self) -> Trial | None:
        """Try a rotation alone; return None where the model cannot be rotated."""
        if self.turn is None:
            return None
        options, cure = ("--rotate", "hadamard"), "rotate the outliers away"
        return trial_of(options, cure, self.seen, self.seen, turned=True)

    def try_prefix(self) -> Trial | None:
        """Try the token that is best stored before every text; return None where the model cannot
        store one.
        """
        try:
            surgery.check_stores(self.decoder, 1)
        except WakefulError:
            return None
        token, look = self.choice.token, self.stored_bos
        if look is None or [*token.tokens] != self.loaded.start_tokens("on"):
            cured = surgery.store_prefix(self.decoder, token.tokens)
            look = self._look(cured, self.windows[:SHARE_WINDOWS])
            look = dataclasses.replace(look, losses=token.losses)
        return self._try_cured(("--prefix", "auto"), "store a token before every text", look)

    def try_sinks(self) -> Trial | None:
        """Try learned sinks, fitted without training to the sink token that costs least; return
        None where the model cannot have them.
        """
        try:
            surgery.check_replaceable(self.decoder)
        except WakefulError:
            return None
        first, rest = self.windows[:SHARE_WINDOWS], self.windows[SHARE_WINDOWS:]
        cured = surgery.learned_sinks(self.decoder, self.choice.token.tokens[0], first)
        look = self._look(cured, first)
        if not LossChange.between(self.seen.losses[: len(first)], look.losses).is_worse:
            losses = look.losses + surgery.losses_after_opening(cured, rest)
            look = dataclasses.replace(look, losses=losses)
        return self._try_cured(("--sinks",), "put a learned sink into every head", look)

    def _try_cured(self, options: tuple[str, ...], cure: str, look: Look) -> Trial:
        """Return the trial of a cure, with a rotation where its outliers ask for one."""
        if look.kurtosis <= KURTOSIS or self.turn is None:
            return trial_of(options, cure, self.seen, look)
        options, cure = ("--rotate", "hadamard", *options), f"{cure} and rotate its outliers away"
        return trial_of(options, cure, self.seen, look, turned=True)

    def _look(
        self, decoder: Decoder, windows: Int[Tensor, "B L"], opening: Sequence[int] = ()
    ) -> Look:
        return look_at(decoder, windows, opening, turn=self.turn, text_of=self.loaded.token_text)


class _Turned(Probe):
    """A probe of hidden states that sees them in another basis."""

    def __init__(self, inner: Outliers, turn: Turning) -> None:
        self.inner, self.turn = inner, turn

    def see_hidden(self, event: HiddenEvent) -> None:
        turned: Float[Tensor, "B L D"] = self.turn(event.h.double()).to(event.h.dtype)
        self.inner.see_hidden(dataclasses.replace(event, h=turned))

    def rows(self) -> Frame:
        return self.inner.rows()


def _advise_on_experts(
    loaded: Model, windows: Int[Tensor, "B L"], bos: Bos, *, sunk: bool
) -> Advice:
    """Try the two cures of a mixture of experts: to set sinks that the model has already, and a
    rotation.
    """
    sink_stays = "; no cure removes the sink of a mixture of experts" if sunk else ""
    size = sum(parameter.numel() for parameter in loaded.module.parameters())
    if not isinstance(loaded.module, PreTrainedModel) or size > LARGE:
        text = f"{loaded.name} is too large to try cures on: --rotate hadamard is one"
        return Advice(words=f"{text}{sink_stays}")
    start = loaded.start_tokens(bos)
    seen = look_at(loaded.module, windows, start, text_of=loaded.token_text)

    def measure(cure: str, model: nn.Module, opening: Sequence[int], *options: str) -> Trial:
        look = look_at(model, windows, opening, text_of=loaded.token_text)
        return trial_of(options, cure, seen, look)

    model, opening = loaded.module, start
    uncured = best = trial_of((), "as it is", seen, seen)
    results = list[str]()
    if sunk and _has_own_sinks(model):
        fitted = surgery.fit_own_sinks(model, choose_opening(loaded, windows).tokens[0], windows)
        trial = measure("set its own sinks", fitted, (), "--sinks")
        results.append(trial.describe_change(uncured))
        if trial.eases(uncured, surgery.free_share(windows.shape[1])):
            model, opening, best, sink_stays = fitted, (), trial, ""
    if best.kurtosis > KURTOSIS or not results:
        try:
            rotated = surgery.rotate_experts(model, "hadamard")
        except WakefulError as error:
            results.append(f"no rotation can be made of it: {error}")
        else:
            text = "rotate the outliers away"
            text = text if best is uncured else f"{best.cure} and {text}"
            trial = measure(text, rotated, opening, "--rotate", "hadamard", *best.options)
            results.append(trial.describe_change(uncured))
            if trial.kurtosis <= KURTOSIS < best.kurtosis and trial.loss.is_harmless:
                best = trial
    if best is uncured:
        return Advice(words=f"nothing helps {loaded.name}; tried: {'; '.join(results)}{sink_stays}")
    return Advice(
        words=f"{best.describe_change(uncured)}{sink_stays}", arguments=" ".join(best.options)
    )


def _has_own_sinks(model: nn.Module) -> bool:
    try:
        surgery.check_own_sinks(model)
    except WakefulError:
        return False
    return True
