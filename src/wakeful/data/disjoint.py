"""A validation set that training does not hold: the prepared data without what is in both.

Held-out documents are chosen by a hash of their text, which keeps equal ones together but not
those that are nearly equal: half of the tables of the standard library's `encodings` stand in each
other. A loss on them is a loss on what was learnt by heart.
"""

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from wakeful.data.cache import default_cache_dir
from wakeful.data.folders import building_beside, move_in
from wakeful.data.overlap import repeated_shares
from wakeful.data.tokens import PreparedData, documents_path, file_sha256, tokens_path
from wakeful.errors import WakefulError

PASSAGE = 64
"""Tokens of a passage: longer than a licence's name, shorter than a function."""
ALLOWED = 0.05
"""Share of a document's passages that may stand in the training text: a licence's, say."""


@dataclass(frozen=True)
class Held:
    """Data whose validation documents are not in its training text."""

    data: PreparedData
    dropped: int
    """Documents that were left out of validation."""
    dropped_tokens: int


def disjoint(data: PreparedData, *, cache_dir: str | Path | None = None) -> Held:
    """Return the data without validation documents that overlap the training text.

    A document overlaps where more than `ALLOWED` of its passages of `PASSAGE` tokens are in the
    training text word for word. The training tokens stay as they are.

    Raises:
        WakefulError: validation was given as a text of its own, which is then wrong, or nothing of
            it is left.
    """
    shares = repeated_shares(data.train, data.validation, length=PASSAGE)
    bad = shares > ALLOWED
    if not bad.any():
        return Held(data, 0, 0)
    worst = int(shares.argmax())
    if data.info.get("validation_source"):
        raise WakefulError(
            f"the training text overlaps validation: of {len(shares)} validation documents "
            f"{int(bad.sum())} stand in it in part, document {worst} with {shares[worst]:.0%} of "
            f"its passages of {PASSAGE} tokens; take them out of one of the two"
        )
    if bad.all():
        raise WakefulError(
            f"the training text overlaps validation: every held-out document stands in it in part "
            f"({shares[worst]:.0%} of passages of {PASSAGE} tokens at the worst); pass a "
            "validation text of its own, or hold out more"
        )
    return _without(data, bad, Path(cache_dir or default_cache_dir()))


def _without(data: PreparedData, bad: np.ndarray, cache: Path) -> Held:
    starts = np.asarray(data.validation.documents)
    ends = np.append(starts[1:], data.validation.num_tokens)
    tokens = data.validation.tokens
    kept = np.concatenate([tokens[a:b] for a, b in zip(starts[~bad], ends[~bad], strict=True)])
    lengths = (ends - starts)[~bad]
    sha = data.info["splits"]
    key = [sha["train"]["sha256"], sha["validation"]["sha256"], np.flatnonzero(bad).tolist(),
           data.info["tokenizer"]["fingerprint"]]  # fmt: skip
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    folder = cache / "data" / f"disjoint-{digest}"
    dropped = Held(data, int(bad.sum()), int((ends - starts)[bad].sum()))
    settings = {**data.info.get("settings", {}), "disjoint": PASSAGE}
    if not folder.exists():
        with building_beside(folder) as building:
            _link(data.folder, building)
            kept.tofile(tokens_path(building, "validation"))
            documents = np.cumsum(lengths) - lengths
            np.save(documents_path(building, "validation"), documents.astype("<i8"))
            text = [data.tokenizer.decode(part.tolist()) for part in np.split(kept, documents[1:])]
            facts = {
                "documents": len(documents),
                "tokens": len(kept),
                "bytes": sum(len(part.encode("utf-8")) for part in text),
                "sha256": file_sha256(tokens_path(building, "validation")),
                "documents_sha256": file_sha256(documents_path(building, "validation")),
            }
            rule = f"{data.info['split_rule']}, without {dropped.dropped} that overlap training"
            info = {**data.info, "settings": settings, "split_rule": rule,
                    "splits": {**sha, "validation": facts}}  # fmt: skip
            (building / "data.json").write_text(json.dumps(info, indent=2) + "\n", "utf-8")
            move_in(building, folder, settings)
    return Held(PreparedData.open(folder), dropped.dropped, dropped.dropped_tokens)


def _link(source: Path, target: Path) -> None:
    """Give the training tokens and the tokenizer a second name, or copy them where that fails."""
    for path in source.iterdir():
        if path.name.startswith("validation.") or path.name == "data.json" or path.is_dir():
            continue
        try:
            os.link(path, target / path.name)
        except OSError:  # another filesystem
            shutil.copy2(path, target / path.name)
