"""A validation set that training does not hold: held-out documents that stand in both are dropped.

Held-out documents are chosen by a hash of their text, which keeps equal ones together but not
those that are nearly equal: half of the tables of the standard library's `encodings` stand in each
other. A loss on them is a loss on what was learnt by heart.
"""

import os
from typing import Any

import numpy as np

from wakeful.data.overlap import repeated_shares
from wakeful.data.tokens import PreparedData, documents_path, file_sha256, tokens_path
from wakeful.errors import WakefulError

PASSAGE = 64
"""Tokens of a passage: longer than a licence's name, shorter than a function."""
ALLOWED = 0.05
"""Share of a document's passages that may stand in the training text: a licence's, say."""
_CURE = "or prepare the data with keep_overlap"


def drop_overlap(data: PreparedData, num_bytes: np.ndarray) -> dict[str, Any]:
    """Rewrite the validation files without documents that overlap training; returns what changed.

    A document overlaps where more than `ALLOWED` of its passages of `PASSAGE` tokens are in the
    training text word for word. The training tokens stay as they are. `num_bytes` are the UTF-8
    bytes of each validation document. What is returned belongs into `data.json`: the facts of the
    split `validation`, and in `overlap` how many documents and tokens were dropped.

    Raises:
        WakefulError: nothing of validation is left, or it was given as a text of its own, which is
            then wrong.
    """
    validation = data.validation
    shares = repeated_shares(data.train, validation, length=PASSAGE)
    bad = shares > ALLOWED
    dropped = {"passage": PASSAGE, "documents": int(bad.sum()), "tokens": 0}
    if not bad.any():
        return {"validation": data.info["splits"]["validation"], "overlap": dropped}
    worst = int(shares.argmax())
    if data.info["validation_source"]:
        raise WakefulError(
            f"the training text overlaps validation: of {len(shares)} validation documents "
            f"{int(bad.sum())} stand in it in part, document {worst} with {shares[worst]:.0%} of "
            f"its passages of {PASSAGE} tokens; take them out of one of the two, {_CURE}"
        )
    if bad.all():
        raise WakefulError(
            f"the training text overlaps validation: every held-out document stands in it in part "
            f"({shares[worst]:.0%} of passages of {PASSAGE} tokens at the worst); pass a "
            f"validation text of its own, hold out more, {_CURE}"
        )
    starts = np.asarray(validation.documents)
    ends = np.append(starts[1:], validation.num_tokens)
    lengths = (ends - starts)[~bad]
    path, documents = (
        tokens_path(data.folder, "validation"), documents_path(data.folder, "validation")
    )  # fmt: skip
    shorter = path.with_suffix(".shorter")
    with shorter.open("wb") as file:
        for start, end in zip(starts[~bad], ends[~bad], strict=True):
            file.write(validation.tokens[start:end].tobytes())
    os.replace(shorter, path)
    np.save(documents, (np.cumsum(lengths) - lengths).astype("<i8"), allow_pickle=False)
    facts = {
        "documents": len(lengths),
        "tokens": int(lengths.sum()),
        "bytes": int(num_bytes[~bad].sum()),
        "sha256": file_sha256(path),
        "documents_sha256": file_sha256(documents),
    }
    dropped["tokens"] = validation.num_tokens - facts["tokens"]
    return {"validation": facts, "overlap": dropped}
