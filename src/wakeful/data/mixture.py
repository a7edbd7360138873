"""Weighted mixtures of sources: `mixture(parts=[("code", "python-stdlib", 0.7), ...])`.

Each part, a domain, is prepared and split by itself, with one tokenizer for all. Training takes
windows of the domains in the proportion of their weights, whatever their sizes; validation is all
that was held out of each, one domain after another.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from wakeful.config.schema import DataConfig
from wakeful.data.base import Data
from wakeful.data.order import Batches, Permutation, Tokens, WindowOrder, key64
from wakeful.data.sources import MIXTURE
from wakeful.data.tokenizer import Tokenizer
from wakeful.data.tokens import SPLITS, PreparedData, SplitName, TokenFile
from wakeful.digests import joined_sha256
from wakeful.errors import WakefulError
from wakeful.variants import build_call

BLOCK = 10_000
"""Windows of a training run in which the shares are exact."""


@dataclass(frozen=True)
class Domain:
    """A source in a mixture."""

    name: str
    source: str
    weight: float
    """As written."""
    share: float
    """Of the training windows; the shares of a mixture sum to 1."""


def mixture_of(source: str) -> tuple[Domain, ...] | None:
    """Return the domains of a mixture's expression; None where a source is not one.

    Raises:
        WakefulError: the expression does not parse, or names, sources and weights are not fit.
    """
    if not source.lstrip().startswith(f"{MIXTURE}("):
        return None
    return build_call("data.source", {MIXTURE: _mixture}, source)(source)


def _mixture(written: str, *, parts: list[tuple[str, str, float]]) -> tuple[Domain, ...]:
    names = [name for name, _, _ in parts]
    if len(parts) < 2 or len(set(names)) < len(names):
        raise WakefulError(f"a mixture has two parts or more, each of its own name: {written}")
    for name, source, weight in parts:
        if not name.isidentifier():
            raise WakefulError(f"{name!r} in a mixture must be a name of letters and digits")
        if mixture_of(source) is not None:
            raise WakefulError(f"{name} is a mixture itself: name its parts in the outer one")
        if not 0 < weight < 1e9:
            raise WakefulError(f"the weight of {name} must be positive, got {weight}")
    total = sum(weight for _, _, weight in parts)
    return tuple(Domain(name, source, weight, weight / total) for name, source, weight in parts)


def source_in_words(source: str | Sequence[str]) -> str:
    """Return a text's source, or sources, as a reader would write it."""
    sources = [source] if isinstance(source, str) else source
    domains = mixture_of(sources[0]) if len(sources) == 1 else None
    if domains is None:
        return ", ".join(sources)
    return "a mixture of " + ", ".join(f"{domain.name} ({domain.share:.3g})" for domain in domains)


class MixedTokens(Tokens):
    """The tokens of several domains, one after another; no row reaches from one into the next."""

    def __init__(self, domains: tuple[Domain, ...], parts: list[TokenFile]) -> None:
        self.domains, self.parts = domains, parts
        self.sizes = np.array([part.num_tokens for part in parts], np.int64)
        self.offsets = np.cumsum(self.sizes) - self.sizes
        self.num_tokens = int(self.sizes.sum())
        self.vocab_size = parts[0].vocab_size
        self.end_of_text = parts[0].end_of_text

    @property
    def stretches(self) -> dict[str, int]:
        return {
            domain.name: part.num_tokens
            for domain, part in zip(self.domains, self.parts, strict=True)
        }

    def read(self, starts: np.ndarray, count: int) -> np.ndarray:
        """Return rows of tokens, each of the domain in which it starts, closed to a circle."""
        starts = np.asarray(starts)
        owners = np.searchsorted(self.offsets, starts, side="right") - 1
        rows = np.empty((len(starts), count), np.int64)
        for owner in np.unique(owners):
            mine = owners == owner
            rows[mine] = self.parts[owner].read(starts[mine] - self.offsets[owner], count)
        return rows

    def spread(self, rows: int, length: int, within: int = 0) -> np.ndarray:
        """Return where rows that are evenly spread over each domain start, each by its share.

        The domains take turns evenly. One with too few tokens gives what it has. A mixture has no
        first tokens: `within` bounds the rows alone, and training refuses it (`Data.first`).
        """
        rows = min(rows, (within or self.num_tokens) // length)
        shares = np.array([domain.share for domain in self.domains])
        counts = np.minimum(_apportion(shares, rows), self.sizes // length)
        turns = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
        starts = [
            offset + part.spread(count, length)
            for offset, part, count in zip(self.offsets, self.parts, counts, strict=True)
        ]
        return np.concatenate(starts)[np.argsort(turns, kind="stable")]


class MixedBatches(Batches):
    """Training batches of a mixture, by the number of the window: seeded, and sought in O(1).

    Of each `BLOCK` windows on end every domain has its share, rounded, in an order of its own; and
    each domain goes through its windows as `Batches` does, each once an epoch of the domain.
    """

    token_file: MixedTokens

    def __init__(self, token_file: MixedTokens, **options: Any) -> None:
        super().__init__(token_file, **options)
        keys = (key64("domain", self.seed, number) for number in range(len(token_file.parts)))
        self._orders = [
            WindowOrder(part.num_tokens, self.length, key)
            for part, key in zip(token_file.parts, keys, strict=True)
        ]
        self._counts = _apportion(np.array([domain.share for domain in token_file.domains]), BLOCK)
        if not self._counts.all():
            raise WakefulError(
                f"a part of a mixture has less than one in {BLOCK} windows: leave it out"
            )

    def starts_of(self, numbers: np.ndarray) -> np.ndarray:
        owners, places = self.dealt(numbers)
        starts = np.empty_like(places)
        for owner, order in enumerate(self._orders):
            mine = owners == owner
            if mine.any():
                starts[mine] = order(places[mine]) + self.token_file.offsets[owner]
        return starts

    def dealt(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the domain of each window of the run, and how many of its own come before."""
        blocks, places = np.divmod(numbers, BLOCK)
        shuffled = np.empty_like(places)
        for block in np.unique(blocks):
            here = blocks == block
            shuffled[here] = Permutation(BLOCK, key64("mixture", self.seed, block))(places[here])
        ends = np.cumsum(self._counts)
        owners = np.searchsorted(ends, shuffled, side="right")
        return owners, blocks * self._counts[owners] + shuffled - (ends - self._counts)[owners]


class MixedData(Data):
    """Prepared domains that serve as one prepared text."""

    train: MixedTokens
    validation: MixedTokens
    batches_type = MixedBatches

    def __init__(
        self,
        source: str,
        domains: tuple[Domain, ...],
        parts: list[PreparedData],
        tokenizer: Tokenizer,
    ) -> None:
        self.domains, self.tokenizer = domains, tokenizer
        self._pairs = [*zip(domains, parts, strict=True)]
        self.train, self.validation = (  # pyright: ignore[reportIncompatibleVariableOverride]
            MixedTokens(domains, [part.split(split) for part in parts]) for split in SPLITS
        )
        dropped = [part.info.get("overlap") for part in parts]
        overlaps = [overlap for overlap in dropped if overlap is not None]
        self.info = {
            "source": [source],
            "corpora_sha256": [joined_sha256(
                *(f"{overlap.name}:{overlap.share!r}" for overlap in domains),
                *(part.corpus_sha256 for part in parts),
            )],
            "tokenizer": parts[0].info["tokenizer"],
            "splits": {split: self._split(split) for split in SPLITS},
            "overlap": None if len(overlaps) < len(parts) else {
                "passage": overlaps[0]["passage"],
                **{name: sum(overlap[name] for overlap in overlaps)
                   for name in ("documents", "tokens")},
            },
        }  # fmt: skip

    @property
    def prepared_source(self) -> str:
        parts = [(domain.name, part.prepared_source, domain.weight) for domain, part in self._pairs]
        return f"{MIXTURE}({parts=!r})"

    @property
    def warning(self) -> str:
        return " ".join(filter(None, (part.warning for part in self.parts)))

    @property
    def parts(self) -> list[PreparedData]:
        return [part for _, part in self._pairs]

    def is_named_by(self, source: str) -> bool:
        return all(part.is_named_by(domain.source) for domain, part in self._pairs)

    def check(self, config: DataConfig) -> None:
        """`max_bytes` and `keep_overlap` are for the parts that are not prepared yet."""
        if not self.is_named_by(config.source):
            config = dataclasses.replace(config, max_bytes=0, keep_overlap=False)
        for domain, part in self._pairs:
            part.check(dataclasses.replace(config, source=domain.source))

    def _split(self, split: SplitName) -> dict[str, Any]:
        facts = [part.info["splits"][split] for part in self.parts]
        return {
            "tokens": sum(split_facts["tokens"] for split_facts in facts),
            "sha256": joined_sha256(*(split_facts["sha256"] for split_facts in facts)),
        }


def _apportion(shares: np.ndarray, windows: int) -> np.ndarray:
    """Return how many of the windows each share comes to, by the largest remainders."""
    exact = shares * windows
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: windows - int(counts.sum())]] += 1
    return counts
