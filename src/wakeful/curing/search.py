"""Which cure helps a number format: candidates measured on a text, the best one proved on another.

A candidate is a rotation of the residual stream (none, one within the format's blocks, the whole),
rotations as the model runs, and what becomes of the first token (nothing, a stored prefix, sinks).
Each is quantized as the format says and read beside the model before, on the same tokens. The best
is kept if on further text it loses less than the uncured model in that format: the paired interval
of the difference lies below zero. Otherwise the choice is no cure.

A cure is measured with the rounding that it is for. A rotation takes weights off the grid that they
may lie on, which costs where they are rounded to nearest and not by GPTQ.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from wakeful import surgery
from wakeful.errors import WakefulError
from wakeful.estimates import (
    INTERVAL,
    Estimate,
    describe_change,
    interval,
    mean_and_error,
    with_interval,
)
from wakeful.hf.configuration import WakefulConfig
from wakeful.hf.weights_out import stock_architecture
from wakeful.model.decoder import Decoder
from wakeful.quantization import Absmax, Gptq, Grid, Scheme, parse_scheme, quantize_module
from wakeful.reports.value import Cell, Section, Table, Text

CHOOSING, PROVING = 8, 16
"""Sequences that candidates are measured on, and that the best one is proved on."""
LENGTH = 256
"""Tokens of each, or the model's context where that is shorter."""
CALIBRATING = 8
"""Further sequences for what looks at text before it rounds, and for sinks to be fitted on."""
SPREAD = 8
"""Sequences lie this many of their lengths apart, where the text is long enough: what GPTQ learns
of an article helps it most with that article's next lines."""
CLIPS = (0.9, 0.8)
"""Shares of the largest number that a grid of few bits is tried with, besides all of it."""
GPTQ = Gptq()
"""How weights of few bits are rounded in a format that is given by its name."""
_FEW_BITS = 4
HEAD = "head"
_CALLED = {"int8": "w8a8"}
"""Formats that have another name among schemes."""


@dataclass(frozen=True)
class Candidate:
    """What is done to a model before it is quantized; the plain one is no cure."""

    rotate: str = ""
    inner: bool = False
    keys: bool = False
    first: str = ""
    """What becomes of the first token: nothing, `prefix` or `sinks`."""

    def __str__(self) -> str:
        named = {"rotate_inner": self.inner, "rotate_keys": self.keys, self.first: self.first}
        parts = [
            f"rotate {self.rotate}" if self.rotate else "",
            *(n for n, on in named.items() if on),
        ]
        return ", ".join(filter(None, parts)) or "no cure"

    def made(
        self, plain: Decoder, calibrating: Tensor, token: int | None, seed: int = 0
    ) -> Decoder:
        """Return the cured decoder; the plain one where nothing is to be done.

        Args:
            plain: the decoder, which stays as it is.
            calibrating: sequences (B, L) that sinks are fitted on.
            token: what a prefix stores and sinks are fitted to.
            seed: of the rotations.
        """
        made = plain
        if self.first == "sinks":
            assert token is not None
            made = surgery.learned_sinks(made, token, calibrating)
        if self.rotate or self.inner:
            made = surgery.rotate(made, self.rotate or "identity", inner=self.inner, seed=seed)
        if self.keys:
            made = surgery.rotate_keys(made)
        if self.first == "prefix":
            assert token is not None
            made = surgery.store_prefix(made, [token])
        return made


@dataclass(frozen=True)
class Trial:
    """A candidate in one format: what it costs over the uncured model in full precision."""

    candidate: Candidate
    scheme: Scheme
    damage: Estimate
    """Nats a token, paired over sequences."""


@dataclass(frozen=True)
class Proof:
    """The chosen candidate beside no cure, in one format, on text that chose nothing."""

    scheme: Scheme
    before: Estimate
    after: Estimate
    difference: Estimate
    """After minus before, paired."""

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% confidence interval of the difference."""
        return interval(*self.difference, PROVING)


@dataclass(frozen=True)
class Choice:
    """What is best for formats, and all that was measured on the way."""

    best: Candidate
    schemes: tuple[Scheme, ...]
    """The formats, clipped as was best."""
    trials: tuple[tuple[Trial, ...], ...]
    """Those of each candidate, no cure first: one a format."""
    proofs: tuple[Proof, ...]
    """Of what was best on the first text, whether it was kept or not."""

    @property
    def summary(self) -> dict[str, Any]:
        """All figures: values with their standard errors."""
        return {
            "chosen": str(self.best),
            "schemes": [each.expression for each in self.schemes],
            "candidates": [
                {"scheme": str(each.scheme), "cure": str(each.candidate), "damage": each.damage}
                for trials in self.trials for each in trials
            ],
            "proof": [
                {"scheme": str(each.scheme), "no_cure": each.before, "cured": each.after,
                 "difference": each.difference, "interval": each.interval}
                for each in self.proofs
            ],
        }  # fmt: skip

    @property
    def proved(self) -> Candidate:
        """What was best on the first text, which is kept or not."""
        return _best_of(self.trials)[0]

    @property
    def kept(self) -> bool:
        """Whether what was best on the first text stays: a cure, or grids that clip without one."""
        return _best_of(self.trials) == (self.best, self.schemes)

    @property
    def said(self) -> str:
        """What was chosen, and for which quantization."""
        chosen = str(self.best)
        if self.best == Candidate():
            chosen = "no cure: none is surely better than the model as it is, which stays so"
        return f"{chosen}; quantize by {', '.join(map(str, self.schemes))}"

    @property
    def headlines(self) -> list[str]:
        """Say what the best candidate changes in each format, on text that chose nothing."""
        kept = "" if self.kept else "; that is not sure enough to keep"
        uncured = self.proved == Candidate()
        now, then = ("clipped", "unclipped") if uncured else (f"after {self.proved}", "before")
        said: list[str] = []
        for each, first in zip(self.proofs, self.trials[0], strict=False):
            before, after = (with_interval(*cost, PROVING) for cost in (each.before, each.after))
            words = f"{after} nats a token {now} and {before} {then}, {_difference(each)}{kept}"
            if uncured and each.scheme == first.scheme:
                words = f"{before} nats a token: nothing tried was better"
            said.append(f"{each.scheme} costs {words}.")
        return said

    @property
    def sections(self) -> list[Section]:
        """The model before and after in each format, and every candidate that was measured."""
        after = str(self.proved) if self.proved != Candidate() else "the best grids"
        after += "" if self.kept else ", not kept"
        proofs = [
            [
                str(each.scheme),
                *(with_interval(*cost, PROVING, "+") for cost in (each.before, each.after)),
                _difference(each),
            ]
            for each in self.proofs
        ]
        tried = [
            [
                str(trials[0].candidate),
                *(
                    Cell(
                        with_interval(*each.damage, CHOOSING, "+"),
                        "" if each.scheme == first.scheme else str(each.scheme),
                    )
                    for each, first in zip(trials, self.trials[0], strict=True)
                ),
            ]
            for trials in self.trials
        ]
        return [
            Section("Before and after", [
                Table(["format", "no cure", after, "difference"], proofs,
                      "Nats a token that quantization costs", "figures"),
                Text(f"Loss over the model as it is in full precision, ± the {INTERVAL} over "
                     "sequences, on text that chose nothing. The difference is paired.", "note"),
            ], brief=True),
            Section("What was tried", [
                Table(["cure", *(str(each.scheme) for each in self.trials[0])], tried,
                      "Nats a token that every candidate costs, on the text that chose", "figures"),
            ]),
        ]  # fmt: skip


def _difference(proof: Proof) -> str:
    return describe_change(proof.difference[0], proof.interval)


def _best_of(trials: Sequence[tuple[Trial, ...]]) -> tuple[Candidate, tuple[Scheme, ...]]:
    """Return the candidate, and the formats as clipped, whose mean damage over formats is least."""
    least = min(trials, key=lambda each: sum(one.damage[0] for one in each))
    return least[0].candidate, tuple(each.scheme for each in least)


@dataclass(frozen=True)
class Texts:
    """Sequences (B, L) of token ids, and what an uncured model reads before each."""

    choosing: Tensor
    proving: Tensor
    calibrating: Tensor
    opening: tuple[int, ...] = ()
    rows: ClassVar[int] = CHOOSING + PROVING + CALIBRATING

    @classmethod
    def of(cls, rows: Tensor, opening: tuple[int, ...] = ()) -> "Texts":
        """Return `rows` sequences (B, L) by what is done with them."""
        choosing, proving, calibrating = rows.split([CHOOSING, PROVING, CALIBRATING])
        return cls(choosing, proving, calibrating, opening)

    @classmethod
    def spread(cls, tokens: Tensor, length: int, opening: tuple[int, ...] = ()) -> "Texts":
        """Return sequences of `length` of a text's tokens (N,), as far apart as it has room."""
        apart = len(tokens) // (cls.rows * length)
        whole = tokens[: len(tokens) // length * length].view(-1, length)
        return cls.of(whole[::apart][: cls.rows], opening)


def format_of(name: str) -> Scheme:
    """Return the scheme that a format's name or expression, as the user wrote it, stands for.

    A name leaves open how weights of few bits are rounded: by GPTQ then. An expression says it.
    """
    made = parse_scheme(_CALLED.get(name, name), imports=True)
    weights = made.weights
    if name.isidentifier() and made.method is None and weights and weights.bits <= _FEW_BITS:
        return replace(made, method=GPTQ)
    return made


def candidates(plain: Decoder, schemes: Sequence[Scheme], token: int | None) -> list[Candidate]:
    """Return what can be done to a model about its stream and its first token, no cure first."""
    grids = [grid for each in schemes for grid in (each.weights, each.inputs, each.outputs) if grid]
    blocks = {math.gcd(grid.group, plain.config.width) for grid in grids if grid.group} - {1}
    turns = [f"block_diagonal(size={size})" for size in sorted(blocks)] + ["hadamard"]
    firsts = [""] if token is None else ["", "prefix"]
    coarse = plain.embed.weight.dtype.itemsize < torch.float32.itemsize  # `cure` fits none there
    if token is not None and not coarse and _possible(surgery.check_absorbs, plain, "sinks"):
        firsts.append("sinks")
    turns = ["", *(each for each in turns if _possible(surgery.check_rotates, plain, each))]
    return [Candidate(rotate=turn, first=first) for turn in turns for first in firsts]


def _possible(check: Callable[..., object], *given: object) -> bool:
    try:
        check(*given)
    except WakefulError:
        return False
    return True


def further(best: Candidate, schemes: Sequence[Scheme]) -> list[Candidate]:
    """Return a candidate with rotations as the model runs besides, of what the formats round."""
    inner = [False, True] if any(each.weights is not None for each in schemes) else [False]
    keys = [False, True] if any(each.cache is not None for each in schemes) else [False]
    made = [replace(best, inner=one, keys=other) for one in inner for other in keys]
    return made[1:]


def clipped(scheme: Scheme, share: float) -> Scheme:
    """Return a scheme whose inputs and cache of few bits are clipped at a share of the largest."""

    def clip(grid: Grid | None) -> Grid | None:
        if isinstance(grid, Absmax) and grid.bits <= _FEW_BITS:
            return replace(grid, clip=share)
        return grid

    return replace(scheme, inputs=clip(scheme.inputs), cache=clip(scheme.cache))


def choose(
    plain: Decoder,
    schemes: Sequence[Scheme],
    texts: Texts,
    *,
    token: int | None,
    stock: bool = False,
    seed: int = 0,
    told: Callable[[str], None] = lambda _: None,
) -> Choice:
    """Return what is best done to a model before it is quantized by schemes, its head left alone.

    Args:
        plain: the decoder, which stays as it is.
        schemes: the formats; of several the least mean damage is best.
        texts: what is measured on.
        token: what a prefix stores and sinks are fitted to; None tries neither.
        stock: whether only cures are tried that leave one of Transformers' own architectures.
        seed: of the rotations.
        told: what each candidate is told to before it is measured.
    """
    return _Choosing(plain, tuple(schemes), texts, token, stock, seed, told).choose()


@dataclass
class _Choosing:
    """One model, formats and texts: makes candidates and measures them."""

    plain: Decoder
    schemes: tuple[Scheme, ...]
    texts: Texts
    token: int | None
    stock: bool
    seed: int
    told: Callable[[str], None]
    trials: list[tuple[Trial, ...]] = field(default_factory=list)
    full: dict[int, Tensor] = field(default_factory=dict)

    def choose(self) -> Choice:
        """Return what is best, and all that was measured."""
        self._round()
        for each in candidates(self.plain, self.schemes, self.token)[1:]:
            self._try(each, self.schemes)
        for each in further(self._best[0], self.schemes):
            self._try(each, self.schemes)
        for share in CLIPS:
            fine = tuple(clipped(each, share) for each in self.schemes)
            if fine != self.schemes:
                self._try(self._best[0], fine)
        best, schemes = self._best
        made, proofs = self._make(best), list[Proof]()
        gaps = torch.zeros(PROVING, dtype=torch.float64)
        for plain, scheme in zip(self.schemes, schemes, strict=True):
            before = after = self._damages(self.plain, Candidate(), plain, self.texts.proving)
            if (best, scheme) != (Candidate(), plain):
                after = self._damages(made, best, scheme, self.texts.proving)
            gaps += after - before
            found = (mean_and_error(each) for each in (before, after, after - before))
            proofs.append(Proof(scheme, *found))
        mean, error = mean_and_error(gaps)
        sure = interval(mean, error, PROVING)[1] < 0
        if not sure or any(each.difference[0] > 0 for each in proofs):
            best, schemes = Candidate(), self.schemes
        return Choice(best, schemes, tuple(self.trials), tuple(proofs))

    def _round(self) -> None:
        """Measure no cure; drop a format's method that loses more than rounding to nearest does."""
        self.told(str(Candidate()))
        found = list[list[Trial]]()
        for scheme in self.schemes:
            ways = dict.fromkeys([scheme, replace(scheme, method=None)])
            tried = [self._trial(self.plain, Candidate(), way) for way in ways]
            found.append(sorted(tried, key=lambda each: each.damage[0]))
        self.schemes = tuple(ways[0].scheme for ways in found)
        self.trials.append(tuple(ways[0] for ways in found))
        if any(len(ways) > 1 for ways in found):
            self.trials.append(tuple(ways[-1] for ways in found))

    @property
    def _best(self) -> tuple[Candidate, tuple[Scheme, ...]]:
        return _best_of(self.trials)

    def _make(self, candidate: Candidate) -> Decoder:
        return candidate.made(self.plain, self.texts.calibrating, self.token, self.seed)

    def _try(self, candidate: Candidate, schemes: Sequence[Scheme]) -> None:
        self.told(str(candidate))
        made = self._make(candidate)
        if self.stock and stock_architecture(made.config)[0] == WakefulConfig.model_type:
            return
        self.trials.append(tuple(self._trial(made, candidate, each) for each in schemes))

    def _trial(self, made: Decoder, candidate: Candidate, scheme: Scheme) -> Trial:
        found = self._damages(made, candidate, scheme, self.texts.choosing)
        return Trial(candidate, scheme, mean_and_error(found))

    def _damages(self, made: Decoder, candidate: Candidate, scheme: Scheme, text: Tensor) -> Tensor:
        """Return what a candidate in a format costs each sequence, in nats a token."""
        before = () if candidate.first else self.texts.opening
        given = [surgery.prepend_tokens(before, row[None]) for row in self.texts.calibrating]
        skip = (HEAD,) if scheme.weights is not None else ()
        small = quantize_module(
            made, scheme, arithmetic="integer", skip=skip,
            calibration=given if scheme.calibrated else (),
        )  # fmt: skip
        if id(text) not in self.full:
            self.full[id(text)] = _losses(self.plain, text, self.texts.opening)
        return (_losses(small, text, before) - self.full[id(text)]).cpu()


def _losses(model: nn.Module, text: Tensor, opening: Sequence[int]) -> Tensor:
    """Return the mean loss (B,) of each sequence's tokens after its first, in float64."""
    losses = surgery.window_losses(model, text, opening)
    return torch.tensor(losses, dtype=torch.float64, device=text.device)
