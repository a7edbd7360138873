"""The page of every verdict: what its cells say."""

from pathlib import Path
from typing import Any

import pytest

from tool import tool_of
from wakeful.runs.run import Run
from wakeful_papers.exhibits.judge import JudgedExhibit, Verdict


@pytest.fixture(scope="module")
def tool() -> Any:
    return tool_of("verdicts", "papers/tools")


def verdict(says: str, **kwargs: Any) -> Verdict:
    usual = {"published": None, "difference": -0.03, "error": 0.01, "low": -0.05, "high": -0.01,
             "beside": "vanilla",
             "seeds": 3, "outcome": "confirmed"}  # fmt: skip
    return Verdict(says=says, group="", figure="loss", **({"direction": "lower"} | usual | kwargs))


def test_a_published_size_says_whether_ours_agrees_and_a_figure_of_few_seeds_how_many(
    tool: Any,
) -> None:
    verdicts = (
        verdict("within", published=-0.027, seeds=4),
        verdict("beyond", published=-0.1, seeds=3),
        verdict("of two", published=-0.1, seeds=2),
        verdict("no less", published=0.02, seeds=4, direction="not lower", margin=0.0271),
        verdict("alone", published=-0.1, error=None, low=None, high=None, seeds=1),
        verdict("unpublished", seeds=4),
        verdict(
            "missing",
            difference=None,
            error=None,
            low=None,
            high=None,
            seeds=0,
            outcome="not run",
            asked="a sink: share above 0.1 asked",
        ),
    )
    judged = JudgedExhibit(exhibit="a/fig1", paper="A", title="", claim="", scale="tiny",
                    headline="tiny scale: 1M", verdicts=verdicts)  # fmt: skip
    written = [*tool.lines([tool.section(judged)], "2026-01-01")]
    rows = [line for line in written if line.endswith((" confirmed |", " not run |"))]
    (kept,) = tool.read("\n".join(written))
    assert kept == tool.section(judged)
    assert rows == [
        "| within | vanilla | `loss` | lower, −0.027, inside | −0.030 ± 0.010 | confirmed |",
        "| beyond | vanilla | `loss` | lower, −0.1, outside | −0.030 ± 0.010, 3 of 4 seeds "
        "| confirmed |",
        "| of two | vanilla | `loss` | lower, −0.1 | −0.030 ± 0.010, 2 of 4 seeds | confirmed |",
        "| no less | vanilla | `loss` | not lower (margin 0.0271), +0.02, outside "
        "| −0.030 ± 0.010 | confirmed |",
        "| alone | vanilla | `loss` | lower, −0.1 | −0.0300, one seed | confirmed |",
        "| unpublished | vanilla | `loss` | lower | −0.030 ± 0.010 | confirmed |",
        "| missing | vanilla | `loss`; premise: a sink: share above 0.1 asked | lower "
        "| not measured | not run |",
    ]


def test_what_is_not_applicable_says_why_and_what_rests_on_less_is_counted_apart(
    tool: Any,
) -> None:
    because = "no outliers: kurtosis_rest of vanilla is 3.00 ± 0.06, above 10 asked"
    verdicts = (
        verdict("lowers it", outcome="not applicable", direct="confirmed", because=because),
        verdict("a cell", basis="read off a table's cells"),
        verdict("plain"),
    )
    judged = JudgedExhibit(exhibit="a/fig1", paper="A", title="", claim="", scale="tiny",
                    headline="tiny scale: 1M", verdicts=verdicts)  # fmt: skip
    written = "\n".join(tool.lines([tool.section(judged)], "2026-01-01"))
    assert (
        f"| lowers it | vanilla | `loss` | lower | −0.030 ± 0.010; {because}; the difference "
        "alone: confirmed | not applicable |"
    ) in written
    assert (
        "Tiny scale, 1 exhibit, 2 claims: 1 confirmed and 1 not applicable. Counted apart: 1 claim "
        "read off a table's cells: 1 confirmed."
    ) in written
    (kept,) = tool.read(written)
    assert kept.outcomes == [
        ("", "not applicable"), ("read off a table's cells", "confirmed"), ("", "confirmed"),
    ]  # fmt: skip


def test_the_headline_comes_first(tool: Any) -> None:
    def one(name: str, paper: str) -> Any:
        judged = JudgedExhibit(exhibit=name, paper=paper, title="", claim="", scale="small",
                        headline="small scale: 1M", verdicts=(verdict("v"),))  # fmt: skip
        return tool.section(judged)

    page = "\n".join(tool.lines([one("a/fig1", "A"), one("headline/values", tool.FIRST)], "d"))
    order = [page.index(words) for words in ("**headline/values**", "## Appendix", "**a/fig1**")]
    assert order == sorted(order)
    assert [each.exhibit for each in tool.read(page)] == ["headline/values", "a/fig1"]
    assert tool.NO_HEADLINE in "\n".join(tool.lines([one("a/fig1", "A")], "d"))
    with pytest.raises(AssertionError, match="headline/values"):  # a table of other columns
        list(tool.read(page.replace(tool.COLUMNS, "| claim | published | here | verdict |")))


def test_an_unfinished_exhibit_is_said_to_be_left_out(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tool, "PAGE", tmp_path / "verdicts.md")
    tool.PAGE.write_text("\n".join(tool.lines([], "a day")), "utf-8")
    run = Run(tmp_path / "one")
    run.make("reproduce", {"name": "a/fig1", "scale": "tiny", "seeds": [0]})
    tool.main([run.path], "another day")
    assert "one is unfinished: left out" in capsys.readouterr().out
