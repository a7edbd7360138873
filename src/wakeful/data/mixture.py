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
from wakeful.data.order import Batches, Permutation, Tokens, WindowOrder, derive_key
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
    """Return the domains of a source that is a mixture's expression; None for any other source.

    Raises:
        WakefulError: the expression does not parse, or a name, source or weight is not allowed.
    """
    if not source.lstrip().startswith(f"{MIXTURE}("):
        return None
    # `build_call` gives `_check_mixture` the expression's arguments; errors quote the expression.
    check_mixture = build_call("data.source", {MIXTURE: _check_mixture}, source)
    return check_mixture(source)


def _check_mixture(expression: str, *, parts: list[tuple[str, str, float]]) -> tuple[Domain, ...]:
    """Check a mixture's parts, (name, source, weight) each, and return them as domains.

    Raises:
        WakefulError: there are fewer than two parts, a name is used twice or is no identifier, a
            part is a mixture, or a weight is out of range. The error quotes `expression`.
    """
    names = [name for name, _, _ in parts]
    if len(parts) < 2 or len(set(names)) < len(names):
        raise WakefulError(f"a mixture has two parts or more, each of its own name: {expression}")
    for name, source, weight in parts:
        if not name.isidentifier():
            raise WakefulError(f"{name!r} in a mixture must be a name of letters and digits")
        if mixture_of(source) is not None:
            raise WakefulError(f"{name} is a mixture itself: name its parts in the outer one")
        if not 0 < weight < 1e9:
            raise WakefulError(f"the weight of {name} must be positive and below 1e9, got {weight}")
    total = sum(weight for _, _, weight in parts)
    return tuple(Domain(name, source, weight, weight / total) for name, source, weight in parts)


def describe_source(source: str | Sequence[str]) -> str:
    """Describe a source, or several, for a report: by their names, and a mixture by the names and
    shares of its parts.
    """
    sources = [source] if isinstance(source, str) else source
    domains = mixture_of(sources[0]) if len(sources) == 1 else None
    if domains is None:
        return ", ".join(sources)
    return "a mixture of " + ", ".join(f"{domain.name} ({domain.share:.3g})" for domain in domains)


class MixedTokens(Tokens):
    """The tokens of several domains, one domain after another; a row never spans two domains."""

    def __init__(self, domains: tuple[Domain, ...], parts: list[TokenFile]) -> None:
        """Join the tokens of the domains; `parts` has the token file of each."""
        self.domains, self.parts = domains, parts
        self.sizes = np.array([part.num_tokens for part in parts], np.int64)
        self.offsets = np.cumsum(self.sizes) - self.sizes
        """Position of each domain's first token."""
        self.num_tokens = int(self.sizes.sum())
        self.vocab_size = parts[0].vocab_size
        self.end_of_text = parts[0].end_of_text

    @property
    def domain_sizes(self) -> dict[str, int]:
        """Number of tokens of each domain, by its name, in order."""
        return {
            domain.name: part.num_tokens
            for domain, part in zip(self.domains, self.parts, strict=True)
        }

    def read(self, starts: np.ndarray, count: int) -> np.ndarray:
        """Return the `count` tokens from each start on, (starts, count); past the end of its domain
        a row continues at the domain's beginning.
        """
        starts = np.asarray(starts)
        domain_ids = np.searchsorted(self.offsets, starts, side="right") - 1
        rows = np.empty((len(starts), count), np.int64)
        for domain in np.unique(domain_ids):
            in_domain = domain_ids == domain
            part_starts = starts[in_domain] - self.offsets[domain]
            rows[in_domain] = self.parts[domain].read(part_starts, count)
        return rows

    def spread_starts(self, rows: int, length: int, within: int = 0) -> np.ndarray:
        """Return the starts of at most `rows` rows of `length` tokens, evenly spread over each
        domain; every domain has its share of the rows, or as many as it can fill.

        The rows of the domains alternate evenly. `within` tokens (0: all) only bound the number of
        rows, because a mixture has no first tokens to read them from.
        """
        rows = min(rows, (within or self.num_tokens) // length)
        shares = np.array([domain.share for domain in self.domains])
        counts = np.minimum(_apportion_windows(shares, rows), self.sizes // length)
        starts = [
            offset + part.spread_starts(count, length)
            for offset, part, count in zip(self.offsets, self.parts, counts, strict=True)
        ]
        # Spread each domain's rows over (0, 1), and sort all rows by these numbers.
        sort_keys = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
        return np.concatenate(starts)[np.argsort(sort_keys, kind="stable")]


class MixedBatches(Batches):
    """Training batches of a mixture; the batch of any step is computed in O(1) from the seed.

    In each block of `BLOCK` consecutive windows every domain has its share, rounded, and each block
    has its own random order. A domain's windows come as in `Batches`, each once per epoch of the
    domain.
    """

    token_file: MixedTokens

    def __init__(self, token_file: MixedTokens, **options: Any) -> None:
        """Define the order of windows; `options` are those of `Batches`.

        Raises:
            WakefulError: a domain has too few tokens for a sequence, or a share below 1 / `BLOCK`.
        """
        super().__init__(token_file, **options)
        keys = (derive_key("domain", self.seed, number) for number in range(len(token_file.parts)))
        self._orders = [
            WindowOrder(part.num_tokens, self.length, key)
            for part, key in zip(token_file.parts, keys, strict=True)
        ]
        shares = np.array([domain.share for domain in token_file.domains])
        self._counts = _apportion_windows(shares, BLOCK)
        """Windows of each domain in a block."""
        if not self._counts.all():
            raise WakefulError(
                f"a part of a mixture has less than one in {BLOCK} windows: leave it out"
            )

    def window_starts_of(self, numbers: np.ndarray) -> np.ndarray:
        """Return the positions in the mixture's tokens where the `numbers`-th windows begin."""
        domain_ids, numbers_in_domain = self.assign_domains(numbers)
        starts = np.empty_like(numbers_in_domain)
        for domain, order in enumerate(self._orders):
            in_domain = domain_ids == domain
            if in_domain.any():
                offset = self.token_file.offsets[domain]
                starts[in_domain] = order(numbers_in_domain[in_domain]) + offset
        return starts

    def assign_domains(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return, for each window of the run that `numbers` names, its domain and its number among
        the domain's windows; all are counted from 0.
        """
        blocks, positions = np.divmod(numbers, BLOCK)
        shuffled = np.empty_like(positions)
        for block in np.unique(blocks):
            in_block = blocks == block
            permutation = Permutation(BLOCK, derive_key("mixture", self.seed, block))
            shuffled[in_block] = permutation(positions[in_block])
        # Positions below `_counts[0]` are the first domain's, the next `_counts[1]` the second's …
        ends = np.cumsum(self._counts)
        domain_ids = np.searchsorted(ends, shuffled, side="right")
        position_in_domain = shuffled - (ends - self._counts)[domain_ids]
        return domain_ids, blocks * self._counts[domain_ids] + position_in_domain


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
        """Join prepared domains, the `parts`, all encoded with one tokenizer; `source` is the
        mixture's expression.
        """
        self.domains, self.tokenizer = domains, tokenizer
        self._pairs = [*zip(domains, parts, strict=True)]
        self.train, self.validation = (  # pyright: ignore[reportIncompatibleVariableOverride]
            MixedTokens(domains, [part.split(split) for part in parts]) for split in SPLITS
        )
        overlaps = [part.info["overlap"] for part in parts if part.info.get("overlap") is not None]
        overlap = None
        if len(overlaps) == len(parts):  # measured in every part
            overlap = {
                "passage": overlaps[0]["passage"],
                "documents": sum(part_overlap["documents"] for part_overlap in overlaps),
                "tokens": sum(part_overlap["tokens"] for part_overlap in overlaps),
            }
        self.info = {
            "source": [source],
            "corpora_sha256": [joined_sha256(
                *(f"{domain.name}:{domain.share!r}" for domain in domains),
                *(part.corpus_sha256 for part in parts),
            )],
            "tokenizer": parts[0].info["tokenizer"],
            "splits": {split: self._combine_split_facts(split) for split in SPLITS},
            "overlap": overlap,
        }  # fmt: skip

    @property
    def prepared_source(self) -> str:
        parts = [(domain.name, part.prepared_source, domain.weight) for domain, part in self._pairs]
        return f"{MIXTURE}({parts=!r})"

    @property
    def parts(self) -> list[PreparedData]:
        return [part for _, part in self._pairs]

    def check_config(self, config: DataConfig) -> None:
        """Raise `WakefulError` if `config` sets a field that only preparing a text reads, although
        the mixture names every part as a prepared folder.
        """
        # Whether the tokenizer is that of the parts was checked when they were joined.
        config = dataclasses.replace(config, tokenizer="")
        if not all(part.is_named_by(domain.source) for domain, part in self._pairs):
            return  # the parts that are named as text read the fields
        for domain, part in self._pairs:
            part.check_config(dataclasses.replace(config, source=domain.source))

    def _combine_split_facts(self, split: SplitName) -> dict[str, Any]:
        """Return the number of tokens and the hash of a split over all parts."""
        facts = [part.info["splits"][split] for part in self.parts]
        return {
            "tokens": sum(split_facts["tokens"] for split_facts in facts),
            "sha256": joined_sha256(*(split_facts["sha256"] for split_facts in facts)),
        }


def _apportion_windows(shares: np.ndarray, windows: int) -> np.ndarray:
    """Divide a number of windows in proportion to `shares` (which sum to 1), by the method of the
    largest remainders: round down, then add 1 where most was lost. Return a count for each share.
    """
    exact = shares * windows
    counts = np.floor(exact).astype(np.int64)
    num_missing = windows - int(counts.sum())
    # The lowest differences are the largest remainders; of equal ones the first share's.
    largest_remainders = np.argsort(counts - exact, kind="stable")[:num_missing]
    counts[largest_remainders] += 1
    return counts
