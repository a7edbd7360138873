"""Advice on a diagnosis: cures tried on a few windows of the text, and the best of them.

What is advised works on that model and was measured there: the loss first, then the sink that
remains, then the outliers. Where no cure that was tried helps at no loss, that is said instead.
"""

import dataclasses
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
from wakeful.probes.exact import even_shares
from wakeful.probes.experts import is_fused
from wakeful.probes.hidden import Outliers
from wakeful.probes.running import logits_of
from wakeful.probes.watch import watch
from wakeful.surgery.rotate import Turning, turning_of
from wakeful.surgery.sink_tokens import FREED, SHARE_WINDOWS
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
    room = loaded.context - max(1, len(loaded.begin(bos)))
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


@dataclass
class _CureTrials:
    """One model and windows of its text: carries out cures and measures them."""

    loaded: Model
    decoder: Decoder
    windows: Int[Tensor, "B L"]
    bos: Bos
    show: Display = SILENT

    def __post_init__(self) -> None:
        self.opening = self.loaded.begin(self.bos)
        self.losses = surgery.losses_after_opening(self.decoder, self.windows, self.opening)
        self.turn, self.fixed = None, ""
        try:
            self.turn = turning_of(self.decoder)
        except WakefulError as error:  # why it cannot be turned
            self.fixed = str(error).split("; ")[0]
        self.plain = self._measure((), "as it is", self.decoder, self.opening, self.losses)
        self.good_share = FREED + float(even_shares(self.windows.shape[1])[0])

    @cached_property
    def choice(self) -> surgery.SinkChoice:
        """The token that is best stored, of all that the model may park on."""
        return choose_prefix(
            self.loaded, self.decoder, self.windows, bos=self.bos,
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
        cure = "rotate the outliers away"
        options = ("--rotate", "hadamard")
        return self._measure(options, cure, self.decoder, self.opening, self.losses, turned=True)

    def try_prefix(self) -> Trial | None:
        """Try BOS as a stored prefix, then the other likely sink tokens; return None where the
        model cannot store one.
        """
        try:
            surgery.check_stores(self.decoder, 1)
        except WakefulError:
            return None
        choice = None
        if self.loaded.bos is not None:
            choice = surgery.choose_sink_tokens(
                self.decoder, self.windows, self.loaded.begin("on"), opening=self.opening
            )
            if not choice.best.tokens or (choice.best.share or 0.0) > self.good_share:
                choice = None
        choice = choice or self.choice
        cured = surgery.store_prefix(self.decoder, choice.token.tokens)
        options, cure = ("--prefix", "auto"), "store a token before every text"
        return self._try_cured(options, cure, cured, choice.token.losses)

    def try_sinks(self) -> Trial | None:
        """Try learned sinks, fitted without training to the sink token that costs least; return
        None where the model cannot have them.
        """
        try:
            surgery.check_replaceable(self.decoder, "sinks")
        except WakefulError:
            return None
        cured = surgery.learned_sinks(self.decoder, self.choice.token.tokens[0], self.windows)
        losses = surgery.losses_after_opening(cured, self.windows)
        return self._try_cured(("--sinks",), "put a learned sink into every head", cured, losses)

    def _try_cured(
        self, options: tuple[str, ...], cure: str, decoder: Decoder, losses: Sequence[float]
    ) -> Trial:
        """Measure a cured decoder, rotated too if it still has outliers."""
        trial = self._measure(options, cure, decoder, (), losses)
        if trial.kurtosis <= KURTOSIS or self.turn is None:
            return trial
        options, cure = ("--rotate", "hadamard", *options), f"{cure} and rotate its outliers away"
        return self._measure(options, cure, decoder, (), losses, turned=True)

    def _measure(
        self, options: tuple[str, ...], cure: str, decoder: Decoder, opening: Sequence[int],
        losses: Sequence[float], *, turned: bool = False,
    ) -> Trial:  # fmt: skip
        """Measure a cured decoder on the windows, which `opening` precedes."""
        change = LossChange.between(self.losses, losses)
        rows = surgery.prepend_tokens(opening, self.windows[:SHARE_WINDOWS])
        shape = shape_of(decoder, rows, self.turn if turned else None, self.loaded.text_of)
        return Trial(options, cure, change, *shape)


def shape_of(
    model: nn.Module,
    rows: Int[Tensor, "B L"],
    turn: Turning | None = None,
    text_of: Callable[[int], str] = str,
) -> tuple[float, float, tuple[LaterSink, ...]]:
    """Return the first-token share without row 0, the larger mean kurtosis, of the first token or
    the rest, of block outputs after `turn`, and the sinks after the first token.
    """
    sinks, outliers, keys = Sinks(), Outliers(), KeyShares()
    probe = outliers if turn is None else _Turned(outliers, turn)
    with torch.inference_mode(), watch(model, sinks, keys, probe):
        for row in rows:
            logits_of(model, row[None])
    shares = sinks.rows().filter(metric="first_key_share_without_row_0")
    share = mean_over_layers(shares.filter(shares["head"].is_null()))
    kurtoses = outliers.rows().filter(metric="kurtosis")
    parts = (mean_over_layers(kurtoses.filter(position=part)) for part in ("first", "rest"))
    later = later_sinks(rows.tolist(), keys.shares, keys.masses, text_of)
    return share or 0.0, max(value or 0.0 for value in parts), later


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
    start = loaded.begin(bos)
    losses = surgery.losses_after_opening(loaded.module, windows, start)

    def measure(cure: str, model: nn.Module, opening: Sequence[int], *options: str) -> Trial:
        change = LossChange.between(losses, surgery.losses_after_opening(model, windows, opening))
        rows = surgery.prepend_tokens(opening, windows[:SHARE_WINDOWS])
        return Trial(options, cure, change, *shape_of(model, rows, None, loaded.text_of))

    model, opening = loaded.module, start
    uncured = best = measure("as it is", model, opening)
    results = list[str]()
    if sunk and _has_own_sinks(model):
        fitted = surgery.fit_own_sinks(model, choose_opening(loaded, windows).tokens[0], windows)
        trial = measure("set its own sinks", fitted, (), "--sinks")
        results.append(trial.describe_change(uncured))
        if trial.eases(uncured, FREED + float(even_shares(windows.shape[1])[0])):
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
