"""The verb `data generate`: a model in, prepared data that it wrote itself out."""

import dataclasses
import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wakeful.config.keywords import accept_options, options_from
from wakeful.data.order import key64
from wakeful.data.sampled import Documents, prepare_samples
from wakeful.data.tokens import PreparedData
from wakeful.digests import joined_sha256, state_sha256
from wakeful.errors import WakefulError
from wakeful.generation.data_options import SampleOptions
from wakeful.loading.chat import user_turn
from wakeful.loading.load import load
from wakeful.loading.model import AnyTokenizer, Model
from wakeful.loading.sampling import sample
from wakeful.loading.sources import Source, modules_in_memory, name_of
from wakeful.model.evaluating import evaluating
from wakeful.paths import expanded
from wakeful.switches import ordinary_switches
from wakeful.terminal.display import DisplayFactory, default_display
from wakeful.terminal.plain_text import decode_utf8

_ROOM = 2
"""Tokens that must be left to write behind the longest prompt."""


@dataclass(frozen=True)
class _Beginnings:
    """The beginnings of documents, and the tokens in place of the first end in them."""

    prompts: list[list[int]]
    reply: list[int]
    ends: frozenset[int]
    chat: bool
    silent: int = 0
    """Tokens of a prompt that are read and not written: the end of the document before."""
    common: int = 0
    """Tokens that all of them begin with."""


@accept_options(SampleOptions)
@ordinary_switches()
def sample_data(
    model: Source,
    *,
    tokenizer: AnyTokenizer | str | Path | None = None,
    display: DisplayFactory | None = None,
    options: SampleOptions | None = None,
    **kwargs: Any,
) -> PreparedData:
    """Let a model write documents, and return them as prepared data.

        sample_data("smollm2", out="data/own", tokens=100_000)

    A document begins as one does for the model: with BOS, or behind the end of the one before. With
    a chat template it begins with a user's turn, whose message is a prompt or, where there are
    none, what the model writes there (Magpie, arXiv 2406.08464, section 2); then the model answers.

    Args:
        model: a name, a path, what `wakeful.load` returned, or a module in memory.
        tokenizer: of a module in memory.
        display: shows progress; None is a bar where there is a terminal.
        options: `SampleOptions`, whose fields are keyword arguments too.

    Raises:
        WakefulError: an option is out of its range, the folder holds something else, or what is
            written is empty, or the same over and over.
    """
    options = options_from(SampleOptions, kwargs, options)
    folder = expanded(options.out).absolute()
    lines = _lines(Path(options.prompts)) if options.prompts else []
    with (
        evaluating(*modules_in_memory([model])),
        (display or default_display)("data generate") as show,
    ):
        show.note(f"loading {name_of(model)}")
        # As it is stored: what it writes needs no more than the weights have.
        loaded = load(
            model, tokenizer=tokenizer, device=options.device, step=options.step, dtype="auto",
            trust_remote_code=options.trust_remote_code,
        )  # fmt: skip
        length = _length(options, loaded)
        begin = _beginnings(options, loaded, lines, length)
        settings = {
            "model": loaded.name,
            "weights_sha256": state_sha256(loaded.module),
            "step": loaded.step,
            "tokenizer": loaded.own_tokenizer.fingerprint,
            "tokens": options.tokens,
            "length": length,
            "batch_size": options.batch_size,
            "temperature": options.temperature,
            "top_k": options.top_k,
            "top_p": options.top_p,
            "seed": options.seed,
            "prompts": joined_sha256(json.dumps([begin.prompts, begin.reply])),
            "chat": begin.chat,
            "validation_fraction": options.validation_fraction,
        }

        fields = dataclasses.fields(SampleOptions)
        neutral = {entry.name: entry.default for entry in fields if entry.name in settings}

        def write(number: int) -> Documents:
            return _part(loaded, begin, options, length, number)

        return prepare_samples(
            folder, write, tokenizer=loaded.own_tokenizer, name=loaded.name, settings=settings,
            neutral=neutral, ends=begin.ends, common=begin.common,
            progress=lambda done, total: show.count("tokens", done, total),
        )  # fmt: skip


def _lines(file: Path) -> list[str]:
    """Return the prompts of a file."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise WakefulError(f"prompts = {str(file)!r} cannot be read: {error}") from None
    lines = [line.strip() for line in decode_utf8(data, file).splitlines() if line.strip()]
    if not lines:
        raise WakefulError(f"prompts = {str(file)!r} has no line with a prompt in it")
    return lines


def _length(options: SampleOptions, model: Model) -> int:
    length = options.length_for(model.context)
    if length > model.context:
        raise WakefulError(
            f"length = {length} is past {model.name}'s context of {model.context} tokens"
        )
    if options.tokens < 2 * length:
        raise WakefulError(
            f"tokens = {options.tokens}: one part is held out, so there must be two documents of "
            f"length = {length} at least"
        )
    return length


def _beginnings(options: SampleOptions, model: Model, lines: list[str], length: int) -> _Beginnings:
    """Return the beginnings of documents.

    Raises:
        WakefulError: a chat template is asked for and cannot be used, or a prompt is too long.
    """
    tokenizer, ends = model.own_tokenizer, model.ends
    turn = None if options.chat == "off" else user_turn(tokenizer)
    if turn is None and options.chat == "on":
        raise WakefulError(f"chat = on: the tokenizer of {model.name} has no chat template")
    if turn is not None and turn.answer_end is not None:
        ends |= {turn.answer_end}
    if turn is None:
        begin = [model.encode(line) for line in lines] or [model.begin()]
        beginnings = _Beginnings(begin, [], ends, chat=False)
        if not begin[0]:
            beginnings = _Beginnings([[tokenizer.end_of_text]], [], ends, chat=False, silent=1)
    elif lines:
        begin = [turn.around(line) for line in lines]
        alike = (len(set(column)) == 1 for column in zip(turn.before, *begin, strict=False))
        common = sum(itertools.takewhile(bool, alike))
        beginnings = _Beginnings(begin, [], ends, chat=True, common=common)
    elif turn.end is None:
        raise WakefulError(
            f"the chat template of {model.name} ends a user's message with ordinary text, so it is "
            "not seen where one that the model writes ends: give --prompts, or --chat off"
        )
    else:
        ends |= {turn.end}
        before = turn.before or [tokenizer.end_of_text]
        beginnings = _Beginnings(
            [before], turn.after, ends, chat=True, silent=int(not turn.before),
            common=len(turn.before),
        )  # fmt: skip
    longest = max(map(len, beginnings.prompts)) + len(beginnings.reply)
    if longest + _ROOM > length:
        description = "the longest prompt" if lines else "what documents begin with"
        raise WakefulError(
            f"length = {length} leaves no room to write: {description} has {longest} tokens; "
            "raise it"
        )
    return beginnings


def _part(
    model: Model, begin: _Beginnings, options: SampleOptions, length: int, number: int
) -> Documents:
    """Return the documents of one part, those that are not empty."""
    first = number * options.batch_size
    prompts = [
        begin.prompts[position % len(begin.prompts)]
        for position in range(first, first + options.batch_size)
    ]
    rows = sample(
        model, prompts, length=length, ends=begin.ends, reply=begin.reply,
        temperature=options.temperature, top_k=options.top_k, top_p=options.top_p,
        seed=key64("sample", options.seed, number) >> 1,
    )  # fmt: skip
    documents: Documents = []
    for prompt, row in zip(prompts, rows, strict=True):
        new = row[len(prompt) :]
        unasked = begin.reply and new[: len(begin.reply)] == begin.reply
        if new[0] not in begin.ends and not unasked:
            documents.append(row[begin.silent :])
    return documents
