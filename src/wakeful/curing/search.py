"""Search for the cure that helps a number format: measure candidates, prove the best on new text.

A candidate combines a rotation of the residual stream (none, within the format's blocks, or of the
full width), online rotations, and a sink cure (none, a stored prefix or learned sinks). Its cost is
the loss of the cured and quantized model minus that of the uncured model in full precision, in nats
per token on the same tokens. The cheapest candidate is kept if, on new text, the 95% interval of
its paired difference from the uncured model in the same format lies below zero. Otherwise the
choice is no cure.

Each cost is measured with the rounding method that the model will be quantized by: a rotation moves
weights off a grid that they may lie on, which raises the cost of rounding to nearest, not GPTQ's.
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
    confidence_interval,
    describe_change,
    format_interval,
    mean_and_error,
)
from wakeful.hf.configuration import WakefulConfig
from wakeful.hf.weights_out import stock_architecture
from wakeful.model.decoder import Decoder
from wakeful.quantization import Absmax, Gptq, Grid, Scheme, parse_scheme, quantize_module
from wakeful.reports.value import Cell, Section, Table, Text

NUM_SEARCH, NUM_PROOF = 8, 16
"""Numbers of sequences to measure candidates on, and to prove the best one on."""
SEARCH_LENGTH = 256
"""Tokens of each, or the model's context where that is shorter."""
NUM_CALIBRATION = 8
"""Number of sequences to calibrate rounding and to fit sinks on."""
SEARCH_SPREAD = 8
"""Largest distance between sequences, in sequence lengths: GPTQ calibrated on an article does
best on that article's next lines, so that adjacent sequences would flatter it."""
CLIPS = (0.9, 0.8)
"""Clipping thresholds to try for inputs and caches of few bits, as shares of the maximum."""
GPTQ = Gptq()
"""Rounding method of weights of few bits, in a format given by its name."""
_FEW_BITS = 4
HEAD = "head"
_SCHEME_NAMES = {"int8": "w8a8"}
"""Scheme names of formats that are called otherwise."""


@dataclass(frozen=True)
class Candidate:
    """Changes to a model before quantization; `Candidate()` is no cure."""

    rotate: str = ""
    inner: bool = False
    keys: bool = False
    sink_cure: str = ""
    """Removal of the attention sink: "" (it stays), "prefix" (stored) or "sinks" (learned)."""

    def __str__(self) -> str:
        """Return the changes as words, such as "rotate hadamard, rotate_keys, prefix"."""
        parts = [f"rotate {self.rotate}"] if self.rotate else []
        if self.inner:
            parts.append("rotate_inner")
        if self.keys:
            parts.append("rotate_keys")
        if self.sink_cure:
            parts.append(self.sink_cure)
        return ", ".join(parts) or "no cure"

    def apply(
        self, plain: Decoder, calibration: Tensor, token: int | None, seed: int = 0
    ) -> Decoder:
        """Return a copy of the decoder with this candidate's changes; `plain` itself for no cure.

        Args:
            plain: the uncured decoder, which stays as it is.
            calibration: sequences (B, L) to fit sinks on.
            token: the id that a prefix stores and that sinks are fitted to.
            seed: for the rotations.
        """
        decoder = plain
        if self.sink_cure == "sinks":
            assert token is not None
            decoder = surgery.learned_sinks(decoder, token, calibration)
        if self.rotate or self.inner:  # "identity": inner channels alone are rotated
            decoder = surgery.rotate(
                decoder, self.rotate or "identity", inner=self.inner, seed=seed
            )
        if self.keys:
            decoder = surgery.rotate_keys(decoder)
        if self.sink_cure == "prefix":  # last: its keys and values are the rotated decoder's
            assert token is not None
            decoder = surgery.store_prefix(decoder, [token])
        return decoder


@dataclass(frozen=True)
class FormatTrial:
    """Cost of a candidate in one format, over the uncured model in full precision."""

    candidate: Candidate
    scheme: Scheme
    damage: Estimate
    """Nats per token, paired over sequences."""


@dataclass(frozen=True)
class Proof:
    """Costs of no cure and of the best candidate in one format, on text the search did not use."""

    scheme: Scheme
    before: Estimate
    after: Estimate
    difference: Estimate
    """After minus before, paired."""

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% confidence interval of the difference."""
        return confidence_interval(*self.difference, NUM_PROOF)


@dataclass(frozen=True)
class CureChoice:
    """The cure chosen for number formats, with every measurement of the search."""

    best: Candidate
    schemes: tuple[Scheme, ...]
    """The formats, with the best clipping."""
    trials: tuple[tuple[FormatTrial, ...], ...]
    """For each candidate, no cure first: one trial per format."""
    proofs: tuple[Proof, ...]
    """For each format, of the winner of the search, kept or not."""

    @property
    def summary(self) -> dict[str, Any]:
        """All measurements as a table for JSON: estimates are pairs of value and standard error."""
        return {
            "chosen": str(self.best),
            "schemes": [scheme.expression for scheme in self.schemes],
            "candidates": [
                {"scheme": str(trial.scheme), "cure": str(trial.candidate), "damage": trial.damage}
                for trials in self.trials for trial in trials
            ],
            "proof": [
                {"scheme": str(proof.scheme), "no_cure": proof.before, "cured": proof.after,
                 "difference": proof.difference, "interval": proof.interval}
                for proof in self.proofs
            ],
        }  # fmt: skip

    @property
    def winner(self) -> Candidate:
        """The candidate of least mean cost in the search, whether it was then chosen or not."""
        return _find_cheapest(self.trials)[0]

    @property
    def is_kept(self) -> bool:
        """True if the winner of the search was chosen: new text proved that it is better, or it is
        the model as it is.
        """
        return _find_cheapest(self.trials) == (self.best, self.schemes)

    @property
    def description(self) -> str:
        """Words that name the chosen cure and the schemes to quantize by."""
        chosen = str(self.best)
        if self.best == Candidate():
            chosen = "no cure: none is surely better than the model as it is"
        return f"{chosen}; quantize by {', '.join(map(str, self.schemes))}"

    @property
    def headlines(self) -> list[str]:
        """A sentence for each format: what quantization costs the uncured model and the search's
        winner, on text that the search did not use.
        """
        verdict = "" if self.is_kept else "; that is not sure enough to keep"
        has_cure = self.winner != Candidate()
        label_before, label_after = "before", f"after {self.winner}"
        if not has_cure:  # the winner then differs at most by the clipping of a format's grids
            label_before, label_after = "unclipped", "clipped"
        sentences: list[str] = []
        for proof, uncured_trial in zip(self.proofs, self.trials[0], strict=True):
            before = format_interval(*proof.before, NUM_PROOF)
            after = format_interval(*proof.after, NUM_PROOF)
            is_clipped = proof.scheme != uncured_trial.scheme
            if not has_cure and not is_clipped:
                text = f"{before} nats per token: nothing tried was better"
            else:
                text = (
                    f"{after} nats per token {label_after} and {before} {label_before}, "
                    f"{_format_difference(proof)}{verdict}"
                )
            sentences.append(f"{proof.scheme} costs {text}.")
        return sentences

    @property
    def sections(self) -> list[Section]:
        """Two tables of costs: of no cure and the search's winner in each format, on new text; and
        of every candidate on the search's text.
        """
        winner_label = str(self.winner)
        if self.winner == Candidate():  # no cure, at most clipped grids
            winner_label = "the best grids"
        if not self.is_kept:
            winner_label += ", not kept"
        proof_rows = [
            [
                str(proof.scheme),
                format_interval(*proof.before, NUM_PROOF, "+"),
                format_interval(*proof.after, NUM_PROOF, "+"),
                _format_difference(proof),
            ]
            for proof in self.proofs
        ]
        uncured_trials = self.trials[0]
        candidate_rows: list[list[Cell | str]] = []
        for trials in self.trials:
            cells: list[Cell | str] = [str(trials[0].candidate)]
            for trial, uncured_trial in zip(trials, uncured_trials, strict=True):
                own_scheme = ""
                if trial.scheme != uncured_trial.scheme:  # clipped, or of another rounding method
                    own_scheme = str(trial.scheme)
                cells.append(Cell(format_interval(*trial.damage, NUM_SEARCH, "+"), own_scheme))
            candidate_rows.append(cells)
        return [
            Section("Before and after", [
                Table(["format", "no cure", winner_label, "difference"], proof_rows,
                      "Nats per token that quantization costs", "figures"),
                Text(f"Loss minus that of the uncured model in full precision, ± the {INTERVAL} "
                     "over sequences, on new text. The difference is paired.", "note"),
            ], brief=True),
            Section("What was tried", [
                Table(["cure", *(str(trial.scheme) for trial in uncured_trials)], candidate_rows,
                      "Cost of every candidate on the search's text, nats per token", "figures"),
            ]),
        ]  # fmt: skip


def _format_difference(proof: Proof) -> str:
    return describe_change(proof.difference[0], proof.interval)


def _find_cheapest(
    trials: Sequence[tuple[FormatTrial, ...]],
) -> tuple[Candidate, tuple[Scheme, ...]]:
    """Return the candidate with the least cost, summed over formats, and its schemes (with their
    clipping); `trials` has a tuple for each candidate, with a trial per format.
    """

    def total_cost(candidate_trials: tuple[FormatTrial, ...]) -> float:
        return sum(trial.damage[0] for trial in candidate_trials)

    cheapest = min(trials, key=total_cost)
    return cheapest[0].candidate, tuple(trial.scheme for trial in cheapest)


@dataclass(frozen=True)
class SearchTexts:
    """Sequences (B, L) of token ids for the search of a cure, by their use."""

    search: Tensor
    """To measure candidates on."""
    proof: Tensor
    """To prove the best candidate on."""
    calibration: Tensor
    """To calibrate rounding and to fit sinks on."""
    opening: tuple[int, ...] = ()
    """Tokens that an uncured model reads before each sequence."""
    num_rows: ClassVar[int] = NUM_SEARCH + NUM_PROOF + NUM_CALIBRATION

    @classmethod
    def split(cls, sequences: Tensor, opening: tuple[int, ...] = ()) -> "SearchTexts":
        """Split `num_rows` sequences (B, L) into those for search, proof and calibration."""
        search, proof, calibration = sequences.split([NUM_SEARCH, NUM_PROOF, NUM_CALIBRATION])
        return cls(search, proof, calibration, opening)

    @classmethod
    def spread(cls, tokens: Tensor, length: int, opening: tuple[int, ...] = ()) -> "SearchTexts":
        """Cut `num_rows` sequences of `length` tokens, evenly spread over a text's tokens (N,), and
        split them by their use. The text must have enough tokens for them. The uncured model reads
        the tokens `opening` before each sequence.
        """
        stride = len(tokens) // (cls.num_rows * length)  # counted in sequences
        sequences = tokens[: len(tokens) // length * length].view(-1, length)
        return cls.split(sequences[::stride][: cls.num_rows], opening)


def parse_format(name: str) -> Scheme:
    """Parse a number format's name ("nvfp4") or a scheme expression ("nvfp4(method=gptq)").

    A name says nothing of the rounding method: weights of at most 4 bits are then rounded by GPTQ.
    An expression keeps the method that it names, or none.
    """
    scheme = parse_scheme(_SCHEME_NAMES.get(name, name), imports=True)
    weights = scheme.weights
    is_name = name.isidentifier()
    if is_name and scheme.method is None and weights and weights.bits <= _FEW_BITS:
        return replace(scheme, method=GPTQ)
    return scheme


def list_candidates(
    plain: Decoder, schemes: Sequence[Scheme], token: int | None
) -> list[Candidate]:
    """Return a candidate for every pair of a residual rotation and a sink cure that the decoder
    allows, no cure first.

    Rotations are Hadamard's, of the full width and within the formats' blocks. `token` is the id
    that a prefix stores and that sinks are fitted to; None tries neither.
    """
    grids = [
        grid
        for scheme in schemes
        for grid in (scheme.weights, scheme.inputs, scheme.outputs)
        if grid
    ]
    # A rotation within a format's groups does not spread an outlier beyond its own scale. The gcd
    # makes blocks divide the width; blocks of 1 would rotate nothing.
    block_sizes = {math.gcd(grid.group, plain.config.width) for grid in grids if grid.group} - {1}
    all_rotations = [f"block_diagonal(size={size})" for size in sorted(block_sizes)] + ["hadamard"]
    possible_rotations = [
        rotation for rotation in all_rotations if _passes(surgery.check_rotates, plain, rotation)
    ]
    sink_cures = [""] if token is None else ["", "prefix"]
    is_16_bit = plain.embed.weight.dtype.itemsize < torch.float32.itemsize
    # Weights of 16 bits are too coarse to fit sinks with.
    if token is not None and not is_16_bit and _passes(surgery.check_replaceable, plain):
        sink_cures.append("sinks")
    return [
        Candidate(rotate=rotation, sink_cure=sink_cure)
        for rotation in ["", *possible_rotations]
        for sink_cure in sink_cures
    ]


def _passes(check: Callable[..., object], *arguments: object) -> bool:
    """Tell whether a check returns without a `WakefulError`."""
    try:
        check(*arguments)
    except WakefulError:
        return False
    return True


def add_online_rotations(candidate: Candidate, schemes: Sequence[Scheme]) -> list[Candidate]:
    """Return the candidate with each online rotation that the formats could gain from, and with
    both. Rotated inner channels help quantized weights, unless a scheme rotates the inputs of every
    layer itself; rotated keys help a quantized cache.
    """
    quantizes_weights = any(scheme.weights is not None for scheme in schemes)
    rotates_inputs = any(scheme.rotation for scheme in schemes)
    quantizes_cache = any(scheme.cache is not None for scheme in schemes)
    combinations = [
        replace(candidate, inner=inner, keys=keys)
        for inner in ([False, True] if quantizes_weights and not rotates_inputs else [False])
        for keys in ([False, True] if quantizes_cache else [False])
    ]
    return combinations[1:]  # without the first, which has neither


def clip_scheme(scheme: Scheme, share: float) -> Scheme:
    """Return the scheme with inputs and cache clipped at a share of their maximum, where they have
    at most 4 bits; equal to `scheme` if neither has.
    """

    def clip(grid: Grid | None) -> Grid | None:
        if isinstance(grid, Absmax) and grid.bits <= _FEW_BITS:  # other grids cannot clip
            return replace(grid, clip=share)
        return grid

    return replace(scheme, inputs=clip(scheme.inputs), cache=clip(scheme.cache))


def choose_cure(
    plain: Decoder,
    schemes: Sequence[Scheme],
    texts: SearchTexts,
    *,
    token: int | None,
    stock: bool = False,
    seed: int = 0,
    on_progress: Callable[[str], None] = lambda _: None,
) -> CureChoice:
    """Choose the cure for a model that is then quantized by `schemes`, all but its head.

    The candidate of least cost is chosen if new text proves that it is better than no cure;
    otherwise the choice is no cure.

    Args:
        plain: the uncured decoder, which stays as it is.
        schemes: the number formats; over several, the mean cost decides.
        texts: the sequences to measure on.
        token: the id that a prefix stores and sinks are fitted to; None tries neither.
        stock: try only cures after which the model still has one of Transformers' own
            architectures.
        seed: for the rotations.
        on_progress: called with each candidate's name before it is measured.
    """
    return _Search(plain, tuple(schemes), texts, token, stock, seed, on_progress).choose()


@dataclass
class _Search:
    """Search state: the model, the formats, the texts and the trials so far."""

    plain: Decoder
    schemes: tuple[Scheme, ...]
    texts: SearchTexts
    token: int | None
    stock: bool
    seed: int
    on_progress: Callable[[str], None]
    trials: list[tuple[FormatTrial, ...]] = field(default_factory=list)
    uncured_losses: dict[int, Tensor] = field(default_factory=dict)
    """Losses (B,) of the uncured model in full precision, by the `id` of the text."""

    def choose(self) -> CureChoice:
        """Measure all candidates; return the best if new text proves it, else no cure.

        On the new text, the whole 95% interval of its difference from no cure, summed over formats,
        must lie below zero, and its mean cost may be higher in no format.
        """
        self._measure_uncured()
        for candidate in list_candidates(self.plain, self.schemes, self.token)[1:]:
            self._try(candidate, self.schemes)
        # Online rotations and clipping are tried with the best so far alone.
        for candidate in add_online_rotations(self._best[0], self.schemes):
            self._try(candidate, self.schemes)
        for share in CLIPS:
            clipped_schemes = tuple(clip_scheme(scheme, share) for scheme in self.schemes)
            if clipped_schemes != self.schemes:
                self._try(self._best[0], clipped_schemes)
        best, schemes = self._best
        cured = self._apply(best)
        proofs = list[Proof]()
        total_change = torch.zeros(NUM_PROOF, dtype=torch.float64)  # of each sequence
        for unclipped, scheme in zip(self.schemes, schemes, strict=True):
            before = self._measure_costs(self.plain, Candidate(), unclipped, self.texts.proof)
            if best == Candidate() and scheme == unclipped:  # that is what `before` measures
                after = before
            else:
                after = self._measure_costs(cured, best, scheme, self.texts.proof)
            total_change += after - before
            estimates = (mean_and_error(costs) for costs in (before, after, after - before))
            proofs.append(Proof(scheme, *estimates))
        mean, error = mean_and_error(total_change)
        is_better = confidence_interval(mean, error, NUM_PROOF)[1] < 0
        if not is_better or any(proof.difference[0] > 0 for proof in proofs):
            best, schemes = Candidate(), self.schemes
        return CureChoice(best, schemes, tuple(self.trials), tuple(proofs))

    def _measure_uncured(self) -> None:
        """Measure the uncured model in every format, with the format's rounding method and by
        rounding to nearest, and add the trials.

        `schemes` gets the cheaper of the two for each format; the search goes on with it.
        """
        self.on_progress(str(Candidate()))
        trials_by_format = list[list[FormatTrial]]()  # for each format, the cheaper trial first
        for scheme in self.schemes:
            to_nearest = replace(scheme, method=None)
            schemes = dict.fromkeys([scheme, to_nearest])  # one if the format has no method
            trials = [self._measure(self.plain, Candidate(), tried) for tried in schemes]
            trials_by_format.append(sorted(trials, key=lambda trial: trial.damage[0]))
        self.schemes = tuple(trials[0].scheme for trials in trials_by_format)
        self.trials.append(tuple(trials[0] for trials in trials_by_format))
        if any(len(trials) > 1 for trials in trials_by_format):
            # A second row of the table; a format without a method repeats its one trial there.
            self.trials.append(tuple(trials[-1] for trials in trials_by_format))

    @property
    def _best(self) -> tuple[Candidate, tuple[Scheme, ...]]:
        """The cheapest candidate so far, and its schemes."""
        return _find_cheapest(self.trials)

    def _apply(self, candidate: Candidate) -> Decoder:
        return candidate.apply(self.plain, self.texts.calibration, self.token, self.seed)

    def _try(self, candidate: Candidate, schemes: Sequence[Scheme]) -> None:
        """Measure a candidate in every format and add its trials.

        With `stock`, skip a candidate that only our own model class can hold.
        """
        self.on_progress(str(candidate))
        cured = self._apply(candidate)
        model_type, _ = stock_architecture(cured.config)
        if self.stock and model_type == WakefulConfig.model_type:
            return
        self.trials.append(tuple(self._measure(cured, candidate, scheme) for scheme in schemes))

    def _measure(self, decoder: Decoder, candidate: Candidate, scheme: Scheme) -> FormatTrial:
        """Measure the mean cost of a candidate, which `decoder` has, in one format."""
        costs = self._measure_costs(decoder, candidate, scheme, self.texts.search)
        return FormatTrial(candidate, scheme, mean_and_error(costs))

    def _measure_costs(
        self, decoder: Decoder, candidate: Candidate, scheme: Scheme, text: Tensor
    ) -> Tensor:
        """Return the cost (B,) of a candidate in a format on each sequence of a text (B, L): the
        loss of the quantized decoder minus that of the uncured model in full precision, in nats per
        token.

        `decoder` is the plain decoder with the candidate's changes, not yet quantized.
        """
        opening = self.texts.opening
        if candidate.sink_cure:  # the stored prefix or the sinks take the opening's place
            opening = ()
        calibration = [
            surgery.prepend_tokens(opening, sequence[None]) for sequence in self.texts.calibration
        ]
        # The head stays in full precision; a scheme of the cache alone has no layers to skip.
        skip = (HEAD,) if scheme.weights is not None else ()
        quantized = quantize_module(
            decoder, scheme, skip=skip,
            calibration=calibration if scheme.calibrated else (),
        )  # fmt: skip
        if id(text) not in self.uncured_losses:  # once for each text
            self.uncured_losses[id(text)] = _mean_losses(self.plain, text, self.texts.opening)
        return (_mean_losses(quantized, text, opening) - self.uncured_losses[id(text)]).cpu()


def _mean_losses(model: nn.Module, text: Tensor, opening: Sequence[int]) -> Tensor:
    """Return the mean loss (B,) of each sequence of a text (B, L) in float64, over all its tokens
    but the first. The model reads the tokens `opening` before each sequence.
    """
    # One at a time: a quantized model's scales must not depend on other sequences.
    losses = surgery.losses_after_opening(model, text, opening, together=1)
    return torch.tensor(losses, dtype=torch.float64, device=text.device)
