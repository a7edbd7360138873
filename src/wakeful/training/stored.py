"""A teacher's likeliest tokens, computed once and read ever after.

    FOLDER/about.json   `About`: what the predictions are of
    FOLDER/*.rows       one file a process that wrote, of records one after another

A record holds the predictions along one row of tokens and ends with a digest of that row, by which
it is found: no row of another text, tokenizer or length is ever taken for it. What an interrupted
process left half-written lacks its digest and is as good as absent. B rows, L tokens, k kept.
"""

import hashlib
import json
import uuid
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from wakeful.config.tables import to_table
from wakeful.digests import json_digest, state_sha256
from wakeful.errors import WakefulError
from wakeful.model.decoder import Decoder
from wakeful.model.finite import widened
from wakeful.paths import default_cache_dir, expanded
from wakeful.runs.run import disk_errors, read_record, replaced

_ABOUT = "about.json"
_SMALL = 2**16
"""Token ids below it take two bytes each, others four."""


@dataclass(frozen=True, kw_only=True)
class About:
    """about.json: what decides a stored prediction, besides the row of tokens."""

    teacher: str
    """Digest of its configuration and weights."""
    vocabulary: int
    """The first tokens of the teacher's, which are the student's: it has predicted these alone."""
    top_k: int
    temperature: float
    length: int
    """Tokens a row."""
    dtype: str
    """Arithmetic of the teacher's forward pass."""
    end_of_text: int
    """The token that begins a document, where attention stays within documents; −1 elsewhere."""

    @property
    def record(self) -> np.dtype:
        """The layout of a record; its digest comes last, so that it is written last."""
        size, kept = self.length, self.top_k
        number = "<f8" if self.dtype == "float64" else "<f4"
        return np.dtype([
            ("ids", "<u2" if self.vocabulary <= _SMALL else "<u4", (size, kept)),
            ("kept", number, (size, kept)),
            ("rest", number, (size,)),
            ("digest", "S32"),
        ])  # fmt: skip


class TopK(NamedTuple):
    """A teacher's k likeliest tokens, ln p of each, and ln of what all others have together."""

    ids: Int[Tensor, "B L k"]
    kept: Float[Tensor, "B L k"]
    rest: Float[Tensor, "B L"]


def top_k(logits: Float[Tensor, "B L V"], k: int, temperature: float) -> TopK:
    """Return the k likeliest tokens by softmax(logits / temperature); rest is −∞ where k = V."""
    logits = widened(logits) / temperature
    values, ids = logits.topk(k)
    rest = logits.scatter(-1, ids, -torch.inf).logsumexp(-1)
    whole = torch.logaddexp(values.logsumexp(-1), rest)
    return TopK(ids, values - whole.unsqueeze(-1), rest - whole)


def digest_of(decoder: Decoder) -> str:
    """Return the SHA-256 of a decoder's configuration and weights, as float32."""
    return state_sha256(decoder, json.dumps(to_table(decoder.config), sort_keys=True))


class Store:
    """The stored predictions of one teacher; nothing is written before the first `put`."""

    def __init__(self, about: About, folder: str | Path = "") -> None:
        """Open `folder`, or the cache's of all of `about`; refuse another teacher's or form's."""
        self.about = about
        cached = default_cache_dir() / "predictions" / json_digest(to_table(about))
        self.path = expanded(folder) if folder else cached
        self._check()
        self._own = self.path / f"{uuid.uuid4().hex}.rows"
        self._places: dict[bytes, tuple[Path, int]] = {}
        """Where the record of a row is: its file, and the byte where it begins."""
        for path in sorted(self.path.glob("*.rows")):
            self._index(path)

    def __contains__(self, row: Int[Tensor, "L"]) -> bool:
        return row_digest(row) in self._places

    def get(self, rows: Int[Tensor, "B L"]) -> TopK:
        """Return the predictions stored for rows that are all there."""
        found = np.stack([self._read(row_digest(row)) for row in rows])
        ids, kept, rest = (
            torch.from_numpy(np.ascontiguousarray(found[name])).to(rows.device)
            for name in ("ids", "kept", "rest")
        )
        return TopK(ids.long(), kept, rest)

    def put(self, rows: Int[Tensor, "B L"], found: TopK) -> None:
        """Store the predictions along rows; they are on their way to the disk when this returns.

        Raises:
            WakefulError: the disk is full; what was stored before is kept.
        """
        records = np.zeros(len(rows), self.about.record)
        for name, part in found._asdict().items():
            records[name] = part.cpu().numpy()
        records["digest"] = [row_digest(row) for row in rows]
        with disk_errors(self.path):
            if not self._own.exists():
                self.path.mkdir(parents=True, exist_ok=True)
                with replaced(self.path / _ABOUT) as part:
                    part.write_text(json.dumps(to_table(self.about), indent=2))
            with self._own.open("ab") as file:
                start = file.tell()
                file.write(records.tobytes())
        for number, digest in enumerate(records["digest"].tolist()):
            self._places[digest] = (self._own, start + number * records.itemsize)

    def _index(self, path: Path) -> None:
        layout = self.about.record
        count = path.stat().st_size // layout.itemsize
        if not count:
            return
        records = np.memmap(path, layout, mode="r", shape=(count,))
        for number, digest in enumerate(records["digest"].tolist()):
            if digest:
                self._places.setdefault(digest, (path, number * layout.itemsize))

    def _read(self, digest: bytes) -> np.void:
        path, start = self._places[digest]
        return np.fromfile(path, self.about.record, count=1, offset=start)[0]

    def _check(self) -> None:
        if not (self.path / _ABOUT).exists():
            if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
                raise WakefulError(
                    f"train.distill.store = {self.path} is something else than a folder of stored "
                    "predictions: name a new one"
                )
            return
        there = read_record(About, self.path / _ABOUT)
        for name in (field.name for field in fields(About)):
            ours, theirs = getattr(self.about, name), getattr(there, name)
            if ours != theirs:
                raise WakefulError(
                    f"train.distill.store = {self.path} holds predictions with {name} = {theirs}, "
                    f"and {ours} is asked for: name another folder"
                )


def row_digest(row: Tensor) -> bytes:
    """Return 32 hexadecimal digits of a row of tokens, which no padding of a record looks like."""
    content = row.cpu().numpy().astype("<i8").tobytes()
    return hashlib.blake2b(content, digest_size=16).hexdigest().encode()
