"""An inheritance's text, and its reference's layers and losses, measured before planning."""

import dataclasses
from functools import partial
from typing import get_args

import polars as pl
import torch

from wakeful.config.schema import Config
from wakeful.data.base import Data
from wakeful.data.mixture import mixture_of
from wakeful.data.order import evenly
from wakeful.data.overlap import NothingHeldOut
from wakeful.data.preparing import load_data
from wakeful.data.tokenizer import Tokenizer
from wakeful.device import choose_device
from wakeful.errors import WakefulError
from wakeful.inheritance.choice import bridged_losses
from wakeful.inheritance.layers import By, LayerDiagnosis, diagnose_layers
from wakeful.inheritance.options import InheritOptions
from wakeful.inheritance.plan import depth_of
from wakeful.inheritance.solving import document_numbers, spread_windows
from wakeful.loading.model import Model
from wakeful.terminal.display import Display
from wakeful.training import autocast, window_losses

SOLVED_ON, MEASURED_ON = 12_288, 4_096
"""Tokens that runs of layers are tried on."""
TRIED_LENGTH = 256
"""Longest of these sequences: many short ones are more varied than a few long ones."""


def prepared_text(options: InheritOptions, reference: Model, show: Display) -> Data:
    """Return the text as the reference's tokens, with a validation set that it does not contain."""
    source = options.data.source
    try:
        data = load_data(options.data, show.stage, tokenizer=reference.own_tokenizer)
    except NothingHeldOut:
        option = "" if mixture_of(source) else "--validation_text, "
        raise WakefulError(
            f"every document of {source} that would be held out partly occurs in the others: "
            f"give {option}more text, or a larger --data.validation_fraction"
        ) from None
    data.check(options.data)
    for part in data.parts:
        _check_tokenizer(part.prepared_source, part.tokenizer, reference)
    size = reference.decoder().config.vocab_size
    if data.vocab_size > size:
        raise WakefulError(
            f"the vocabularies differ: {reference.name}'s tokenizer has {data.vocab_size} tokens "
            f"and its embedding {size}"
        )
    dropped = data.info.get("overlap")
    if not dropped:
        raise WakefulError(
            f"{source} was prepared with keep_overlap: what an heir remembers of its validation "
            "text would count as what it has learned; prepare it without"
        )
    if dropped["documents"]:
        show.note(
            f"{dropped['documents']} held-out documents ({dropped['tokens']:,} tokens) partly "
            "occur in the training text and are left out of validation"
        )
    return data


def _check_tokenizer(source: str, tokenizer: Tokenizer, reference: Model) -> None:
    """Raise `WakefulError` for text that another tokenizer than the reference's prepared."""
    expected = reference.own_tokenizer
    if not tokenizer.same_tokens(expected):
        raise WakefulError(
            f"the tokenizer does not match: {source} was prepared with one of "
            f"{tokenizer.vocab_size} tokens that is not {reference.name}'s, of "
            f"{expected.vocab_size}; prepare it with the reference's tokenizer (--tokenizer), or "
            "give the text itself"
        )
    difference = ""
    if tokenizer.begin != expected.begin:
        difference = (
            f"begins texts with token {expected.begin}, and that one's with {tokenizer.begin}"
        )
    elif expected.chat_template and not tokenizer.chat_template:
        difference = "has a chat template, and that one none"
    if difference:
        raise WakefulError(
            f"{source} was prepared with the tokens of {reference.name}'s tokenizer alone, which "
            f"{difference}: prepare it with the folder that tokenizer lies in (--tokenizer), or "
            "give the text itself"
        )


def diagnosed_layers(
    options: InheritOptions, reference: Model, data: Data, show: Display
) -> LayerDiagnosis | None:
    """Measure the reference's layers if the choice depends on them; None otherwise."""
    if options.blocks or options.choose not in get_args(By):
        return None
    length, count = options.diagnose_length, options.diagnose_sequences
    context = reference.decoder().config.context
    if length > context:
        raise WakefulError(
            f"diagnose_length = {length} is past {reference.name}'s context of {context} tokens"
        )
    tokens = spread_windows(data, count, length, options.data)
    if len(tokens) < count:
        raise WakefulError(
            f"{count} sequences of {length} tokens to diagnose need {length * count} tokens, and "
            f"the training text has {options.data.max_tokens or data.train.num_tokens}: lower "
            "--diagnose_length"
        )
    diagnosis = diagnose_layers(
        reference.decoder(), tokens.tolist(),
        partial(show.count, f"diagnosing {reference.name}: sequences"),
    )  # fmt: skip
    total = reference.decoder().config.num_layers
    dropped = total - depth_of(options, total)
    if options.choose != "bridge" or not dropped:
        return diagnosis
    length = min(options.train.length, TRIED_LENGTH)
    rows = max(1, min(SOLVED_ON, options.bridge.tokens) // length)
    measured = max(1, MEASURED_ON // length)
    tokens = spread_windows(data, rows + measured, length, options.data)
    held_out = max(1, len(tokens) * measured // (rows + measured))
    measured_rows = torch.zeros(len(tokens), dtype=torch.bool)  # from all over the text too
    measured_rows[evenly(held_out, len(tokens))] = True
    tokens = torch.cat([tokens[~measured_rows], tokens[measured_rows]])
    device = choose_device(options.train.device)
    decoder = reference.decoder().to(device)
    losses = bridged_losses(
        decoder, tokens, dropped, options.bridge, pinned=options.pinned, held_out=held_out,
        documents=document_numbers(tokens, data, options.data),
        autocast=autocast(options.train, device),
        progress=partial(show.count, f"runs of {dropped} layers tried:"),
    )  # fmt: skip
    decoder.to("cpu")
    return dataclasses.replace(diagnosis, losses=losses)


def evaluated(config: Config, reference: Model, data: Data, show: Display) -> pl.DataFrame:
    """Return the reference's loss in every validation window."""
    train = config.train
    windows = data.windows(config)
    show.note(f"evaluating {reference.name} on {windows.num_predicted:,} tokens")
    device = choose_device(train.device)
    decoder = reference.decoder().to(device)
    frame = window_losses(
        decoder, windows, autocast(train, device), cross_documents=config.data.cross_documents,
        progress=partial(show.count, f"evaluating {reference.name}: batches"),
    )  # fmt: skip
    decoder.to("cpu")
    return frame
