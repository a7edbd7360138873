"""What a comparison found, in plain words."""

import math

from wakeful.estimates import student_quantile, with_error
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
        elif abs(difference) <= student_quantile(pairs_counted(comparison, variant) - 1) * error:
            sentences.append(
                f"{variant} and {comparison.baseline} are not told apart: "
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
    if comparison.paired_over == "seeds":
        return f"Differences are paired over seeds. {rule}"
    return (
        "Differences are paired over the validation windows of one seed: they say how sure the "
        f"measurement is, not how much another seed would differ. {rule}"
    )


def _side(difference: float) -> str:
    return "below" if difference < 0 else "above"
