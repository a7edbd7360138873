"""The verb cure: a model in; the same function without outliers, verified and diagnosed, out."""

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from wakeful import surgery
from wakeful.config.commands import command_of
from wakeful.config.keywords import accept_options, options_from
from wakeful.config.reading import LENGTH
from wakeful.curing.difference import Difference, difference, differences
from wakeful.curing.options import CureOptions
from wakeful.curing.retraining import FITTED, check_retrains, retrained
from wakeful.curing.search import (
    CALIBRATING,
    CHOOSING,
    SPREAD,
    Candidate,
    Choice,
    Texts,
    candidates,
    choose,
    format_of,
)
from wakeful.curing.search import LENGTH as CHOOSING_LENGTH
from wakeful.data.sources import beginning_of
from wakeful.diagnosis import (
    CHOOSING_TOKENS,
    DIAGNOSIS_PASSES,
    Diagnosis,
    advise,
    after_cure,
    choose_opening,
    choose_prefix,
    diagnose,
    diagnosis_report,
    findings,
    loss_change,
    windows_of,
)
from wakeful.errors import WakefulError
from wakeful.estimates import LossChange, finite
from wakeful.finding import Advice
from wakeful.hf.checkpoint_reader import is_hybrid
from wakeful.hf.weights_out import (
    export_decoder,
    refuse_existing,
    save_stock,
    stock_architecture,
    written_as,
)
from wakeful.loading.card import model_card
from wakeful.loading.chat import user_turn
from wakeful.loading.model import AnyTokenizer, Model
from wakeful.loading.reading import TextWords
from wakeful.loading.session import note_duration, session
from wakeful.loading.sources import Source, convert_to_decoder, dtype_of, name_of
from wakeful.model.decoder import Decoder
from wakeful.model.finite import check_logits
from wakeful.optim.rotations.base import rotation_of
from wakeful.paged import as_stored
from wakeful.probes.experts import is_fused
from wakeful.probes.running import logits_of
from wakeful.probes.watch import event_source
from wakeful.reports.html import write
from wakeful.reports.result import Measured
from wakeful.reports.value import Report
from wakeful.runs.run import Run
from wakeful.switches import ordinary_switches
from wakeful.terminal.display import Display, DisplayFactory

COMPARED_TOKENS = 64
"""Tokens of a sequence whose logits are compared: processors are slow in bfloat16."""
_RUNS = "that is done as the model runs, by our class, whose decoder holds no experts"
_NOT_OF_EXPERTS = {
    "for_": "what it chooses among is made of our decoder, which holds no experts",
    "rotate_inner": _RUNS,
    "rotate_keys": _RUNS,
    "prefix": "none of Transformers' own classes stores one (wakeful.hf.prefix_cache has it in the "
    "cache)",
    "steps": "what it trains is our decoder, which holds no experts",
    "gates": "none of Transformers' own classes has them",
}
"""What is not done to a mixture of experts, and why."""
CHOICE = Texts.rows * SPREAD * CHOOSING_LENGTH
"""Tokens of the text that choosing a cure draws its sequences from."""
_COMPARING = 4.0
"""Forwards of those that comparing takes: of both models, in two kinds of arithmetic."""


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class _Made:
    """A cured model, and what was done."""

    model: Model
    """The cured model: it runs, generates and is measured as any other."""
    prefix: tuple[int, ...] = ()
    """The stored tokens."""
    stock: str
    """The architecture it is written as: one of Transformers' own, or "wakeful"."""
    done: tuple[tuple[str, str], ...]
    differences: Mapping[str, Difference]
    """By arithmetic: of the cured model from the one before, given the same tokens to read, and of
    rounding that one alone."""
    loss: LossChange
    """Change of the loss on windows of the text, paired."""
    choice: Choice | None = None
    """The measurements that chose the cure, where formats were named."""
    length: int
    """Tokens of a sequence to verify on."""


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Cure(_Made, Measured):
    """A cured model, and how it compares with the one it was made of."""

    before: Model
    diagnosis: Diagnosis
    """Of the model before and after."""
    command: str
    """The command line that does the same."""
    source: str
    """The name that the model before was asked for by."""
    advice: Advice | None = None
    """What to try instead, where the cured model still has an ill or predicts worse."""
    reading: str = ""
    """The options by which it read its text, for the next command."""
    out: str = ""
    """The folder that was asked for."""

    @property
    def frame(self) -> pl.DataFrame:
        """The diagnosis' rows, of the model before and after."""
        return self.diagnosis.frame

    @property
    def summary(self) -> dict[str, Any]:
        """The diagnosis before and after, what was done, and how far the predictions moved."""
        figures = self.diagnosis.summary | {
            "loss_change": {
                "change": self.loss.change, "windows": self.loss.windows,
                "standard_error": finite(self.loss.error),
                "interval": [finite(edge) for edge in self.loss.interval],
            },
            "prefix": list(self.prefix), "architecture": self.stock, "done": dict(self.done),
            "differences": {name: vars(each) for name, each in self.differences.items()},
            "choice": None if self.choice is None else self.choice.summary,
        }  # fmt: skip
        return json.loads(json.dumps(figures))

    @property
    def report(self) -> Report:
        """What was done, and the diagnosis of the model before and after."""
        source = self.source if Path(self.source).name else Path(self.source).resolve()
        return self._report(self.out or f"{source}-cured")

    def _report(self, folder: str | Path) -> Report:
        moved = [(label, f"{old} → {new}") for label, old, new in self._figures()]
        models, choice = self.diagnosis.models, self.choice
        schemes = [] if choice is None else [each.expression for each in choice.schemes]
        found = diagnosis_report(
            models, title=f"Cure of {models[0].name}", method=self.diagnosis.method,
            done=[*self.done, *moved],
            steps=after_cure(self.source, folder, schemes, self.advice, self.reading),
            worse=[] if self.loss.is_harmless else [models[1].name],
        )  # fmt: skip
        tried = [] if choice is None else choice.headlines
        return replace(
            found, headlines=[self._loss_headline, *tried, *found.headlines, *self._left],
            sections=[*([] if choice is None else choice.sections), *found.sections],
        )  # fmt: skip

    @property
    def _left(self) -> list[str]:
        """Say what is advised where no command helps."""
        without = self.advice is not None and not self.advice.arguments
        return [f"{self.advice.words}."] if self.advice is not None and without else []

    @property
    def _loss_headline(self) -> str:
        what = "may predict worse"
        if self.loss.is_worse or self.loss.is_harmless:
            what = "predicts worse" if self.loss.is_worse else "predicts no worse"
        return f"{self.diagnosis.models[1].name} {what}: its loss changes by {self.loss}."

    def save(self, folder: str | Path) -> Path:
        """Write the model to a folder that Transformers loads, with the page beside it."""
        tokenizer = self.model.own_tokenizer
        card = model_card(
            self.model, self.stock, self.command, source=self.before,
            done=[f"{what}: {said}" for what, said in self.done],
            figures=[f"| {label} | {old} | {new} |" for label, old, new in self._figures()],
        )  # fmt: skip
        kind, module = self.model.written_in, self.model.module
        told = {"tokenizer": tokenizer, "dtype": kind, "types": self.model.types, "card": card}
        if isinstance(module, PreTrainedModel):
            save_stock(module, folder, **told)
        else:
            export_decoder(self.model.decoder(), folder, **told)
        run = Run(folder)
        run.write_json("cure.json", self.summary)
        run.write_frame("diagnosis.parquet", self.frame)
        write(self._report(run.path), run.path / "report.html", self.figures)
        return run.path

    def _figures(self) -> Iterator[tuple[str, str, str]]:
        """Yield the measurements before and after: a name, and both figures."""
        before, after = self.diagnosis.summary["models"]
        for name, label in _SHOWN.items():
            if before[name] is not None and after[name] is not None:
                yield label, f"{before[name]:,.4g}", f"{after[name]:,.4g}"


_SHOWN = {
    "loss": "loss, nats a token",
    "first_key_share_without_row_0": "first-token share, without row 0",
    "kurtosis_first": "kurtosis, first token",
    "kurtosis_rest": "kurtosis, the rest",
    "max_activation_first": "mean max |x|, first token",
    "max_activation_rest": "mean max |x|, the rest",
}


@accept_options(CureOptions)
@ordinary_switches()
def cure(
    model: Source,
    *,
    tokenizer: AnyTokenizer | str | Path | None = None,
    display: DisplayFactory | None = None,
    options: CureOptions | None = None,
    **kwargs: Any,
) -> Cure:
    """Take a model's outliers and sinks away, without training unless `steps` are asked for.

        cured = wakeful.cure("smollm2", rotate="hadamard", prefix="bos").model

    The model itself stays as it is.

    Args:
        model: a name, a path, what `wakeful.load` returned, or a module in memory.
        tokenizer: in place of the model's own, or a module's; a path of one, too.
        display: shows progress; None is a bar where there is a terminal.
        options: `CureOptions`, whose fields are keyword arguments too.

    With `out` the cured model is written to a folder that Transformers loads, which must not exist.

    Raises:
        WakefulError: our decoder cannot be the model, or a cure cannot be exact (the part that
            forbids it is named); nothing is written.
    """
    options = options_from(CureOptions, kwargs, options)
    if options.rotate:
        rotation_of(options.rotate)
    command = command_of("cure", options, name_of(model))
    for name in options.for_:
        format_of(name)
    if options.out:
        refuse_existing(Path(options.out))
    with session("cure", options, [model], tokenizer, display) as at:
        learned = _learned(options)
        most = (options.length or LENGTH) * options.num_sequences + learned
        words = TextWords(beginning_of(options.source, most))
        loaded = next(at.models())
        if loaded.is_quantized:
            raise WakefulError(
                f"{loaded.name} is quantized: cure the model it was made from, then quantize"
            )
        event_source(loaded.module)  # refuses what cannot be diagnosed
        if options.out:
            _ = loaded.own_tokenizer  # which is written
        fused = any(map(is_fused, loaded.module.modules()))
        make = _cured_experts if fused and not is_hybrid(loaded.module.config) else _cured_ours
        made = make(_At(loaded, words, learned, options, at.show))
    shared = ("bos", "device", "dtype", "num_sequences")
    asks = {name: getattr(options, name) for name in shared}
    asks["text"] = options.source  # both models read the text that is verified on
    seen = diagnose(
        loaded, made.model, display=display, length=made.length, no_advice=True, **asks
    )  # fmt: skip
    helped = options.for_ or _helped(made, seen)  # of a cure for a format quantizing tells
    advice = None if helped else _next(loaded, seen, words, options, made.length)
    cure = Cure(
        **vars(made), before=loaded, diagnosis=seen, source=name_of(model), command=command,
        figures=options.figures, out=options.out, advice=advice, reading=options.text_flags,
    )  # fmt: skip
    if options.out:
        cure.save(options.out)
    return cure


def _helped(made: _Made, seen: Diagnosis) -> bool:
    """Return whether a cured model predicts no worse and has no ill that a cure is for."""
    ills = {each.title for each in findings(seen.models[1]) if each.level != "good"}
    return made.loss.is_harmless and ills <= {"Lazy layers"}


def _next(
    loaded: Model, seen: Diagnosis, words: TextWords, options: CureOptions, length: int
) -> Advice | None:
    """Return what to do with the model before, tried on the text; or that this was the best."""
    rows = words.sequences(loaded, length=length, num_sequences=options.num_sequences, bos=False)
    advice = advise(loaded, seen.models[0], rows, bos=options.bos)
    if advice is None:
        return Advice(words=f"nothing else was found to cure in {loaded.name}: keep it as it is")
    flags = shlex.split(advice.arguments)
    given = {"--rotate": options.rotate, "--prefix": options.prefix, "--sinks": options.sinks}
    done = {flag for flag, value in given.items() if value}
    if flags and done == {flag for flag in flags if flag.startswith("--")}:
        return Advice(words=f"nothing that was tried does better than to {advice.words}")
    arguments = " ".join(filter(None, [advice.arguments, options.text_flags]))
    return replace(advice, arguments=arguments if flags else "")


@dataclass(frozen=True)
class _At:
    """A model to cure."""

    loaded: Model
    words: TextWords
    learned: int
    """Tokens that choosing, fitting and training read, after those to verify on."""
    wanted: CureOptions
    show: Display

    @property
    def stored(self) -> torch.dtype | None:
        """The type in which the cured model is written; None is that of its weights."""
        asked = self.wanted.stored
        return self.loaded.stored if asked == "auto" else getattr(torch, asked)

    @property
    def types(self) -> Mapping[str, torch.dtype] | None:
        """Those of weights that are not stored as most are; None where all are to be `stored`."""
        return self.loaded.types if self.wanted.stored == "auto" else None

    def cured(self, module: nn.Module, **changes: Any) -> Model:
        """Return a cured module as the model it was."""
        loaded = self.loaded
        return replace(
            loaded, name=f"{loaded.name} cured", module=module, path=None,
            architecture=_words(loaded, self.wanted), stored=self.stored, types=self.types,
            generates_as=loaded,
            **changes,
        )  # fmt: skip


def _cured_ours(at: _At) -> _Made:
    """Cure a model that our decoder can be."""
    loaded, wanted, show = at.loaded, at.wanted, at.show
    ours = convert_to_decoder(loaded, show)
    plain, said = ours.decoder(), str(ours.agreement or "")
    _check_possible(loaded, plain, wanted)
    text = _text(at)
    _check_predicts(loaded.name, plain, text[:, :COMPARED_TOKENS])
    note_duration(
        show, f"{loaded.name}: sequences", loaded, tokens=text.shape[1], total=len(text),
        passes=2 * DIAGNOSIS_PASSES + 2 + _COMPARING * min(1.0, COMPARED_TOKENS / text.shape[1]),
    )  # fmt: skip
    # What the text or the tokenizer forbids is said before anything is measured.
    texts = _format_texts(at, text)
    rest = _rest(at, text.numel()) if wanted.trains else None
    unbegun = _unbegun(loaded) if wanted.prefix or wanted.trains else None
    sink = _sink(at, plain, text)
    choice, wanted = _choice(at, plain, texts, sink)
    at = replace(at, wanted=wanted)
    prefix, stored = _prefix(at, sink)
    read = lambda: loaded.tokenizer  # noqa: E731
    if prefix or wanted.trains:
        read = unbegun or _unbegun(loaded)
    done = [("Conversion", said)] if said else []
    done += [] if choice is None else [("Chosen", choice.said)]
    stands, base = list[int](), plain
    if wanted.trains:
        assert sink is not None
        stands = [*sink.token.tokens]
        rest = _rest(at, text.numel()) if rest is None else rest
        base, more = retrained(loaded, stands[0], text, rest, wanted, show)
        done += more
    cured, more = _cured(at, base, prefix)
    done += more + stored + _rounded(cured, plain, at.stored)
    context = min(loaded.context, cured.config.context)
    result = at.cured(cured, context=context, read_tokenizer=read)
    show.note("comparing logits")
    stands, compared = prefix or stands, text[:, :COMPARED_TOKENS]
    found = differences(loaded.module, plain, cured, compared, stands)
    done += [(f"Logits in {kind}", each.said(stands)) for kind, each in found.items()]
    told = (
        written_as(cured.config, result.own_tokenizer)
        if wanted.out
        else stock_architecture(cured.config)
    )
    show.note("comparing losses")
    loss = loss_change(loaded, result, text, wanted.bos)
    return _Made(
        model=result, done=(("Loss on the text", str(loss)), *done), stock=told[0],
        differences=found, length=text.shape[1], prefix=tuple(prefix), loss=loss, choice=choice,
    )  # fmt: skip


def _check_possible(loaded: Model, plain: Decoder, options: CureOptions) -> None:
    """Raise `WakefulError` where a part of the model forbids a cure, before any work is done."""
    if options.turning:
        surgery.check_rotates(plain, options.turning, stream=bool(options.rotate))
    if options.trains:
        check_retrains(plain, options)
    if options.prefix:
        surgery.check_stores(plain, int(options.prefix) if options.prefix.isdecimal() else 1)
    if options.prefix == "bos" and loaded.bos is None:
        raise WakefulError(
            f"{loaded.name} has no BOS token: choose the token on the text by --prefix auto"
        )


def _cured_experts(at: _At) -> _Made:
    """Cure a mixture of experts, which our decoder cannot be, on Transformers' own modules."""
    loaded, wanted = at.loaded, at.wanted
    refused = {name: why for name, why in _NOT_OF_EXPERTS.items() if getattr(wanted, name)}
    if wanted.sinks:
        try:
            surgery.check_own_sinks(loaded.module)
        except WakefulError as error:
            refused["sinks"] = str(error)
    if refused:
        name, why = next(iter(refused.items()))
        raise WakefulError(
            f"{loaded.name} is a mixture of experts, so that --{name.rstrip('_')} cannot be: "
            f"{why}; --rotate or --rotate_values can"
        )
    assert isinstance(loaded.module, PreTrainedModel)
    text, cured = _text(at), loaded.module
    done, stands, changes = list[tuple[str, str]](), list[int](), dict[str, Any]()
    if wanted.sinks:
        changes["read_tokenizer"] = _unbegun(loaded)
        at.show.note("fitting sinks")
        rows = windows_of(_choosing_tokens(at, text), loaded.context - 1)
        stands = [*choose_opening(loaded, rows).tokens]
        cured = surgery.fit_own_sinks(cured, stands[0], rows)
        told = f"the model's own, fitted to {_shown(loaded, stands)} before the text"
        done.append(("Learned sinks", told))
    if wanted.turning:
        at.show.note("rotating")
        cured = surgery.rotate_experts(
            cured, wanted.turning, stream=bool(wanted.rotate), seed=wanted.seed
        )
        done.append(_rotation(wanted))
    done += _rounded(cured, loaded.module, at.stored)
    at.show.note("comparing logits")
    compared = text[:, :COMPARED_TOKENS]
    with torch.inference_mode():
        before = surgery.prepend_tokens(stands, compared)
        expected = [logits_of(loaded.module, row[None])[:, len(stands) :] for row in before]
        found = [logits_of(cured, row[None]) for row in compared]
        apart = difference(expected, found)
    kind, result = dtype_of(loaded), at.cured(cured, **changes)
    loss = loss_change(loaded, result, text, wanted.bos)
    done = [("Loss on the text", str(loss)), *done, (f"Logits in {kind}", apart.said(stands))]
    return _Made(
        model=result, done=tuple(done), stock=cured.config.model_type, differences={kind: apart},
        length=text.shape[1], loss=loss,
    )  # fmt: skip


def _rotation(options: CureOptions) -> tuple[str, str]:
    told = f"every head's values, {options.turning}, seed {options.seed}"
    if options.rotate:
        told = f"residual stream and {told}; scales of norms multiplied into what reads them"
    return "Rotation", told


@torch.inference_mode()
def _check_predicts(name: str, decoder: Decoder, text: Tensor) -> None:
    """Raise `WakefulError` where outputs are not finite, or none to be compared with."""
    logits = check_logits(decoder(text)).float()
    if not (logits.flatten(1).std(1) > 0).all():
        raise WakefulError(
            f"{name} gives every token the same logit, so there is nothing to keep: it is damaged, "
            "or not trained"
        )


def _unbegun(loaded: Model) -> Callable[[], AnyTokenizer]:
    """Return a reader of the tokenizer of a model that stores a text's beginning.

    Raises:
        WakefulError: the tokenizer or its chat template begins a text with BOS in another way.
    """
    if not (loaded.adds_bos or loaded.tokenizer.chat_template):
        return lambda: loaded.tokenizer
    tokenizer, turn = loaded.own_tokenizer.without_bos(), None
    with suppress(WakefulError):  # a template without a user's turn stays as it is
        turn = user_turn(tokenizer)
    # Some mark every turn with the token that is also named BOS, as SmolLM2's does.
    first, rest = ([], []) if turn is None else (turn.before[:1], turn.before[1:] + turn.after)
    if first == [tokenizer.bos] and tokenizer.bos not in rest:
        raise WakefulError(
            f"the chat template of {loaded.name} writes BOS by its name, which stands before every "
            "text of a cured model already: have it write bos_token"
        )
    return lambda: tokenizer


def _text(at: _At) -> Tensor:
    """Return the sequences (B, L) to verify on, with room for a prefix before them."""
    loaded, words, wanted = at.loaded, at.words, at.wanted
    stands = bool(wanted.prefix) or wanted.trains or bool(wanted.for_)
    room = int(wanted.prefix) if wanted.prefix.isdecimal() else int(stands)
    if room > loaded.context - 2:
        raise WakefulError(
            f"prefix = {wanted.prefix} leaves no text in {loaded.name}'s context of "
            f"{loaded.context} tokens"
        )
    length = min(wanted.length_for(loaded.context), loaded.context - room)
    found = words.sequences(loaded, length=length, num_sequences=wanted.num_sequences, bos=False)
    return torch.tensor(found, device=loaded.device)


def _rest(at: _At, skip: int) -> Tensor:
    """Return the tokens (N,) to fit and train on: those after the ones to verify on."""
    least = min(at.wanted.train_length, at.loaded.context - 1)
    found = at.words.beginning.tokens(at.loaded.plain, skip + at.learned)[skip:]
    if len(found) < least:
        raise WakefulError(
            f"the text has {skip + len(found):,} tokens, and {skip:,} of them are to verify on: "
            f"learning needs at least {least} more "
            "(lower --num_sequences, --length or --train_length)"
        )
    return torch.tensor(found, device=at.loaded.device)


def _sink(at: _At, plain: Decoder, text: Tensor) -> surgery.SinkChoice | None:
    """Return which tokens are best stored, measured on the text after the one to verify on, or on
    that where there is no more; None where nothing stores one.
    """
    loaded, wanted = at.loaded, at.wanted
    chosen = wanted.prefix not in ("", "bos") or wanted.trains or wanted.for_
    if not chosen or plain.config.stored_prefix:
        return None
    number = int(wanted.prefix) if wanted.prefix.isdecimal() else 1
    tokens = _choosing_tokens(at, text)
    opening = loaded.begin(wanted.bos)
    room = loaded.context - max(number, len(opening))
    told = partial(at.show.count, "tokens that may take the sink")
    return choose_prefix(
        loaded, plain, windows_of(tokens, room), num_tokens=number, bos=wanted.bos,
        on_progress=told,
    )  # fmt: skip


def _choosing_tokens(at: _At, text: Tensor) -> Tensor:
    """Return the tokens (N,) of the text after the one to verify on, or of that where it ends."""
    skip = text.numel()
    rest = at.words.beginning.tokens(at.loaded.plain, skip + CHOOSING_TOKENS)[skip:]
    return torch.tensor(rest, device=text.device) if len(rest) > skip else text.flatten()


def _prefix(at: _At, sink: surgery.SinkChoice | None) -> tuple[list[int], list[tuple[str, str]]]:
    """Return the tokens to store, and what was done in words."""
    prefix = at.wanted.prefix
    if not prefix:
        return [], []
    if prefix == "bos":
        tokens, why = at.loaded.begin("on"), ""
    else:
        assert sink is not None
        trial = sink.best if prefix == "auto" else sink.token
        tokens, why = [*trial.tokens], f"; on the text that chose it: {sink.change(trial)}"
        if not tokens:
            tried = _shown(at.loaded, sink.token.tokens)
            said = f"none: of all that were tried, {tried} costs least, {sink.change(sink.token)}"
            return [], [("Prefix", said)]
    return tokens, [
        ("Prefix", f"keys and values of {_shown(at.loaded, tokens)} before every text{why}")
    ]


def _shown(loaded: Model, tokens: Sequence[int]) -> str:
    return ", ".join(f"{loaded.text_of(token)!r} (id {token})" for token in tokens)


def _format_texts(at: _At, text: Tensor) -> Texts | None:
    """Return the sequences to choose a cure for formats on, from the text after the one to verify
    on; None where no format is named.
    """
    loaded, wanted = at.loaded, at.wanted
    if not wanted.for_:
        return None
    length = min(CHOOSING_LENGTH, loaded.context - len(loaded.begin(wanted.bos)) - 1)
    count = Texts.rows * length
    found = at.words.beginning.tokens(loaded.plain, text.numel() + count * SPREAD)[text.numel() :]
    if len(found) < count:
        raise WakefulError(
            f"the text has {text.numel() + len(found):,} tokens: choosing a cure needs "
            f"{text.numel() + count:,}, of which {text.numel():,} are to verify on"
        )
    drawn = torch.tensor(found, device=loaded.device)
    return Texts.spread(drawn, length, tuple(loaded.begin(wanted.bos)))


def _choice(
    at: _At, plain: Decoder, texts: Texts | None, sink: surgery.SinkChoice | None
) -> tuple[Choice | None, CureOptions]:
    """Return the cure that is best for formats by `texts`, and the options to carry it out; no
    choice and those given where none is to be made.
    """
    loaded, wanted = at.loaded, at.wanted
    if texts is None:
        return None, wanted
    schemes = [format_of(name) for name in wanted.for_]
    token = None if sink is None else sink.token.tokens[0]
    looks = sum(each.method.passes(CALIBRATING) for each in schemes if each.method)
    note_duration(
        at.show, f"{loaded.name}: cures to try", loaded, tokens=texts.choosing.shape[1],
        total=len(candidates(plain, schemes, token)),
        passes=CHOOSING * len(schemes) + CALIBRATING * looks,
    )  # fmt: skip
    choice = choose(
        plain, schemes, texts, token=token, stock=wanted.stock, seed=wanted.seed,
        told=at.show.note,
    )  # fmt: skip
    best = choice.best
    if best == Candidate():
        return choice, wanted
    prefix = "1" if best.first == "prefix" else ""
    sinks = best.first == "sinks"
    return choice, replace(
        wanted, for_=(), stock=False, rotate=best.rotate, rotate_inner=best.inner,
        rotate_keys=best.keys, prefix=prefix, sinks=sinks, steps=wanted.steps if sinks else 0,
    )  # fmt: skip


def _cured(at: _At, plain: Decoder, prefix: Sequence[int]) -> tuple[Decoder, list[tuple[str, str]]]:
    """Return the cured decoder, and what was done in words."""
    wanted, cured = at.wanted, plain
    done: list[tuple[str, str]] = []
    if wanted.turning or wanted.rotate_inner:
        at.show.note("rotating")
        cured = surgery.rotate(
            plain, wanted.turning or "identity", stream=bool(wanted.rotate),
            inner=wanted.rotate_inner, seed=wanted.seed,
        )  # fmt: skip
    if wanted.turning:
        done.append(_rotation(wanted))
        if plain.config.tied and not cured.config.tied:
            done.append(("Head", "a matrix of its own: the final norm's scale went into it"))
    if wanted.rotate_inner:
        what = "hidden channels of feed-forward networks, as the model runs"
        done.append(("Inner rotation", what))
    if wanted.rotate_keys:
        cured = surgery.rotate_keys(cured)
        done.append(("Rotation of keys", "and of queries, after RoPE, as the model runs"))
    if prefix:
        at.show.note("storing a prefix")
        cured = surgery.store_prefix(cured, prefix)
    return cured, done


@torch.no_grad()
def _rounded(
    cured: nn.Module, plain: nn.Module, dtype: torch.dtype | None
) -> list[tuple[str, str]]:
    """Round what changed to what a type holds that is not wider, in place; tell of it in words.

    What is measured is then what is written. What did not change stays: a norm that is stored less
    one is exact there, and not as the decoder has it.

    Raises:
        WakefulError: a weight is too large for the type.
    """
    if dtype is None or torch.promote_types(dtype, next(cured.parameters()).dtype) == dtype:
        return []
    before, found = dict(plain.named_parameters()), False
    kind = str(dtype).removeprefix("torch.")
    for name, parameter in cured.named_parameters():
        kept = before.get(name)
        if as_stored(parameter).dtype == dtype or kept is parameter:
            continue
        if kept is not None and torch.equal(kept, parameter):
            continue
        narrow = parameter.to(dtype)
        if not narrow.isfinite().all():
            raise WakefulError(f"{name} is too large for {kind}: write it with --stored float32")
        parameter.copy_(narrow)
        found = True
    return [("Weights", f"those that changed are rounded to {kind}, the type written")] * found


def _learned(options: CureOptions) -> int:
    """Return how many tokens choosing, fitting and training read, after those to verify on."""
    choosing = CHOICE if options.for_ else 0
    if options.prefix not in ("", "bos") or options.trains:
        choosing = max(choosing, CHOOSING_TOKENS)
    rows = max(options.steps * options.batch_size, FITTED) if options.trains or choosing else 0
    return max(choosing, rows * options.train_length)


def _words(loaded: Model, options: CureOptions) -> str:
    others = ("rotate_values", "rotate_inner", "rotate_keys", "prefix", "sinks", "gates")
    parts = [options.rotate, *(n.removeprefix("rotate_") for n in others if getattr(options, n))]
    done = ", ".join(filter(None, parts))
    return f"{loaded.architecture}, cured ({done})" if done else loaded.architecture
