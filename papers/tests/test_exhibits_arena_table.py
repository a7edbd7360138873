"""The arena's table as a page: every group's columns, beside what the page already has."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from test_exhibits_ranks import KURTOSIS, ranked
from tool import tool_of
from wakeful.training.compared import read_comparison


@pytest.fixture(scope="module")
def tool() -> Any:
    return tool_of("arena", "papers/tools")


def cells(page: str, group: str) -> dict[str, list[str]]:
    """Return a group's rows by variant, the head under the empty name."""
    block = page.split(f"**{group}**\n\n")[1].split("\n\n", maxsplit=1)[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in block]
    return {row[0].strip("` |"): row[1:] for row in rows if "---" not in row[0]}


def test_each_group_has_its_columns_and_rows_go_by_the_loss(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    monkeypatch.setattr(tool, "PAGE", page)
    comparison = ranked(tmp_path / "c", KURTOSIS, {"a": 1280.0})
    tool.main([tmp_path / "c"], "2026-01-01")
    written = page.read_text()
    assert f"## {comparison.name}\n" in written
    losses = cells(written, "Loss")
    assert losses[""] == ["loss", "at equal tokens", "at equal time", "overall rank"]
    assert [*losses] == ["", "b", "vanilla", "c", "a"]
    assert losses["vanilla"][1:3] == ["", ""]
    assert losses["b"][1].startswith("**−0.395")
    # Twice as fast, `a` is set beside vanilla at half of its steps: see the ranks' own test.
    assert losses["a"][1] != losses["a"][2]
    outliers = cells(written, "Outliers")
    assert outliers[""] == ["kurtosis, rest"]
    assert outliers["a"][0].startswith("**5.0")
    assert outliers["c"][0].startswith("9.0")
    assert [*cells(written, "Cost")[""]] == ["parameters", "KV cache, B/token", "ms a step"]


def test_what_the_page_has_of_other_comparisons_stays(
    tool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    monkeypatch.setattr(tool, "PAGE", page)
    ranked(tmp_path / "one", KURTOSIS, {})
    ranked(tmp_path / "two", KURTOSIS, {})
    tool.main([tmp_path / "one"], "2026-01-01")
    first = page.read_text()
    tool.main([tmp_path / "two"], "2026-01-02")
    both = page.read_text()
    assert both.startswith(first.rstrip("\n"))
    assert both.count("2026-01-02. ") == 1
    tool.main([tmp_path / "two"], "2026-01-02")
    assert page.read_text() == both


def test_one_seed_has_no_interval_and_its_counts_are_whole(tool: Any, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    ranked(folder, KURTOSIS, {"a": 480.0})
    change(folder / "run.json", seeds=[0])
    for place in folder.glob("*/seed-0/summary.json"):
        change(place, parameters={"total": 124_439_808, "embedding": 0, "non_embedding": 0})
    written = "\n".join(tool.section(read_comparison(folder), "2026-01-01"))
    assert tool.ONE_SEED in written
    assert "inf" not in written
    assert cells(written, "Loss")["b"][3] == "2.0"
    assert cells(written, "Cost")["a"][0] == "124,439,808"
    change(folder / "run.json", seeds=[0, 1])
    assert tool.ONE_SEED not in "\n".join(tool.section(read_comparison(folder), "2026-01-01"))


def test_losses_after_other_tokens_are_not_called_equal(tool: Any, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    ranked(folder, KURTOSIS, {})
    change(folder / "b" / "seed-1" / "summary.json", tokens=5120)
    written = "\n".join(tool.section(read_comparison(folder), "2026-01-01"))
    assert cells(written, "Loss")[""][1] == "at the end"


def test_an_arena_in_which_variants_share_no_seed_is_told_so(tool: Any, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    ranked(folder, KURTOSIS, {})
    for variant, seed in (("a", 0), ("a", 1), ("b", 2)):
        shutil.rmtree(folder / variant / f"seed-{seed}")
    with pytest.raises(ValueError, match="one with a seed that all variants have finished"):
        list(tool.section(read_comparison(folder), "2026-01-01"))


def change(place: Path, **fields: Any) -> None:
    place.write_text(json.dumps(json.loads(place.read_text()) | fields))
