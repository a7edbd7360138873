"""What a comparison found, in plain words."""

import math
from collections.abc import Iterable

from wakeful.estimates import reach, with_error
from wakeful.pages.comparison.tables import Comparison, paired_difference, pairs_counted


def verdicts(comparison: Comparison) -> list[str]:
    """Return one sentence for each variant but the baseline."""
    sentences: list[str] = []
    for variant in comparison.variants[1:]:
        difference, error = paired_difference(comparison, variant)
        if math.isnan(difference):
            sentences.append(f"{variant} shares no seed with {comparison.baseline}.")
        elif math.isnan(error):
            sentences.append(
                f"{variant} ends {abs(difference):.4f} nats {_side(difference)} "
                f"{comparison.baseline}, with nothing to judge the error by."
            )
        elif abs(difference) <= reach(error, pairs_counted(comparison, variant)):
            sentences.append(
                f"{variant} and {comparison.baseline} cannot be distinguished: "
                f"{with_error(difference, error, '+')} nats."
            )
        else:
            sentences.append(
                f"{variant} ends {with_error(abs(difference), error)} nats {_side(difference)} "
                f"{comparison.baseline}."
            )
    return sentences


def caveat(comparison: Comparison) -> str:
    """Say what the errors cover and what they do not."""
    if len(comparison.variants) < 2:
        return "One variant: nothing to compare."
    rule = "A difference counts when its 95% confidence interval (Student's t) leaves out zero."
    compared = [v for v in comparison.variants[1:] if comparison.pairs(v)]
    single = [v for v in compared if comparison.paired_over(v) == "windows"]
    if not single:
        return f"Differences are paired over seeds. {rule}"
    whose = "Differences are" if len(single) == len(compared) else f"That of {_listed(single)} is"
    rest = "" if len(single) == len(compared) else "Differences are paired over seeds. "
    return (
        f"{rest}{whose} paired over the validation windows of one seed: they say how sure the "
        f"measurement is, not how much another seed would differ. {rule}"
    )


def seeds_missing(comparison: Comparison) -> str:
    """Say which seeds a variant has not finished that another has; "" where all have the same."""
    said = []
    for variant in comparison.variants:
        missing = comparison.missing(variant)
        if missing:
            used = comparison.compared(variant)
            said.append(
                f"{variant} has not finished seed {_listed(missing)}: its figures are of seed "
                f"{_listed(run.seed for run in used)}"
            )
    if not said:
        return ""
    return "; ".join(said) + ". Losses of different seeds do not compare; the differences do."


def errors_over(comparison: Comparison) -> str:
    """Say what the standard errors of the figures are over."""
    kinds = {comparison.paired_over(variant) for variant in comparison.variants}
    windows = "validation windows, which are the clusters of a ratio estimator"
    if kinds == {"seeds"}:
        return "over seeds"
    if kinds == {"windows"}:
        return f"over {windows}"
    return f"over seeds, and where there is one alone over {windows}"


def _listed(names: Iterable[object]) -> str:
    *before, last = map(str, names)
    return f"{', '.join(before)} and {last}" if before else last


def _side(difference: float) -> str:
    return "below" if difference < 0 else "above"
