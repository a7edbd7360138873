"""The page of every verdict: what its cells say."""

from typing import Any

import pytest

from papers.tool import tool_of
from wakeful_papers.exhibits.judge import Judged, Verdict


@pytest.fixture(scope="module")
def tool() -> Any:
    return tool_of("verdicts")


def verdict(says: str, **given: Any) -> Verdict:
    usual = {"published": None, "difference": -0.03, "error": 0.01, "low": -0.05, "high": -0.01,
             "seeds": 3, "outcome": "confirmed"}  # fmt: skip
    return Verdict(says=says, group="", figure="loss", direction="lower", **(usual | given))


def test_a_published_size_says_whether_ours_agrees_and_a_figure_of_few_seeds_how_many(
    tool: Any,
) -> None:
    verdicts = (
        verdict("within", published=-0.027),
        verdict("beyond", published=-0.1, seeds=2),
        verdict("alone", published=-0.1, error=None, low=None, high=None, seeds=1),
        verdict("unpublished"),
        verdict("missing", difference=None, error=None, low=None, high=None, seeds=0),
    )
    judged = Judged(exhibit="a/fig1", paper="A", title="", claim="", scale="tiny",
                    headline="tiny scale: 1M", verdicts=verdicts)  # fmt: skip
    written = [*tool.lines([tool.section(judged)], "2026-01-01")]
    rows = [line for line in written if line.endswith("confirmed |")]
    (kept,) = tool.read("\n".join(written))
    assert kept == tool.section(judged)
    assert rows == [
        "| within | lower, −0.027, inside | −0.030 ± 0.010 | confirmed |",
        "| beyond | lower, −0.1, outside | −0.030 ± 0.010, 2 of 3 seeds | confirmed |",
        "| alone | lower, −0.1 | −0.0300, one seed | confirmed |",
        "| unpublished | lower | −0.030 ± 0.010 | confirmed |",
        "| missing | lower | not measured | confirmed |",
    ]
