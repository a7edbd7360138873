"""Measures that several exhibits need: of a run, of a run and its baseline, of all groups."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from wakeful.errors import WakefulError
from wakeful.variants import build_call
from wakeful_papers.exhibits.figures import DOMAIN, Curve, SeenRow

RowKey = tuple[str, str, int]
"""Group, row and seed."""


@dataclass(frozen=True)
class Results:
    """All that an exhibit's runs came to."""

    baseline: str
    places: Mapping[str, float]
    """Where each group stands on the axis of groups, for those that stand anywhere."""
    seen: Mapping[RowKey, SeenRow]
    diverged: tuple[str, ...] = ()
    """The runs that are missing because they diverged, and how."""

    @cached_property
    def groups(self) -> tuple[str, ...]:
        """The groups that have runs, in order."""
        return tuple(dict.fromkeys(group for group, _, _ in self.seen))

    @cached_property
    def rows(self) -> tuple[str, ...]:
        """The rows that have runs, in order."""
        return tuple(dict.fromkeys(row for _, row, _ in self.seen))

    @cached_property
    def seeds(self) -> tuple[int, ...]:
        """The seeds, in order."""
        return tuple(sorted({seed for _, _, seed in self.seen}))


@dataclass(frozen=True)
class At:
    """One row of the results, with one seed."""

    results: Results
    group: str
    row: str
    seed: int

    @property
    def seen(self) -> SeenRow:
        """What it came to."""
        return self.results.seen[self.group, self.row, self.seed]

    def curve(self, name: str) -> Curve | None:
        """Return one of its curves, if it was measured."""
        return self.seen.curves.get(name)

    def of(self, *, group: str | None = None, row: str | None = None) -> "At | None":
        """Return another row or group with the same seed, if it has been run."""
        other = At(self.results, self.group if group is None else group, row or self.row, self.seed)
        return other if (other.group, other.row, other.seed) in self.results.seen else None

    @property
    def base(self) -> "At | None":
        """The baseline of the same group."""
        return self.of(row=self.results.baseline)

    def both(self, name: str) -> tuple[Curve, Curve] | None:
        """Return a curve and the baseline's, where both were measured and have points."""
        ours, base = self.curve(name), self.base
        theirs = base.curve(name) if base else None
        return (ours, theirs) if ours and theirs and len(ours[1]) and len(theirs[1]) else None


Measure = Callable[..., float | None]


def figure_of(results: Results, group: str, row: str, seed: int, expression: str) -> float | None:
    """Return a figure of one row with one seed: a plain one, or one of `DERIVED` with its options.

    None where it was not run or not measured.

    Raises:
        WakefulError: the expression is neither a name nor a derived measure.
    """
    at = At(results, group, row, seed)
    if (group, row, seed) not in results.seen:
        return None
    if expression.isidentifier() and expression not in DERIVED:
        return at.seen.figures.get(expression)
    return build_call("figure", DERIVED, expression)(at)


def check_figure(expression: str) -> None:
    """Raise `WakefulError` where an expression is neither a name nor a derived measure."""
    if not expression.isidentifier() or expression in DERIVED:
        build_call("figure", DERIVED, expression)


def smoothed(values: np.ndarray) -> np.ndarray:
    """Return the means over windows of 100 values, or of 10 where there are fewer than 1,000.

    Section 4.1.1 of Value Residual Learning: "a window size of 10 steps or 100 steps". As in its
    code (analyze/plot_relative_loss.py) windows are whole, and the first begins with the first
    value: there are as many fewer means as a window has values less one.
    """
    return np.convolve(values, np.ones(window := _window(values)) / window, mode="valid")


def _window(values: np.ndarray) -> int:
    return min(len(values), 100 if len(values) >= 1000 else 10)


def relative(at: At) -> Curve | None:
    """Return the smoothed training loss minus the baseline's, where windows of both begin.

    The baseline itself has none.
    """
    if at.row == at.results.baseline or (curves := at.both("train_loss")) is None:
        return None
    ours, theirs = curves
    steps, mine, other = np.intersect1d(ours[0], theirs[0], return_indices=True)
    if not len(steps):
        return None
    differences = smoothed(ours[1][mine] - theirs[1][other])
    return steps[: len(differences)], differences


def train_loss(at: At, *, last: int = 50) -> float | None:
    """Return the mean training loss of the last steps (fig. 5 of Value Residual Learning: 50)."""
    curve = at.curve("train_loss")
    return float(curve[1][-last:].mean()) if curve and len(curve[1]) else None


def crossing(at: At, *, predicted: bool = False, bound: bool = False) -> float | None:
    """Return the step from which the smoothed training loss is never below the baseline's again.

    The critical point of Value Residual Learning, fig. 14. A row that ends below the baseline was
    not overtaken and has none, so that two such rows are not found to agree. With `predicted` it is
    then where the straight line through the last tenth of the differences reaches zero, the paper's
    1,000 of 10,000, if that line rises; with `bound` where the last window begins, which says
    who is overtaken later where one of two is overtaken. The baseline itself has none.
    """
    if (curve := relative(at)) is None:
        return None
    steps, differences = curve
    below = np.flatnonzero(differences < 0)
    if not len(below):
        return float(steps[0])
    if below[-1] + 1 < len(steps):
        return float(steps[below[-1] + 1])
    if predicted and len(steps) > 1:
        last = max(2, len(steps) // 10)
        slope, start = np.polyfit(steps[-last:], differences[-last:], 1)
        if slope > 0:
            return max(float(steps[-1]), float(-start / slope))
    return float(steps[-1]) if bound else None


def overtaken(at: At) -> float | None:
    """Return whether the baseline overtakes a row, 1 or 0: whether it has a `crossing`."""
    return None if relative(at) is None else float(crossing(at) is not None)


def ahead(at: At, *, first: float = 1.0) -> float | None:
    """Return the share of the steps at which the smoothed training loss is below the baseline's.

    Of all steps, or of the share of them that comes `first`.
    """
    if (curve := relative(at)) is None:
        return None
    return float((curve[1][: max(1, round(first * len(curve[1])))] < 0).mean())


def over_baseline(at: At, *, figure: str = "loss") -> float | None:
    """Return a row's figure over the baseline's in the same group."""
    base = at.base
    ours = figure_of(at.results, at.group, at.row, at.seed, figure)
    theirs = base and figure_of(at.results, base.group, base.row, at.seed, figure)
    return ours / theirs if ours is not None and theirs else None


def exponent(at: At, *, figure: str) -> float | None:
    """Return k of figure ∝ place^k over the groups: the slope of its logarithm over the place's.

    By least squares through all groups that stand on the axis; it needs three.
    """
    found = [
        (place, value)
        for group, place in at.results.places.items()
        if (value := figure_of(at.results, group, at.row, at.seed, figure)) is not None
    ]
    if len(found) < 3 or min(min(pair) for pair in found) <= 0:
        return None
    places, values = np.log(found).T
    away = places - places.mean()
    return float(away @ (values - values[0]) / (away @ away))


def mean_domain_loss(at: At) -> float | None:
    """Return the mean of the losses of a mixture's domains, each counted alike.

    The average of Value Residual Learning, table 5. A text without domains is one.
    """
    figures = at.seen.figures
    losses = [value for name, value in figures.items() if name.startswith(DOMAIN)]
    return sum(losses) / len(losses) if losses else figures.get("loss")


def data_saving(at: At) -> float | None:
    """Return the share of the steps saved: 1 − the first step with the baseline's last loss / all.

    Both curves are smoothed training losses. Of a row that ends above the baseline it is what the
    baseline saves beside it, negative. So two rows that differ by chance alone have a mean of 0.
    """
    if (curves := at.both("train_loss")) is None:
        return None
    ours, theirs = ((steps[_window(losses) - 1 :], smoothed(losses)) for steps, losses in curves)
    if ours[1][-1] <= theirs[1][-1]:
        return _share_left(ours, theirs[1][-1])
    return -_share_left(theirs, ours[1][-1])


def _share_left(curve: Curve, loss: float) -> float:
    """Return the share of a curve's steps that are left when it first has a loss."""
    steps, losses = curve
    return 1.0 - float(steps[np.flatnonzero(losses <= loss)[0]]) / float(steps[-1])


def parameter_saving(at: At, *, figure: str = "loss", groups: Sequence[str] = ()) -> float | None:
    """Return the share of parameters saved at equal loss, by a fit over the groups' sizes.

    With b of L = a − b ln N through the baseline's runs of all seeds, and Δ the mean over sizes of
    the row's loss minus the baseline's with this seed, the row's line lies Δ lower and so is the
    baseline's at N' = N exp(−Δ / b): 1 − N / N' is saved. On the losses that table 5 of Value
    Residual Learning prints this is the paper's 10.4%. It needs two sizes, all of them or those of
    `groups`.

    One b serves all seeds: with a b of each, those in which chance turns the small slope would have
    to be left out, and the others are a selection. Its own error is not counted. Where N' is as far
    from N as the smallest size from the largest, or farther, nothing was saved that these sizes can
    tell: so it is where losses hardly fall with the size.
    """
    base, among = at.results.baseline, groups or at.results.groups
    sizes: list[float] = []
    losses: list[float] = []
    differences: list[float] = []
    for group in among:
        for seed in at.results.seeds:
            loss = figure_of(at.results, group, base, seed, figure)
            if loss is None:
                continue
            sizes.append(at.results.seen[group, base, seed].figures["parameters"])
            losses.append(loss)
            own = figure_of(at.results, group, at.row, seed, figure)
            if seed == at.seed and own is not None:
                differences.append(own - loss)
    if len(set(sizes)) < 2 or len(differences) < 2:
        return None
    slope = float(np.polyfit(np.log(sizes), losses, 1)[0])
    if slope >= 0:  # no more parameters, no lower loss: there is nothing to read a size from
        return None
    apart = -float(np.mean(differences)) / slope  # ln N / N'
    return 1.0 - math.exp(apart) if abs(apart) < math.log(max(sizes) / min(sizes)) else None


def loss_over_training(at: At, *, curve: str = "validation_loss") -> float | None:
    """Return the mean validation loss over training: the lower, the faster a row converges.

    It is of the steps, the start left out, at which all rows of its group were evaluated that
    train for as many. `curve` is "train_loss" for the batches' own.
    """
    rows = [found for row in at.results.rows if (found := at.of(row=row))]
    own = at.curve(curve)
    if own is None or not len(own[0]):
        return None
    shared = own[0][own[0] > 0]
    for row in rows:
        theirs = row.curve(curve)
        if theirs is not None and len(theirs[0]) and theirs[0][-1] == own[0][-1]:
            shared = np.intersect1d(shared, theirs[0])
    return float(own[1][np.isin(own[0], shared)].mean()) if len(shared) else None


def loss_after(at: At, *, share: float) -> float | None:
    """Return the validation loss after a share of a row's steps, if it was evaluated there."""
    own = at.curve("validation_loss")
    if own is None or not len(own[0]):
        return None
    there = np.flatnonzero(own[0] == round(share * float(own[0][-1])))
    return float(own[1][there[0]]) if len(there) else None


def gains(at: At, *, figure: str, of: Sequence[str], than: Sequence[str]) -> float | None:
    """Return how much more a figure gains between two groups than between two others.

    With `of` = (a, b) and `than` = (c, d): (a − b) − (c − d), of the same row and seed.
    """
    found = _known(figure_of(at.results, each, at.row, at.seed, figure) for each in (*of, *than))
    return (found[0] - found[1]) - (found[2] - found[3]) if found else None


def _known(values: Iterable[float | None]) -> list[float]:
    """Return values if all were measured; none where one was not."""
    found = list(values)
    known = [value for value in found if value is not None]
    return known if len(known) == len(found) else []


def _part(values: np.ndarray, part: str) -> np.ndarray:
    """Return the values of all layers, of their first half ("early") or last ("late"), or of the
    k-th of n equal runs of them, "k/n".
    """
    half = len(values) // 2
    named = {"all": values, "early": values[:half], "late": values[half:]}
    if part in named:
        return named[part]
    run = re.fullmatch(r"([1-9]\d?)/([1-9]\d?)", part)
    if run is None or int(run[1]) > int(run[2]):
        raise WakefulError(f"part must be all, early, late or one like 1/3, got {part!r}")
    number, runs = int(run[1]), int(run[2])
    return values[round((number - 1) * len(values) / runs) : round(number * len(values) / runs)]


def layers(
    at: At, *, metric: str, variant: str = "paper", position: str = "all", part: str = "all"
) -> float | None:
    """Return the mean of a metric over a part of the layers (`_part`).

    Of ranks over a run of layers that is AvgRank (When Attention Collapses, section 2.1).
    """
    chosen = _chosen(at, f"{metric}/{variant}/{position}", part)
    return float(chosen.mean()) if len(chosen) else None


def _chosen(at: At, name: str, part: str) -> np.ndarray:
    """Return a curve's values in a part of the layers; none where it was not measured."""
    curve = at.curve(name)
    return np.zeros(0) if curve is None else _part(curve[1], part)


def deepening(
    at: At, *, metric: str, variant: str = "paper", part: str = "late", than: str = "early"
) -> float | None:
    """Return a metric's mean over a part of the layers minus that over another: the halves."""
    late, early = (layers(at, metric=metric, variant=variant, part=each) for each in (part, than))
    return None if late is None or early is None else late - early


def lazy_layers(at: At) -> float | None:
    """Return the share of layers in which no head's rank is above 2."""
    ranks = _chosen(at, "rank/paper/all", "all")
    return float((ranks <= 2).mean()) if len(ranks) else None


def layers_above(
    at: At, *, metric: str, variant: str = "paper", position: str = "all"
) -> float | None:
    """Return the share of layers in which a metric is above the baseline's."""
    curves = at.both(f"{metric}/{variant}/{position}")
    if curves is None or len(curves[0][1]) != len(curves[1][1]):
        return None
    return float((curves[0][1] > curves[1][1]).mean())


def extreme(
    at: At, *, metric: str, position: str = "first", part: str = "all", least: bool = False
) -> float | None:
    """Return the largest of a metric over a part of the layers (`_part`), or the least."""
    chosen = _chosen(at, f"{metric}/paper/{position}", part)
    if not len(chosen):
        return None
    return float(chosen.min() if least else chosen.max())


def where_least(at: At, *, metric: str, of: str) -> float | None:
    """Return a metric in the layer where another is least, the first such layer."""
    found = _beside(at, f"{metric}/paper/all", f"{of}/paper/all")
    return float(found[0][found[1].argmin()]) if found else None


def swings(at: At, *, metric: str, shape: str, variant: str = "paper") -> float | None:
    """Return how much of a W or an M a metric draws over the layers: 0, none, to 1.

    The four swings of a W are down, up, down, up. Of all five layers, in order, those count between
    which the least swing is largest, and it is that over the curve's range.

    Raises:
        WakefulError: `shape` is neither W nor M.
    """
    if shape not in ("W", "M"):
        raise WakefulError(f"shape must be W or M, got {shape!r}")
    values = _chosen(at, f"{metric}/{variant}/all", "all") * (1 if shape == "M" else -1)
    if not len(values):
        return None
    least = np.full(len(values), np.inf)  # of the swings up to a layer, at best
    for sign in (1, -1, 1, -1):
        swing = sign * (values[None, :] - values[:, None])
        reached = np.where(
            np.tri(len(values), k=0, dtype=bool), 0.0, np.minimum(least[:, None], swing)
        )
        least = reached.max(0).clip(0)
    span = float(np.ptp(values))
    return float(least.max()) / span if span else 0.0


def ratio(at: At, *, metric: str, to: str) -> float | None:
    """Return a metric's mean over layers over another's."""
    one, other = (layers(at, metric=name) for name in (metric, to))
    return one / other if one is not None and other else None


def correlation(at: At, *, metric: str, to: str, to_variant: str = "paper") -> float | None:
    """Return Pearson's correlation over the layers of a metric and another: −1 to 1."""
    found = _beside(at, f"{metric}/paper/all", f"{to}/{to_variant}/all")
    if found is None or len(found[0]) < 3 or not all(values.std() for values in found):
        return None
    return float(np.corrcoef(*found)[0, 1])


def _beside(at: At, one: str, other: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Return two curves' values at the layers that both have; None where there are none."""
    mine, theirs = at.curve(one), at.curve(other)
    if mine is None or theirs is None:
        return None
    shared, first, second = np.intersect1d(mine[0], theirs[0], return_indices=True)
    return (mine[1][first], theirs[1][second]) if len(shared) else None


def mean_of(at: At, *, figures: Sequence[str]) -> float | None:
    """Return the mean of some figures, if all were measured."""
    found = _known(at.seen.figures.get(name) for name in figures)
    return sum(found) / len(found) if found else None


def tasks_kept(at: At, *, figures: Sequence[str], or_above: Sequence[float] = ()) -> float | None:
    """Return in how many of the tasks' figures a row has at least 90% of the baseline's.

    With `or_above`, a number a task, also where it is above that.
    """
    if or_above and len(or_above) != len(figures):
        raise WakefulError(
            f"or_above has {len(or_above)} numbers, and there are {len(figures)} figures"
        )
    if (base := at.base) is None:
        return None
    ours, theirs = (_known(row.seen.figures.get(name) for name in figures) for row in (at, base))
    if not ours or not theirs:
        return None
    others = or_above or [math.inf] * len(figures)
    kept = zip(ours, theirs, others, strict=True)
    return float(sum(own >= 0.9 * whole or own > other for own, whole, other in kept))


def between(
    at: At, *, metric: str, variant: str = "paper", position: str = "all",
    than_metric: str = "", than_variant: str = "",
) -> float | None:  # fmt: skip
    """Return a metric's mean over layers minus another's; what is not named is the same in both."""
    one = layers(at, metric=metric, variant=variant, position=position)
    other = layers(
        at, metric=than_metric or metric, variant=than_variant or variant, position=position
    )
    return None if one is None or other is None else one - other


def first_over_rest(
    at: At, *, metric: str, variant: str = "paper", largest: bool = False
) -> float | None:
    """Return the mean over layers of a metric at the first token over that at the rest.

    With `largest` it is that of the layer where it is largest.
    """
    found = _beside(at, f"{metric}/{variant}/first", f"{metric}/{variant}/rest")
    if found is None:
        return None
    ratios = found[0] / found[1]
    return float(ratios.max() if largest else ratios.mean())


_MEASURES: tuple[Measure, ...] = (
    train_loss, crossing, overtaken, ahead, over_baseline, exponent, mean_domain_loss,
    data_saving, parameter_saving, loss_over_training, loss_after, gains, layers, deepening,
    lazy_layers, layers_above, extreme, where_least, swings, between, ratio, correlation,
    mean_of, tasks_kept, first_over_rest,
)  # fmt: skip
DERIVED = {measure.__name__: measure for measure in _MEASURES}
"""By the name that exhibits write."""
TO_BASELINE = frozenset({
    "crossing", "overtaken", "ahead", "over_baseline", "data_saving", "parameter_saving",
    "layers_above", "tasks_kept",
})  # fmt: skip
"""Those that say nothing of the baseline itself, which they compare with."""


def tidy(results: Results, expressions: list[str]) -> list[dict[str, Any]]:
    """Return a row a group, row, seed and figure that was measured."""
    return [
        {"group": group, "row": row, "seed": seed, "figure": name, "value": value}
        for group, row, seed in results.seen
        for name in expressions
        if (value := figure_of(results, group, row, seed, name)) is not None
    ]
