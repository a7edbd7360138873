"""An inheritance's text, and its reference's layers and losses, measured before planning."""

from functools import partial

import polars as pl

from wakeful.config.reading import LENGTH
from wakeful.config.schema import Config
from wakeful.data.base import Data
from wakeful.data.mixture import mixture_of
from wakeful.data.overlap import NothingHeldOut
from wakeful.data.preparing import load_data
from wakeful.data.tokenizer import Tokenizer
from wakeful.device import choose_device
from wakeful.errors import WakefulError
from wakeful.inheritance.layers import diagnose_layers
from wakeful.inheritance.options import InheritOptions
from wakeful.inheritance.plan import Angles
from wakeful.inheritance.solving import spread_windows
from wakeful.loading.model import Model
from wakeful.terminal.display import Display
from wakeful.training import autocast, window_losses

CHOOSING_SEQUENCES = 4
"""Sequences, from all over the training text, that layers are chosen by."""


def prepare_text(options: InheritOptions, reference: Model, show: Display) -> Data:
    """Return the text in the reference's tokens, with validation text that does not occur in the
    training text.

    Raises:
        WakefulError: no text is left to validate on; the tokenizer has more tokens than the
            reference's embedding; or the text was prepared with another tokenizer, or without a
            search for validation text that occurs in the training text.
    """
    source = options.data.source
    try:
        data = load_data(options.data, show.stage, tokenizer=reference.wakeful_tokenizer)
    except NothingHeldOut:
        # A mixture holds out a share of each part, and takes no validation text.
        option = "" if mixture_of(source) else "--validation_text, "
        raise WakefulError(
            f"every document of {source} that would be held out partly occurs in the others: "
            f"give {option}more text, or a larger --data.validation_fraction"
        ) from None
    data.check_config(options.data)
    for part in data.parts:
        _check_tokenizer(part.prepared_source, part.tokenizer, reference)
    size = reference.decoder().config.vocab_size
    if data.vocab_size > size:
        raise WakefulError(
            f"the vocabularies differ: {reference.name}'s tokenizer has {data.vocab_size} tokens "
            f"and its embedding {size}"
        )
    dropped = data.info.get("overlap")  # held-out text that was left out; None without a search
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
    """Raise `WakefulError` unless a text was prepared with a tokenizer like the reference's: one
    with the same tokens and the same token at the start of a text, and with a chat template if the
    reference has one. `source` names the text in the message.
    """
    expected = reference.wakeful_tokenizer
    lost_template = expected.chat_template and not tokenizer.chat_template
    other_start = tokenizer.start_token != expected.start_token
    if lost_template or other_start or not tokenizer.same_tokens(expected):
        raise WakefulError(
            f"the tokenizer does not match: {source} was prepared with one that has other tokens, "
            f"another start of a text or no chat template, unlike {reference.name}'s; prepare it "
            "with the reference's tokenizer (--tokenizer), or give the text itself"
        )


def measure_angles(
    options: InheritOptions, reference: Model, data: Data, show: Display
) -> Angles | None:
    """Return the angles between the reference's layers on the training text; None if the choice of
    layers does not depend on them.

    Raises:
        WakefulError: the training text is shorter than a sequence.
    """
    if options.blocks or options.choose == "first":  # named, or counted from the first
        return None
    length = min(LENGTH, reference.decoder().config.context)
    tokens = spread_windows(data, CHOOSING_SEQUENCES, length, options.data)
    if not len(tokens):
        raise WakefulError(
            f"the training text has fewer than {length} tokens: give more to choose layers by"
        )
    return diagnose_layers(
        reference.decoder(), tokens.tolist(),
        partial(show.count, f"diagnosing {reference.name}: sequences"),
    )  # fmt: skip


def evaluate_model(config: Config, model: Model, data: Data, show: Display) -> pl.DataFrame:
    """Return a model's loss in every validation window, a row for each.

    The model is moved to the training device, and is on the CPU afterwards.
    """
    train = config.train
    windows = data.windows(config)
    show.note(f"evaluating {model.name} on {windows.num_predicted:,} tokens")
    device = choose_device(train.device)
    decoder = model.decoder().to(device)
    frame = window_losses(
        decoder, windows, autocast(train, device), cross_documents=config.data.cross_documents,
        progress=partial(show.count, f"evaluating {model.name}: batches"),
    )  # fmt: skip
    decoder.to("cpu")
    return frame
