"""Measures that exhibits derive from a run, from a run and its baseline, or from all groups."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from wakeful.errors import WakefulError
from wakeful.variants import build_call
from wakeful_papers.exhibits.figures import DOMAIN, Curve, Measurement

RowKey = tuple[str, str, int]
"""Group, row and seed."""


@dataclass(frozen=True)
class Results:
    """The measurements of all runs of an exhibit, and of its models that are not trained."""

    baseline: str
    axis_values: Mapping[str, float]
    """Each group's value on the axis of groups, such as its length, if it has one."""
    measurements: Mapping[RowKey, Measurement]
    diverged: tuple[str, ...] = ()
    """The runs that are missing because they diverged, each with the reason."""

    @cached_property
    def groups(self) -> tuple[str, ...]:
        """The groups with measurements, in the order of these."""
        return tuple(dict.fromkeys(group for group, _, _ in self.measurements))

    @cached_property
    def rows(self) -> tuple[str, ...]:
        """The rows with measurements, in the order of these."""
        return tuple(dict.fromkeys(row for _, row, _ in self.measurements))

    @cached_property
    def seeds(self) -> tuple[int, ...]:
        """The seeds with measurements, ascending."""
        return tuple(sorted({seed for _, _, seed in self.measurements}))


@dataclass(frozen=True)
class RowRun:
    """One row of a group with one seed, among the results."""

    results: Results
    group: str
    row: str
    seed: int

    @property
    def measurement(self) -> Measurement:
        """Its figures, curves and pictures."""
        return self.results.measurements[self.group, self.row, self.seed]

    def curve(self, name: str) -> Curve | None:
        """Return one of its curves, if it was measured."""
        return self.measurement.curves.get(name)

    def select(self, *, group: str | None = None, row: str | None = None) -> "RowRun | None":
        """Return the run of another row or group with the same seed, if it was measured."""
        key = (self.group if group is None else group, row or self.row, self.seed)
        return RowRun(self.results, *key) if key in self.results.measurements else None

    @property
    def baseline(self) -> "RowRun | None":
        """The baseline's run in the same group."""
        return self.select(row=self.results.baseline)

    def curve_pair(self, name: str) -> tuple[Curve, Curve] | None:
        """Return a curve and the baseline's, if both were measured and have points."""
        curve, baseline = self.curve(name), self.baseline
        base = baseline.curve(name) if baseline else None
        return (curve, base) if curve and base and len(curve[1]) and len(base[1]) else None


Measure = Callable[..., float | None]
"""A measure of a `RowRun`, with options by name; None if what it needs was not measured."""


def row_figure(results: Results, group: str, row: str, seed: int, expression: str) -> float | None:
    """Return a figure of one row with one seed: a plain one, or one of `DERIVED` with its options.

    None if it was not run or not measured.

    Raises:
        WakefulError: the expression is neither a name nor a derived measure.
    """
    run = RowRun(results, group, row, seed)
    if (group, row, seed) not in results.measurements:
        return None
    if expression.isidentifier() and expression not in DERIVED:
        return run.measurement.figures.get(expression)
    return build_call("figure", DERIVED, expression)(run)


def check_figure(expression: str) -> None:
    """Raise `WakefulError` if an expression is neither a name nor a derived measure."""
    if not expression.isidentifier() or expression in DERIVED:
        build_call("figure", DERIVED, expression)


def smooth(values: np.ndarray) -> np.ndarray:
    """Return the means over windows of 100 values, of 10 below 1,000 values, of all below 10.

    Section 4.1.1 of Value Residual Learning: "a window size of 10 steps or 100 steps". As in its
    code (analyze/plot_relative_loss.py) every window is complete and the first begins with the
    first value, so windows of n values give n − 1 fewer means than there are values.
    """
    return np.convolve(values, np.ones(width := _window_length(values)) / width, mode="valid")


def _window_length(values: np.ndarray) -> int:
    return min(len(values), 100 if len(values) >= 1000 else 10)


def relative_train_loss(run: RowRun) -> Curve | None:
    """Return the smoothed training loss minus the baseline's, by the first step of each window.

    None for the baseline itself, and without common steps.
    """
    if run.row == run.results.baseline or (pair := run.curve_pair("train_loss")) is None:
        return None
    (steps, losses), (baseline_steps, baseline_losses) = pair
    steps, index, baseline_index = np.intersect1d(steps, baseline_steps, return_indices=True)
    if not len(steps):
        return None
    differences = smooth(losses[index] - baseline_losses[baseline_index])
    return steps[: len(differences)], differences


def train_loss(run: RowRun, *, last: int = 50) -> float | None:
    """Return the mean training loss of the last steps (fig. 5 of Value Residual Learning: 50)."""
    curve = run.curve("train_loss")
    return float(curve[1][-last:].mean()) if curve and len(curve[1]) else None


def crossing(run: RowRun, *, predicted: bool = False, bound: bool = False) -> float | None:
    """Return the step from which the smoothed training loss is never below the baseline's again.

    The critical point of Value Residual Learning, fig. 14. None for the baseline itself, and for a
    row that ends below the baseline, since it was not overtaken. For such a row, `predicted`
    extends the straight line through the last tenth of the differences (the paper's 1,000 of
    10,000) to zero, if it rises. Otherwise `bound` returns the first step of the last window, a
    lower bound, which tells who is overtaken later if the other of two rows is overtaken.
    """
    if (curve := relative_train_loss(run)) is None:
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


def overtaken(run: RowRun) -> float | None:
    """Return 1 if the baseline overtakes a row, so that it has a `crossing`, and otherwise 0."""
    return None if relative_train_loss(run) is None else float(crossing(run) is not None)


def ahead(run: RowRun, *, first: float = 1.0) -> float | None:
    """Return the share of the steps at which the smoothed training loss is below the baseline's.

    Only the share `first` of the steps counts, from the beginning.
    """
    if (curve := relative_train_loss(run)) is None:
        return None
    return float((curve[1][: max(1, round(first * len(curve[1])))] < 0).mean())


def over_baseline(run: RowRun, *, figure: str = "loss") -> float | None:
    """Return a row's figure over the baseline's in the same group."""
    base = run.baseline
    value = row_figure(run.results, run.group, run.row, run.seed, figure)
    base_value = base and row_figure(run.results, base.group, base.row, run.seed, figure)
    return value / base_value if value is not None and base_value else None


def exponent(run: RowRun, *, figure: str) -> float | None:
    """Return k of figure ∝ x^k over the groups' axis values x: the slope of ln figure over ln x.

    By least squares through all groups with an axis value; it needs three, and positive values.
    """
    points = [
        (x, value)
        for group, x in run.results.axis_values.items()
        if (value := row_figure(run.results, group, run.row, run.seed, figure)) is not None
    ]
    if len(points) < 3 or min(min(point) for point in points) <= 0:
        return None
    xs, values = np.log(points).T
    deviations = xs - xs.mean()
    return float(deviations @ (values - values[0]) / (deviations @ deviations))


def mean_domain_loss(run: RowRun) -> float | None:
    """Return the mean loss over a mixture's domains, with equal weights.

    The average of Value Residual Learning, table 5. A text without domains counts as one domain.
    """
    figures = run.measurement.figures
    losses = [value for name, value in figures.items() if name.startswith(DOMAIN)]
    return sum(losses) / len(losses) if losses else figures.get("loss")


def data_saving(run: RowRun) -> float | None:
    """Return the share of steps that are left when a row reaches the baseline's last loss.

    Losses are smoothed training losses. For a row that ends above the baseline it is minus the
    share that the baseline saves. So for a row that differs only by chance the mean is 0.
    """
    if (pair := run.curve_pair("train_loss")) is None:
        return None
    if run.row == run.results.baseline:  # its loss can have been as low before
        return 0.0
    curve, base = ((steps[_window_length(losses) - 1 :], smooth(losses)) for steps, losses in pair)
    if curve[1][-1] <= base[1][-1]:
        return _share_of_steps_left(curve, base[1][-1])
    return -_share_of_steps_left(base, curve[1][-1])


def _share_of_steps_left(curve: Curve, loss: float) -> float:
    """Return the share of a curve's steps that remain when it first reaches a loss."""
    steps, losses = curve
    return 1.0 - float(steps[np.flatnonzero(losses <= loss)[0]]) / float(steps[-1])


def parameter_saving(
    run: RowRun, *, figure: str = "loss", groups: Sequence[str] = ()
) -> float | None:
    """Return the share of parameters saved at equal loss, by a fit over the groups' sizes.

    L = a − b ln N is fitted through the baseline's runs of all seeds. Δ is the mean over sizes of
    the row's loss minus the baseline's with this seed: the row's line is shifted by Δ, which the
    baseline reaches at N' = N exp(−Δ / b), so 1 − N / N' is saved. With the losses printed in table
    5 of Value Residual Learning this is the paper's 10.4%. It needs two sizes, of all groups or of
    `groups`.

    One b serves all seeds: with one per seed, seeds in which chance turns the small slope would
    have to be dropped, and the remaining ones would be a selection. The error of b is not counted.
    None if losses do not fall with size, or fall so little that ln N' differs from ln N by the
    whole range of the sizes or more: these sizes cannot tell.
    """
    base, fitted_groups = run.results.baseline, groups or run.results.groups
    sizes: list[float] = []
    losses: list[float] = []
    differences: list[float] = []
    for group in fitted_groups:
        for seed in run.results.seeds:
            loss = row_figure(run.results, group, base, seed, figure)
            if loss is None:
                continue
            sizes.append(run.results.measurements[group, base, seed].figures["parameters"])
            losses.append(loss)
            row_loss = row_figure(run.results, group, run.row, seed, figure)
            if seed == run.seed and row_loss is not None:
                differences.append(row_loss - loss)
    if len(set(sizes)) < 2 or len(differences) < 2:
        return None
    slope = float(np.polyfit(np.log(sizes), losses, 1)[0])
    if slope >= 0:
        return None
    log_ratio = -float(np.mean(differences)) / slope  # ln N / N'
    return 1.0 - math.exp(log_ratio) if abs(log_ratio) < math.log(max(sizes) / min(sizes)) else None


def loss_over_training(run: RowRun, *, curve: str = "validation_loss") -> float | None:
    """Return the mean validation loss over training: lower means faster convergence.

    The mean is over the steps after the start at which all rows of the group with the same last
    step were evaluated. `curve="train_loss"` is for the losses of the batches.
    """
    if (own := run.curve(curve)) is None or not len(own[0]):
        return None
    steps, losses = own
    shared = steps[steps > 0]
    for row in run.results.rows:
        row_run = run.select(row=row)
        row_curve = row_run.curve(curve) if row_run else None
        if row_curve and len(row_curve[0]) and row_curve[0][-1] == steps[-1]:
            shared = np.intersect1d(shared, row_curve[0])
    return float(losses[np.isin(steps, shared)].mean()) if len(shared) else None


def loss_after(run: RowRun, *, share: float) -> float | None:
    """Return the validation loss after a share of a row's steps, if it was evaluated there."""
    if (curve := run.curve("validation_loss")) is None or not len(curve[0]):
        return None
    steps, losses = curve
    indices = np.flatnonzero(steps == round(share * float(steps[-1])))
    return float(losses[indices[0]]) if len(indices) else None


def gains(run: RowRun, *, figure: str, of: Sequence[str], than: Sequence[str]) -> float | None:
    """Return a figure's difference between two groups minus that between two other groups.

    With `of` = (a, b) and `than` = (c, d): (a − b) − (c − d), of the same row and seed.
    """
    values = _all_or_none(
        row_figure(run.results, group, run.row, run.seed, figure) for group in (*of, *than)
    )
    return (values[0] - values[1]) - (values[2] - values[3]) if values else None


def _all_or_none(values: Iterable[float | None]) -> list[float]:
    """Return the values if all were measured, otherwise an empty list."""
    all_values = list(values)
    measured = [value for value in all_values if value is not None]
    return measured if len(measured) == len(all_values) else []


def _select_part(values: np.ndarray, part: str) -> np.ndarray:
    """Return the values of the layers of a part: "all", the first half ("early"), the second
    ("late"), or the k-th of n equal ranges of layers ("k/n").
    """
    half = len(values) // 2
    parts = {"all": values, "early": values[:half], "late": values[half:]}
    if part in parts:
        return parts[part]
    match = re.fullmatch(r"([1-9]\d?)/([1-9]\d?)", part)
    if match is None or int(match[1]) > int(match[2]):
        raise WakefulError(f"part must be all, early, late or one like 1/3, got {part!r}")
    number, count = int(match[1]), int(match[2])
    return values[round((number - 1) * len(values) / count) : round(number * len(values) / count)]


def layers(
    run: RowRun, *, metric: str, variant: str = "paper", position: str = "all", part: str = "all"
) -> float | None:
    """Return the mean of a metric over a part of the layers (`_select_part`).

    For ranks over consecutive layers this is AvgRank (When Attention Collapses, section 2.1).
    """
    values = _layer_values(run, f"{metric}/{variant}/{position}", part)
    return float(values.mean()) if len(values) else None


def _layer_values(run: RowRun, name: str, part: str) -> np.ndarray:
    """Return a curve's values in a part of the layers; empty if it was not measured."""
    curve = run.curve(name)
    return np.zeros(0) if curve is None else _select_part(curve[1], part)


def deepening(
    run: RowRun, *, metric: str, variant: str = "paper", part: str = "late", than: str = "early"
) -> float | None:
    """Return a metric's mean over one part of the layers minus another, by default late − early."""
    late, early = (layers(run, metric=metric, variant=variant, part=each) for each in (part, than))
    return None if late is None or early is None else late - early


def lazy_layers(run: RowRun) -> float | None:
    """Return the share of layers in which no head's rank is above 2."""
    ranks = _layer_values(run, "rank/paper/all", "all")
    return float((ranks <= 2).mean()) if len(ranks) else None


def layers_above(
    run: RowRun, *, metric: str, variant: str = "paper", position: str = "all"
) -> float | None:
    """Return the share of layers in which a metric is above the baseline's."""
    pair = run.curve_pair(f"{metric}/{variant}/{position}")
    if pair is None or len(pair[0][1]) != len(pair[1][1]):
        return None
    return float((pair[0][1] > pair[1][1]).mean())


def extreme(
    run: RowRun, *, metric: str, position: str = "first", part: str = "all", least: bool = False
) -> float | None:
    """Return a metric's largest or `least` value over a part of the layers (`_select_part`)."""
    values = _layer_values(run, f"{metric}/paper/{position}", part)
    return float(values.min() if least else values.max()) if len(values) else None


def where_least(run: RowRun, *, metric: str, of: str) -> float | None:
    """Return a metric in the layer in which another is least; the first such layer counts."""
    pair = _common_layers(run, f"{metric}/paper/all", f"{of}/paper/all")
    return float(pair[0][pair[1].argmin()]) if pair else None


def swings(run: RowRun, *, metric: str, shape: str, variant: str = "paper") -> float | None:
    """Return how clearly a metric draws a W or an M over the layers, from 0 (not at all) to 1.

    The four swings of a W are down, up, down, up, between five layers in order; an M's are the
    opposite. It is the smallest over the curve's range, for the five layers that make it largest.

    Raises:
        WakefulError: `shape` is neither W nor M.
    """
    if shape not in ("W", "M"):
        raise WakefulError(f"shape must be W or M, got {shape!r}")
    values = _layer_values(run, f"{metric}/{variant}/all", "all") * (1 if shape == "M" else -1)
    if not len(values):
        return None
    smallest_swing = np.full(len(values), np.inf)  # of the swings up to each layer, at best
    for sign in (1, -1, 1, -1):
        swing = sign * (values[None, :] - values[:, None])
        candidates = np.where(
            np.tri(len(values), k=0, dtype=bool), 0.0, np.minimum(smallest_swing[:, None], swing)
        )
        smallest_swing = candidates.max(0).clip(0)
    value_range = float(np.ptp(values))
    return float(smallest_swing.max()) / value_range if value_range else 0.0


def ratio(run: RowRun, *, metric: str, to: str) -> float | None:
    """Return a metric's mean over layers over another's."""
    numerator, denominator = (layers(run, metric=name) for name in (metric, to))
    return numerator / denominator if numerator is not None and denominator else None


def correlation(run: RowRun, *, metric: str, to: str, to_variant: str = "paper") -> float | None:
    """Return Pearson's correlation of two metrics over layers, three or more; None if undefined."""
    pair = _common_layers(run, f"{metric}/paper/all", f"{to}/{to_variant}/all")
    if pair is None or len(pair[0]) < 3 or not all(values.std() for values in pair):
        return None
    return float(np.corrcoef(*pair)[0, 1])


def _common_layers(run: RowRun, first: str, second: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Return two curves' values at the layers that both have; None if there are none."""
    x, y = run.curve(first), run.curve(second)
    if x is None or y is None:
        return None
    shared, x_index, y_index = np.intersect1d(x[0], y[0], return_indices=True)
    return (x[1][x_index], y[1][y_index]) if len(shared) else None


def mean_of(run: RowRun, *, figures: Sequence[str]) -> float | None:
    """Return the mean of some plain figures, if all were measured."""
    values = _all_or_none(run.measurement.figures.get(name) for name in figures)
    return sum(values) / len(values) if values else None


def tasks_kept(
    run: RowRun, *, figures: Sequence[str], or_above: Sequence[float] = ()
) -> float | None:
    """Return the number of the tasks' figures in which a row has at least 90% of the baseline's.

    `or_above` has a number per task; a figure above it counts too.
    """
    if or_above and len(or_above) != len(figures):
        raise WakefulError(
            f"or_above has {len(or_above)} numbers, and there are {len(figures)} figures"
        )
    if (baseline := run.baseline) is None:
        return None
    values, baseline_values = (
        _all_or_none(row.measurement.figures.get(name) for name in figures)
        for row in (run, baseline)
    )
    if not values or not baseline_values:
        return None
    thresholds = or_above or [math.inf] * len(figures)
    tasks = zip(values, baseline_values, thresholds, strict=True)
    return float(sum(x >= 0.9 * baseline_x or x > above for x, baseline_x, above in tasks))


def between(
    run: RowRun, *, metric: str, variant: str = "paper", position: str = "all",
    than_metric: str = "", than_variant: str = "",
) -> float | None:  # fmt: skip
    """Return a metric's mean over layers minus that of another metric, variant or both."""
    mean = layers(run, metric=metric, variant=variant, position=position)
    than_mean = layers(
        run, metric=than_metric or metric, variant=than_variant or variant, position=position
    )
    return None if mean is None or than_mean is None else mean - than_mean


def first_over_rest(
    run: RowRun, *, metric: str, variant: str = "paper", largest: bool = False
) -> float | None:
    """Return the mean over layers of the ratio of a metric at the first token to that at the rest,
    or with `largest` the largest such ratio.
    """
    pair = _common_layers(run, f"{metric}/{variant}/first", f"{metric}/{variant}/rest")
    if pair is None:
        return None
    ratios = pair[0] / pair[1]
    return float(ratios.max() if largest else ratios.mean())


_MEASURES: tuple[Measure, ...] = (
    train_loss, crossing, overtaken, ahead, over_baseline, exponent, mean_domain_loss,
    data_saving, parameter_saving, loss_over_training, loss_after, gains, layers, deepening,
    lazy_layers, layers_above, extreme, where_least, swings, between, ratio, correlation,
    mean_of, tasks_kept, first_over_rest,
)  # fmt: skip
DERIVED = {measure.__name__: measure for measure in _MEASURES}
"""Measures by the name that exhibits use."""
TO_BASELINE = frozenset({
    "crossing", "overtaken", "ahead", "over_baseline", "data_saving", "parameter_saving",
    "layers_above", "tasks_kept",
})  # fmt: skip
"""Measures that compare with the baseline, and so say nothing about the baseline itself."""


def figure_rows(results: Results, expressions: list[str]) -> list[dict[str, Any]]:
    """Return one row per group, row, seed and figure that was measured."""
    return [
        {"group": group, "row": row, "seed": seed, "figure": name, "value": value}
        for group, row, seed in results.measurements
        for name in expressions
        if (value := row_figure(results, group, row, seed, name)) is not None
    ]
