"""Cure of a model: remove outliers and sinks, verify the function, diagnose it before and after."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from wakeful import surgery
from wakeful.config.commands import format_command_line
from wakeful.config.keywords import accept_options, options_from
from wakeful.config.reading import LENGTH
from wakeful.curing.difference import Difference, measure_difference
from wakeful.curing.options import CureOptions
from wakeful.curing.search import SEARCH_LENGTH as CHOOSING_LENGTH
from wakeful.curing.search import (
    SEARCH_SPREAD,
    Candidate,
    CureChoice,
    SearchTexts,
    choose_cure,
    parse_format,
)
from wakeful.data.sources import read_beginning
from wakeful.diagnosis import (
    CHOOSING_TOKENS,
    Diagnosis,
    after_cure,
    choose_prefix,
    diagnose,
    diagnosis_report,
    loss_change,
    windows_of,
)
from wakeful.errors import WakefulError
from wakeful.estimates import LossChange, finite_or_none
from wakeful.hf.checkpoint_reader import is_hybrid
from wakeful.hf.weights_out import (
    architecture_to_write,
    export_decoder,
    refuse_existing,
    save_stock,
    stock_architecture,
)
from wakeful.loading.card import model_card
from wakeful.loading.chat import user_turn
from wakeful.loading.model import AnyTokenizer, Model
from wakeful.loading.reading import EvaluationText
from wakeful.loading.session import open_session
from wakeful.loading.sources import Source, convert_to_decoder, dtype_name, source_name
from wakeful.model.decoder import Decoder
from wakeful.model.finite import check_logits
from wakeful.optim.rotations.base import rotation_of
from wakeful.probes.experts import is_fused
from wakeful.probes.watch import event_source
from wakeful.reports.html import write_page
from wakeful.reports.result import MeasuredResult
from wakeful.reports.value import Report, Section
from wakeful.runs.run import Run
from wakeful.switches import default_torch_state
from wakeful.terminal.display import Display, DisplayFactory

COMPARED_TOKENS = 64
"""Tokens of a sequence whose logits are compared."""
_OUR_CLASS_ONLY = "that is done as the model runs, by our class, whose decoder holds no experts"
_REFUSED_OF_EXPERTS = {
    "for_": "its candidates are versions of our decoder, which holds no experts",
    "rotate_inner": _OUR_CLASS_ONLY,
    "rotate_keys": _OUR_CLASS_ONLY,
    "prefix": "none of Transformers' own classes stores one",
    "sinks": "none of Transformers' classes with experts takes those that a cure finds",
}
"""Options that are refused for a mixture of experts, with the reason."""
NUM_FIT, FIT_LENGTH = 16, 256
"""Sequences that sinks are fitted on, and tokens of each, or the model's context where shorter."""


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class _CuredModel:
    """A cured model, the steps of its cure and its measurements."""

    model: Model
    """The cured model: it runs, generates and is measured as any other."""
    prefix: tuple[int, ...] = ()
    """The stored tokens."""
    stock: str
    """`model_type` of the architecture it is written as: one of Transformers' own, or "wakeful"."""
    done: tuple[tuple[str, str], ...]
    """The steps of the cure as report lines (label, text)."""
    difference: Difference
    """Difference of its logits from the original's on the same tokens."""
    loss: LossChange
    """Change of the loss on windows of the text, paired."""
    choice: CureChoice | None = None
    """The measurements that chose the cure, where formats were named."""
    length: int
    """Tokens of a sequence to verify on."""


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Cure(_CuredModel, MeasuredResult):
    """A cured model compared with the original."""

    before: Model
    """The original model."""
    diagnosis: Diagnosis
    """Diagnosis of the original and of the cured model."""
    command: str
    """The command line that does the same."""
    source: str
    """The name or path by which the original was given."""
    reading: str = ""
    """The command's options that choose the text, for the next command."""
    out: str = ""
    """The output folder; "" for none."""

    @property
    def frame(self) -> pl.DataFrame:
        """The diagnosis' measurements of the original and of the cured model, one per row."""
        return self.diagnosis.frame

    @property
    def summary(self) -> dict[str, Any]:
        """All results as a table for JSON: the diagnosis of both models, the steps of the cure, the
        change of the loss and the differences of logits.
        """
        figures = self.diagnosis.summary | {
            "loss_change": {
                "change": self.loss.change, "windows": self.loss.windows,
                "standard_error": finite_or_none(self.loss.error),
                "interval": [finite_or_none(edge) for edge in self.loss.interval],
            },
            "prefix": list(self.prefix), "architecture": self.stock, "done": dict(self.done),
            "difference": vars(self.difference),
            "choice": None if self.choice is None else self.choice.summary,
        }  # fmt: skip
        return json.loads(json.dumps(figures))  # as it is read from a file: tuples become lists

    @property
    def report(self) -> Report:
        """Steps of the cure, and the diagnosis of the model before and after."""
        # "." has no name that "-cured" could be added to; its absolute path has one.
        source = self.source if Path(self.source).name else Path(self.source).resolve()
        return self._report(self.out or f"{source}-cured")

    def _report(self, folder: str | Path) -> Report:
        """Return the report of the cure: its steps, its effect on the loss, and the diagnosis of
        both models. `folder` is where the cured model is or could be written; the suggested
        commands name it.
        """
        changes = [(label, f"{old} → {new}") for label, old, new in self._figures()]
        original, cured = self.diagnosis.models
        headlines: list[str] = []
        sections: list[Section] = []
        schemes: list[str] = []
        if self.choice is not None:
            headlines, sections = self.choice.headlines, self.choice.sections
            schemes = [scheme.expression for scheme in self.choice.schemes]
        diagnosis = diagnosis_report(
            (original, cured), title=f"Cure of {original.name}", method=self.diagnosis.method,
            done=[*self.done, *changes],
            steps=after_cure(
                self.source, folder, schemes, self.reading,
                # A cure for formats was judged by the loss after quantization, not by this one.
                helped=self.choice is not None or self.loss.is_harmless,
            ),
            worse=[] if self.loss.is_harmless else [cured.name],
        )  # fmt: skip
        return replace(
            diagnosis,
            headlines=[self._loss_headline, *headlines, *diagnosis.headlines],
            sections=[*sections, *diagnosis.sections],
        )  # fmt: skip

    @property
    def _loss_headline(self) -> str:
        """Sentence on whether the cured model predicts worse than the original."""
        if self.loss.is_worse:
            verdict = "predicts worse"
        elif self.loss.is_harmless:
            verdict = "predicts no worse"
        else:  # too little text to tell
            verdict = "may predict worse"
        return f"{self.diagnosis.models[1].name} {verdict}: its loss changes by {self.loss}."

    def save(self, folder: str | Path) -> Path:
        """Write the cured model to a folder that Transformers loads; return the folder.

        Beside it are a model card, cure.json, diagnosis.parquet, report.html and the charts that
        `figures` asks for.
        """
        tokenizer = self.model.wakeful_tokenizer
        card = model_card(
            self.model, self.stock, self.command, source=self.before,
            done=[f"{label}: {text}" for label, text in self.done],
            figures=self._figures(),
        )  # fmt: skip
        dtype, module = self.model.export_dtype, self.model.module
        kwargs = {"tokenizer": tokenizer, "dtype": dtype, "types": self.model.types, "card": card}
        if isinstance(module, PreTrainedModel):  # a mixture of experts
            save_stock(module, folder, **kwargs)
        else:
            export_decoder(self.model.decoder(), folder, **kwargs)
        run = Run(folder)
        run.write_json("cure.json", self.summary)
        run.write_frame("diagnosis.parquet", self.frame)
        write_page(self._report(run.path), run.path / "report.html", self.figures)
        return run.path

    def _figures(self) -> Iterator[tuple[str, str, str]]:
        """Yield the label of each measurement, and its value for the original and the cured model
        as text; measurements that one of them lacks are left out.
        """
        original, cured = self.diagnosis.summary["models"]
        for name, label in _FIGURE_LABELS.items():
            if original[name] is not None and cured[name] is not None:
                yield label, f"{original[name]:,.4g}", f"{cured[name]:,.4g}"


_FIGURE_LABELS = {
    "loss": "loss, nats per token",
    "first_key_share_without_row_0": "first-token share, without row 0",
    "kurtosis_first": "kurtosis, first token",
    "kurtosis_rest": "kurtosis, the rest",
    "max_activation_first": "mean max |x|, first token",
    "max_activation_rest": "mean max |x|, the rest",
}


@accept_options(CureOptions)
@default_torch_state()
def cure(
    model: Source,
    *,
    tokenizer: AnyTokenizer | str | Path | None = None,
    display: DisplayFactory | None = None,
    options: CureOptions | None = None,
    **kwargs: Any,
) -> Cure:
    """Remove a model's activation outliers and attention sinks, without training.

        cured = wakeful.cure("smollm2", rotate="hadamard", prefix="bos").model

    The model itself stays as it is.

    Args:
        model: a name, a path, what `wakeful.load` returned, or a module in memory.
        tokenizer: replaces the model's own; required for a module; may be a path.
        display: shows progress; None is a bar where there is a terminal.
        options: `CureOptions`, whose fields are keyword arguments too.

    With `out` the cured model is written to a folder that Transformers loads, which must not exist.

    Raises:
        WakefulError: the model cannot be converted to our decoder, or a cure cannot be exact (the
            part that forbids it is named); nothing is written.
    """
    options = options_from(CureOptions, kwargs, options)
    if options.rotate:
        rotation_of(options.rotate)  # raises for an unknown rotation
    command = format_command_line("cure", options, source_name(model))
    for name in options.for_:
        parse_format(name)  # raises for an unknown format
    if options.out:
        refuse_existing(Path(options.out))
    with open_session("cure", options, [model], tokenizer, display) as opened_session:
        num_tokens = (options.length or LENGTH) * options.num_sequences
        evaluation_text = EvaluationText(read_beginning(options.source, num_tokens))
        loaded = next(opened_session.models())
        if loaded.is_quantized:
            raise WakefulError(
                f"{loaded.name} is quantized: cure the model it was made from, then quantize"
            )
        event_source(loaded.module)  # raises for a model that cannot be diagnosed
        if options.out:
            _ = loaded.wakeful_tokenizer  # raises where it cannot be written
        has_experts = any(map(is_fused, loaded.module.modules()))
        # With linear attention besides, `_cure_decoder` refuses the model and says why.
        is_moe = has_experts and not is_hybrid(loaded.module.config)
        show = opened_session.show
        task = _CureTask(loaded, evaluation_text, options, show)
        result = _cure_experts(task) if is_moe else _cure_decoder(task)
    shared_names = ("bos", "device", "dtype", "num_sequences")
    shared_options = {name: getattr(options, name) for name in shared_names}
    shared_options["text"] = options.source  # both models are diagnosed on the text of the cure
    diagnosis = diagnose(
        loaded, result.model, display=display, length=result.length, no_advice=True,
        **shared_options,
    )  # fmt: skip
    cure = Cure(
        **vars(result), before=loaded, diagnosis=diagnosis, source=source_name(model),
        command=command, figures=options.figures, out=options.out, reading=options.text_flags,
    )  # fmt: skip
    if options.out:
        cure.save(options.out)
    return cure


@dataclass(frozen=True)
class _CureTask:
    """One call of `cure`: the model, its text and the options."""

    loaded: Model
    evaluation_text: EvaluationText
    options: CureOptions
    show: Display

    def tokens_after(self, skip: int, count: int) -> Tensor:
        """Return up to `count` tokens (N,) that follow the text's first `skip` tokens. The first
        ones are kept to verify the cured model on.
        """
        tokens = self.evaluation_text.beginning.tokens(self.loaded.encode_plain, skip + count)
        return torch.tensor(tokens[skip:], device=self.loaded.device, dtype=torch.long)

    @property
    def stored(self) -> torch.dtype | None:
        """The type to write the cured model's weights in; None keeps the weights' own."""
        requested = self.options.stored
        return self.loaded.stored if requested == "auto" else getattr(torch, requested)

    @property
    def types(self) -> Mapping[str, torch.dtype] | None:
        """For each weight that is written in another type than `stored`, its name and that type,
        which the original's files have. None if --stored names a type: then all weights have it.
        """
        return self.loaded.types if self.options.stored == "auto" else None

    def wrap_cured(self, module: nn.Module, **changes: Any) -> Model:
        """Wrap a cured module as a `Model` with the original's tokenizer and settings, except for
        `changes` of its fields.
        """
        loaded = self.loaded
        return replace(
            loaded, name=f"{loaded.name} cured", module=module, path=None,
            stored=self.stored, types=self.types, generation_source=loaded,
            **changes,
        )  # fmt: skip


def _cure_decoder(task: _CureTask) -> _CuredModel:
    """Convert a model to our decoder, cure it as the options say, and measure the effect.

    Formats that the options name (`for_`) choose the cure first.
    """
    loaded, options, show = task.loaded, task.options, task.show
    converted = convert_to_decoder(loaded, show)
    plain, agreement = converted.decoder(), str(converted.agreement or "")
    _check_possible(loaded, plain, options)
    text = _verification_text(task)
    _check_predicts(loaded.name, plain, text[:, :COMPARED_TOKENS])
    # What the text or the tokenizer forbids is refused before anything is measured.
    texts = _search_texts(task, text)
    fitting_text = _fitting_text(task, text.numel()) if options.sinks else None
    read_without_bos = _reader_without_bos(loaded) if options.prefix or options.sinks else None
    sink = _choose_sink(task, plain, text)
    choice, options = _choose_cure(task, plain, texts, sink)
    task = replace(task, options=options)  # with the chosen cure, perhaps sinks or a prefix
    if sink is not None and choice is not None:
        # The search has measured what the token costs in the format: it is stored in any case.
        sink = replace(sink, best=sink.token)
    prefix, prefix_lines = _choose_stored_tokens(task, sink)
    read_tokenizer = lambda: loaded.tokenizer  # noqa: E731
    if prefix or options.sinks:
        read_tokenizer = read_without_bos or _reader_without_bos(loaded)
    report_lines = [("Conversion", agreement)] if agreement else []
    if choice is not None:
        report_lines.append(("Chosen", choice.description))
    # Ids that the original reads where the cured model has a stored prefix or sinks.
    replaced_tokens = list(prefix)
    decoder = plain
    if options.sinks:
        assert sink is not None
        replaced_tokens = [*sink.token.tokens]
        if fitting_text is None:
            fitting_text = _fitting_text(task, text.numel())
        show.note("fitting sinks")
        decoder = surgery.learned_sinks(plain, replaced_tokens[0], fitting_text)
        description = (
            f"softmax-1 with one a head, fitted to id {replaced_tokens[0]} before the text"
        )
        report_lines.append(("Learned sinks", description))
    cured, cure_lines = _apply_cures(task, decoder, prefix)
    report_lines += cure_lines + prefix_lines + _round_weights(cured, plain, task)
    context = min(loaded.context, cured.config.context)
    result = task.wrap_cured(cured, context=context, read_tokenizer=read_tokenizer)
    show.note("comparing logits")
    compared = text[:, :COMPARED_TOKENS]
    difference = measure_difference(loaded.module, cured, compared, replaced_tokens)
    report_lines.append((f"Logits in {dtype_name(loaded)}", difference.describe(replaced_tokens)))
    if options.out:
        model_type, *_ = architecture_to_write(cured.config, result.wakeful_tokenizer)
    else:
        model_type, _ = stock_architecture(cured.config)
    show.note("comparing losses")
    loss = loss_change(loaded, result, text, options.bos)
    return _CuredModel(
        model=result, done=(("Loss on the text", str(loss)), *report_lines), stock=model_type,
        difference=difference, length=text.shape[1], prefix=tuple(prefix), loss=loss, choice=choice,
    )  # fmt: skip


def _check_possible(loaded: Model, plain: Decoder, options: CureOptions) -> None:
    """Raise `WakefulError` if the decoder's architecture forbids a cure that the options name, or
    the prefix "bos" is asked for and the model has no BOS token.
    """
    if options.turning:
        surgery.check_rotates(plain, options.turning, stream=bool(options.rotate))
    if options.sinks:
        surgery.check_replaceable(plain)
    if options.prefix:
        surgery.check_stores(plain, 1)
    if options.prefix == "bos" and loaded.bos is None:
        raise WakefulError(
            f"{loaded.name} has no BOS token: choose the token on the text by --prefix auto"
        )


def _cure_experts(task: _CureTask) -> _CuredModel:
    """Cure a mixture of experts, which our decoder cannot represent, as a Transformers model, and
    measure the effect.

    Raises:
        WakefulError: an option is not possible for a mixture of experts.
    """
    loaded, options = task.loaded, task.options
    for name, why in _REFUSED_OF_EXPERTS.items():
        if getattr(options, name):
            option = name.rstrip("_")  # `for_` is --for
            raise WakefulError(
                f"{loaded.name} is a mixture of experts, for which --{option} is not possible: "
                f"{why}; --rotate and --rotate_values are"
            )
    assert isinstance(loaded.module, PreTrainedModel)
    text = _verification_text(task)
    task.show.note("rotating")
    cured = surgery.rotate_experts(
        loaded.module, options.turning, stream=bool(options.rotate), seed=options.seed
    )
    rounding_lines = _round_weights(cured, loaded.module, task)
    task.show.note("comparing logits")
    difference = measure_difference(loaded.module, cured, text[:, :COMPARED_TOKENS])
    result = task.wrap_cured(cured)
    loss = loss_change(loaded, result, text, options.bos)
    report_lines = [
        ("Loss on the text", str(loss)),
        _describe_rotation(options),
        *rounding_lines,
        (f"Logits in {dtype_name(loaded)}", difference.describe(())),
    ]
    return _CuredModel(
        model=result, done=tuple(report_lines), stock=cured.config.model_type,
        difference=difference, length=text.shape[1], loss=loss,
    )  # fmt: skip


def _describe_rotation(options: CureOptions) -> tuple[str, str]:
    """Return the report line (label, text) of the rotation that the options ask for, of the stream
    and values or of values alone.
    """
    description = f"every head's values, {options.turning}, seed {options.seed}"
    if options.rotate:
        description = (
            f"residual stream and {description}; scales of norms multiplied into what reads them"
        )
    return "Rotation", description


@torch.inference_mode()
def _check_predicts(name: str, decoder: Decoder, text: Tensor) -> None:
    """Raise `WakefulError` if a decoder's logits on a text are not finite, or all equal in one of
    its sequences: then it predicts nothing that a cure could keep.
    """
    logits = check_logits(decoder(text)).float()
    if not (logits.flatten(1).std(1) > 0).all():
        raise WakefulError(
            f"{name} gives every token the same logit, so there is nothing to keep: it is damaged, "
            "or not trained"
        )


def _reader_without_bos(loaded: Model) -> Callable[[], AnyTokenizer]:
    """Return a function that reads the tokenizer of a model with a stored prefix or sinks: the
    original's tokenizer, but without BOS before a text, since prefix or sinks take its place.

    Raises:
        WakefulError: the chat template writes BOS in a way that cannot be removed.
    """
    if not (loaded.adds_bos or loaded.tokenizer.chat_template):  # no BOS to remove
        return lambda: loaded.tokenizer
    tokenizer = loaded.wakeful_tokenizer.without_bos()
    try:
        turn = user_turn(tokenizer)
    except WakefulError:
        turn = None
    if turn is None:  # a template without a user's turn, or none, stays as it is
        return lambda: tokenizer
    begins_with_bos = turn.before[:1] == [tokenizer.bos]
    # The template still writes BOS, once, at the beginning. In some templates, such as SmolLM2's,
    # BOS is also the token that begins or ends every turn, and has to stay.
    if begins_with_bos and tokenizer.bos not in turn.before[1:] + turn.after:
        raise WakefulError(
            f"the chat template of {loaded.name} writes BOS by its name, but a cured model has it "
            "before every text already: have the template write bos_token"
        )
    return lambda: tokenizer


def _verification_text(task: _CureTask) -> Tensor:
    """Return the sequences (B, L) to verify the cure on: the beginning of the text, without BOS.

    They are so short that a token before them, which a cure may store or replace, fits into the
    context.
    """
    loaded, evaluation_text, options = task.loaded, task.evaluation_text, task.options
    stores_token = bool(options.prefix) or options.sinks or bool(options.for_)
    length = min(options.length_for(loaded.context), loaded.context - int(stores_token))
    sequences = evaluation_text.sequences(
        loaded, length=length, num_sequences=options.num_sequences, bos=False
    )
    return torch.tensor(sequences, device=loaded.device)


def _fitting_text(task: _CureTask, skip: int) -> Tensor:
    """Return up to `NUM_FIT` sequences (B, L) to fit sinks on: the text that follows its first
    `skip` tokens.

    Raises:
        WakefulError: less than one sequence follows them.
    """
    length = min(FIT_LENGTH, task.loaded.context - 1)  # BOS or the replaced token precedes it
    tokens = task.tokens_after(skip, NUM_FIT * length)
    if len(tokens) < length:
        raise WakefulError(
            f"the text has {skip + len(tokens):,} tokens, and {skip:,} of them are to verify on: "
            f"learning needs at least {length} more (lower --num_sequences or --length)"
        )
    return tokens[: len(tokens) // length * length].view(-1, length)


def _choose_sink(task: _CureTask, plain: Decoder, text: Tensor) -> surgery.SinkChoice | None:
    """Measure which token takes the attention sink best, to store it as a prefix or to fit sinks
    to it; return None if no cure needs that, or the model has a stored prefix already.

    `text` (B, L) is the text to verify on. The token is chosen on the text after it, if there is
    enough (`_choosing_tokens`).
    """
    loaded, options = task.loaded, task.options
    needs_sink = options.prefix == "auto" or options.sinks or options.for_
    if not needs_sink or plain.config.stored_prefix:
        return None
    tokens = _choosing_tokens(task, text)
    start_tokens = loaded.start_tokens(options.bos)
    # Leaves room in the context for the start tokens or the stored token before a window.
    window_length = loaded.context - max(1, len(start_tokens))
    return choose_prefix(
        loaded, plain, windows_of(tokens, window_length), bos=options.bos,
        on_progress=partial(task.show.count, "tokens that may take the sink"),
    )  # fmt: skip


def _choosing_tokens(task: _CureTask, text: Tensor) -> Tensor:
    """Return tokens (N,) to choose a sink on: those after `text` (B, L), the text to verify on, if
    they are more than `text` has; otherwise those of `text`.
    """
    rest = task.tokens_after(text.numel(), CHOOSING_TOKENS)
    return rest if len(rest) > text.numel() else text.flatten()


def _choose_stored_tokens(
    task: _CureTask, sink: surgery.SinkChoice | None
) -> tuple[list[int], list[tuple[str, str]]]:
    """Return the tokens to store as a prefix, [] for none, and report lines (label, text) on them.

    `sink` has the measurements that chose a token; the prefix "bos" needs none.
    """
    prefix = task.options.prefix
    if not prefix:
        return [], []
    if prefix == "bos":
        tokens, change = task.loaded.start_tokens("on"), ""
    else:
        assert sink is not None
        tokens = [*sink.best.tokens]
        change = f"; on the text used to choose it: {sink.change(sink.best)}"
        if not tokens:  # every token that was tried raises the loss
            cheapest = _format_tokens(task.loaded, sink.token.tokens)
            description = (
                f"none: of all that were tried, {cheapest} costs least, {sink.change(sink.token)}"
            )
            return [], [("Prefix", description)]
    description = f"keys and values of {_format_tokens(task.loaded, tokens)} before every text"
    return tokens, [("Prefix", description + change)]


def _format_tokens(loaded: Model, tokens: Sequence[int]) -> str:
    """Return tokens as words: their texts and ids."""
    return ", ".join(f"{loaded.token_text(token)!r} (id {token})" for token in tokens)


def _search_texts(task: _CureTask, text: Tensor) -> SearchTexts | None:
    """Return the sequences to choose a cure for number formats on; None if the options name no
    format.

    They come from the text after `text` (B, L), the text to verify on, and are spread over up to
    `SEARCH_SPREAD` times as many tokens as they have.

    Raises:
        WakefulError: the text has too few tokens.
    """
    loaded, options = task.loaded, task.options
    if not options.for_:
        return None
    opening = tuple(loaded.start_tokens(options.bos))  # what the uncured model reads before a text
    # Leaves room in the context for the opening, or for a stored token.
    length = min(CHOOSING_LENGTH, loaded.context - len(opening) - 1)
    skip, num_needed = text.numel(), SearchTexts.num_rows * length
    tokens = task.tokens_after(skip, num_needed * SEARCH_SPREAD)
    if len(tokens) < num_needed:
        raise WakefulError(
            f"the text has {skip + len(tokens):,} tokens: choosing a cure needs "
            f"{skip + num_needed:,}, of which {skip:,} are to verify on"
        )
    return SearchTexts.spread(tokens, length, opening)


def _choose_cure(
    task: _CureTask, plain: Decoder, texts: SearchTexts | None, sink: surgery.SinkChoice | None
) -> tuple[CureChoice | None, CureOptions]:
    """Choose the cure for the number formats that the options name, by measurements on `texts`.

    Returns (choice, options with the chosen cure); without a format (`texts` is None), None and
    the options as they are. `sink` has the token that a prefix stores and that sinks are fitted
    to; without it, neither is tried.
    """
    options = task.options
    if texts is None:
        return None, options
    schemes = [parse_format(name) for name in options.for_]
    token = None if sink is None else sink.token.tokens[0]
    choice = choose_cure(
        plain, schemes, texts, token=token, stock=options.stock, seed=options.seed,
        on_progress=task.show.note,
    )  # fmt: skip
    best = choice.best
    if best == Candidate():  # no cure
        return choice, options
    # Options that name a cure must have neither `for_` nor `stock`.
    return choice, replace(
        options, for_=(), stock=False, rotate=best.rotate, rotate_inner=best.inner,
        rotate_keys=best.keys, prefix="auto" if best.sink_cure == "prefix" else "",
        sinks=best.sink_cure == "sinks",
    )  # fmt: skip


def _apply_cures(
    task: _CureTask, plain: Decoder, prefix: Sequence[int]
) -> tuple[Decoder, list[tuple[str, str]]]:
    """Rotate a decoder and store the tokens `prefix` in it, as the options say; return the cured
    decoder and report lines (label, text).
    """
    options, cured = task.options, plain
    report_lines: list[tuple[str, str]] = []
    if options.turning or options.rotate_inner:
        task.show.note("rotating")
        # "identity" leaves stream and values as they are: inner channels alone are rotated.
        cured = surgery.rotate(
            plain, options.turning or "identity", stream=bool(options.rotate),
            inner=options.rotate_inner, seed=options.seed,
        )  # fmt: skip
    if options.turning:
        report_lines.append(_describe_rotation(options))
        if plain.config.tied and not cured.config.tied:
            report_lines.append(
                ("Head", "untied from the embedding: it contains the final norm's scale")
            )
    if options.rotate_inner:
        description = "hidden channels of feed-forward networks, as the model runs"
        report_lines.append(("Inner rotation", description))
    if options.rotate_keys:
        cured = surgery.rotate_keys(cured)
        report_lines.append(("Rotation of keys", "and of queries, after RoPE, as the model runs"))
    if prefix:
        task.show.note("storing a prefix")
        cured = surgery.store_prefix(cured, prefix)
    return cured, report_lines


def _round_weights(cured: nn.Module, plain: nn.Module, task: _CureTask) -> list[tuple[str, str]]:
    """Round the weights that the cure changed to the type written; return report lines (label,
    text).
    """
    if not surgery.round_changed(cured, plain, task.stored):
        return []
    type_name = str(task.stored).removeprefix("torch.")
    return [("Weights", f"those that changed are rounded to {type_name}, the type written")]
