"""The page of many exhibits' claims, and how report writes it."""

from pathlib import Path

import pytest

import wakeful
from wakeful.errors import WakefulError
from wakeful.runs.run import Run
from wakeful_papers.exhibits.judge import JudgedExhibit, Verdict
from wakeful_papers.exhibits.outcomes import Outcome


def verdict(outcome: Outcome, says: str = "it is lower") -> Verdict:
    return Verdict(
        says=says, group="", figure="loss", direction="lower", published=-0.05, difference=-0.04,
        error=0.011, low=-0.08, high=0.002, seeds=3, outcome=outcome,
    )  # fmt: skip


def written(folder: Path, name: str, paper: str, *outcomes: Outcome, says: str = "lower") -> Path:
    run = Run(folder / name.replace("/", "-"))
    run.make("reproduce", {"name": name, "scale": "tiny", "seeds": [0, 1, 2]})
    run.write_json(
        "summary.json",
        JudgedExhibit(
            exhibit=name, paper=paper, title="a table", claim="A cure <cures>.", scale="tiny",
            headline="tiny scale: 0.2M parameters",
            verdicts=tuple(verdict(outcome, says) for outcome in outcomes),
        ),
    )  # fmt: skip
    run.set_status("done")
    return run.path


def test_claims_are_counted_by_paper_and_linked_to_their_exhibits(tmp_path: Path) -> None:
    places = [
        written(tmp_path, "a/fig1", "First", "confirmed", "reversed", "confirmed"),
        written(tmp_path, "a/fig2", "First", "not resolved", says="<b>bold</b>"),
        written(tmp_path, "b/table1", "Second", "confirmed"),
    ]
    done = wakeful.report(*places)
    assert done.page == tmp_path / "claims.html"
    assert len(done.verdicts) == 5
    page = done.page.read_text("utf-8")
    counts = "5 claims: 3 confirmed, 1 reversed and 1 not resolved."
    assert f"In 3 exhibits at tiny scale: {counts}" in page
    assert "<p>4 claims: 2 confirmed, 1 reversed and 1 not resolved.</p>" in page
    assert "A claim is not applicable where" in page
    assert '<a href="a-fig2/report.html">fig2</a>' in page
    assert "A cure &lt;cures&gt;." in page
    assert "<b>bold</b>" not in page
    elsewhere = tmp_path / "pages" / "all.html"
    elsewhere.parent.mkdir()
    assert '"../b-table1/report.html"' in wakeful.report(*places, out=elsewhere).page.read_text()


def test_what_is_unfinished_or_something_else_is_refused(tmp_path: Path) -> None:
    place = written(tmp_path, "a/fig1", "First", "confirmed")
    with pytest.raises(WakefulError, match="has its own title"):
        wakeful.report(place, title="mine")
    Run(place).set_status("stopped")
    with pytest.raises(WakefulError, match="is unfinished: give its wakeful reproduce again first"):
        wakeful.report(place)
    other = written(tmp_path, "a/fig2", "Second", "confirmed")
    found = wakeful.report(other, place)
    assert found.path == other  # a finished one, whose figures and summary these are
    assert found.summary["exhibit"] == "a/fig2"
    assert len(found.exhibits) == 1
    assert "a-fig1 is unfinished" in found.page.read_text("utf-8")
