"""Which documents are for training and which for validation: never one text on both sides."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from wakeful.data.document import Document
from wakeful.data.mixing import key64, mix64
from wakeful.data.spool import Spool
from wakeful.errors import WakefulError


@dataclass(frozen=True)
class Side:
    """The documents of one side: those of `spool` where `wanted` is true."""

    spool: Spool
    wanted: np.ndarray

    @property
    def num_bytes(self) -> int:
        """Of text, in UTF-8."""
        return int(self.spool.lengths[self.wanted].sum())


@dataclass(frozen=True)
class Split:
    train: Side
    validation: Side
    rule: str


def split_by_hash(spool: Spool, *, fraction: float, seed: int, scratch: Path) -> Split:
    """Give about `fraction` of the documents to validation, by a hash of each one's text.

    A text's side hangs on the text and `seed` alone: exact duplicates stay together, and more
    documents never move the others. Two departures keep both sides filled: the text with the
    extreme hash goes over to an empty side, and a source of one document is cut in two near its
    end. Raises WakefulError where there is nothing to divide.
    """
    if len(spool) == 1:
        return _split_one(spool, fraction=fraction, scratch=scratch)
    values = mix64(spool.digests["low"], key64("validation", seed))
    if values.min() == values.max():
        raise WakefulError(
            f"all {len(spool)} documents are the same text, so none is left for validation: "
            "pass a validation source"
        )
    validation = values < np.uint64(fraction * 2**64)
    if not validation.any():
        validation = values == values.min()
    elif validation.all():
        validation = values != values.max()
    rule = f"SHA-256 of the text, seed {seed}, fraction {fraction}"
    return Split(Side(spool, ~validation), Side(spool, validation), rule)


def split_from_source(spool: Spool, validation: Spool) -> Split:
    """Train on one source and validate on the other.

    Raises WakefulError where a text stands in both: a loss on it would be a loss on what was
    learnt by heart.
    """
    ours, theirs = spool.digests, validation.digests
    shared = np.flatnonzero(np.isin(theirs["low"], ours["low"]))
    for number in shared:
        same = np.flatnonzero(ours == theirs[number])
        if len(same):
            raise WakefulError(
                f"validation overlaps training: {validation.name(int(number))!r} of the validation "
                f"source is the same text as {spool.name(int(same[0]))!r} of the training source: "
                "take it out of one of them"
            )
    both = Side(spool, np.ones(len(spool), bool)), Side(validation, np.ones(len(validation), bool))
    return Split(*both, rule="a source of its own")


def _split_one(spool: Spool, *, fraction: float, scratch: Path) -> Split:
    document = next(spool.read(np.ones(1, bool)))
    wanted = round(len(document.text) * (1 - fraction))
    end = document.text.rfind("\n", 0, wanted) + 1 or wanted
    head, tail = document.text[:end], document.text[end:]
    if not head.strip() or not tail.strip():
        raise WakefulError(
            f"the one document {document.name!r} of {len(document.text)} characters is too short "
            "to keep a part for validation: pass more text or a validation source"
        )
    parts = Spool(scratch)
    parts.fill(Document(document.name, text) for text in (head, tail))
    rule = f"the end of the one document, from character {end}"
    return Split(Side(parts, np.array([True, False])), Side(parts, np.array([False, True])), rule)
