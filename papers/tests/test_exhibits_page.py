"""The plan at the papers' scale, as docs/reproduce.md has it."""

from pathlib import Path
from types import ModuleType

import pytest

from tool import tool_of
from wakeful_papers.exhibits.exhibit import exhibit_names, read_exhibit
from wakeful_papers.exhibits.plan import plan_exhibit
from wakeful_papers.exhibits.total import total_cost


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return tool_of("paper_scale", "papers/tools")


def test_every_exhibit_stands_in_the_plan_once(tool: ModuleType) -> None:
    planned = [name for group in tool.GROUPS for name in group.exhibits]
    runnable = [name for name in exhibit_names() if not read_exhibit(name).settings]
    assert sorted(planned) == sorted(runnable)


def test_the_page_is_as_the_exhibits_are(tool: ModuleType) -> None:
    assert tool.main(["--check"]) == 0
    text = tool.PAGE.read_text("utf-8")
    assert f"${tool.PRICE:.2f} an H100 hour" in text
    every = (read_exhibit(name) for name in exhibit_names() if not read_exhibit(name).settings)
    total = total_cost(plan_exhibit(each, "paper") for each in every)
    assert f"Together {total.runs} runs" in text


def test_a_row_is_what_it_adds_to_those_before_it(tool: ModuleType) -> None:
    plans = [
        plan_exhibit(read_exhibit(f"activation/{name}"), "paper") for name in ("table2", "table3")
    ]
    assert tool._added(plans[:1], plans[1:]).runs == 0  # Table 3's runs are some of Table 2's
    assert tool._added([], plans).runs == 4
    assert tool._added(plans[1:], plans[:1]).runs == 2


def test_a_stale_page_is_said_and_written_anew(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n" + tool.FROM + "old\n", "utf-8")
    monkeypatch.setattr(tool, "PAGE", page)
    monkeypatch.setattr(tool, "GROUPS", tool.GROUPS[:1])
    assert tool.main(["--check"]) == 1
    assert tool.main([]) == 0
    assert tool.main(["--check"]) == 0
    assert page.read_text("utf-8").startswith("before\n" + tool.FROM + "\n### 1. ")
