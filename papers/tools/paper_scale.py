"""Write the plan at the papers' scale in docs/reproduce.md; with --check, say if it is stale."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from wakeful_papers.exhibits.exhibit import read_exhibit
from wakeful_papers.exhibits.plan import Plan, plan_exhibit
from wakeful_papers.exhibits.size import H100
from wakeful_papers.exhibits.total import TotalCost, total_cost

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reproduce.md"
FROM = "<!-- python papers/tools/paper_scale.py writes what follows -->\n"
PRICE = 2.5
"""Dollars that an H100 costs an hour."""


@dataclass(frozen=True)
class Group:
    """Exhibits that answer one question."""

    title: str
    teaches: str
    exhibits: tuple[str, ...]


def _names(paper: str, names: str) -> tuple[str, ...]:
    return tuple(f"{paper}/{name}" for name in names.split())


GROUPS = (
    Group(
        "Published models and the smallest model with a sink",
        "Whether the layers of OpenLLaMA and Llama are as lazy as in the papers' figures, and what "
        "removes the sink of a single head that has nothing to do.",
        (*_names("lazy", "fig9 fig11"), *_names("activation", "appendix-j appendix-k"),
         "value-residual/fig18", "active-dormant/backcopy", "active-dormant/backcopy-deep"),
    ),
    Group(
        "Every cure alone",
        "Which cures of the field do what their authors say, in one setting.",
        ("own/arena", "own/small-sinks"),
    ),
    Group(
        "The cures at 60M",
        "Whether softmax-1 and OrthoAdam keep the perplexity, remove sinks and outliers, and "
        "survive quantization.",
        _names("activation", "table2 table3 table4 table6 appendix-l"),
    ),
    Group(
        "Lazy layers and their transfer",
        "Whether deep layers of GPT-2 have rank 1, and whether a model that begins with such "
        "layers learns no better than one with random layers.",
        _names("lazy", "fig1-medium fig1-large fig1-xl fig2 fig3-medium fig3-large fig4 growth "
                       "fig8-medium fig8-large fig8-xl fig10 fig10-large fig10-xl fig13"),
    ),
    Group(
        "Inheritance",
        "Whether an heir with half to two thirds of the layers reaches its reference's loss, and "
        "whether other starts, or an heir of only some of the weights, reach it too.",
        _names("lazy", "table1-medium table1-large table1-xl table2 table3-medium table3-large "
                       "table3-xl table4 table5-medium table5-large fig5-medium fig5-large "
                       "fig5-xl fig6-medium fig6-large fig7 fig12 fig14-medium fig14-large "
                       "fig14-xl fig15 fig16 fig17 fig18 fig19"),
    ),
    Group(
        "Value residuals at 82M",
        "Whether ResFormer ends below the vanilla model at equal tokens, which of its forms is "
        "best, and what becomes of sinks and value drains.",
        _names("value-residual", "fig1 fig3 fig4 fig6 fig7 fig8 fig9 fig10 fig11 fig12 fig19 "
                                 "fig20 fig21 table2"),
    ),
    Group(
        "Where value residuals pay",
        "Whether the gain stays as large from 82M to 468M parameters and up to 64,000 tokens, "
        "whether it shows in zero-shot accuracy, and how long sequences must be for the values of "
        "one layer to be enough.",
        _names("value-residual", "table1 table5 fig5-sizes fig5-lengths fig14 fig15a fig15b "
                                 "fig15c fig15d fig16 fig17 fig13-half fig13-eighth"),
    ),
    Group(
        "The cures at 130M",
        "Which of norms, positions, biases, softmax and optimizer grow outliers, whether all "
        "cures combine, and whether Llama's architecture behaves as GPT-2's.",
        (*_names("activation", "table2-130m table3-130m table4-130m table2-llama table3-llama "
                               "table5 fig3 largest-weights"),
         "own/combination", "own/optimizers"),
    ),
    Group(
        "Heirs of 3B",
        "Whether heirs of OpenLLaMA learn from little text, and how many layers they need.",
        _names("lazy", "table6 fig20 fig22 table10"),
    ),
    Group(
        "The cures at 350M",
        "Whether outliers grow with the model, and whether the effect of the cures grows too.",
        _names("activation", "fig1 table1 table2-350m table3-350m table4-350m"),
    ),
    Group(
        "Heirs of 7B",
        "Whether a deeper reference gives the better heir.",
        _names("lazy", "fig21 table9"),
    ),
    Group(
        "The cures at 1.4B",
        "Whether the cures hold where outliers hurt the most.",
        _names("activation", "table2-1.4b table3-1.4b table4-1.4b"),
    ),
    Group(
        "The headline claims",
        "The headline table's rows at the papers' own sizes and rates; most of these runs are "
        "already trained for the sections above.",
        _names("headline", "sinks values depth outliers heirs"),
    ),
)  # fmt: skip
"""In the order in which the most is learned for the least."""


def section() -> str:
    """Return the plan: what each group teaches, and what each exhibit adds to those before it."""
    lines: list[str] = []
    before: list[Plan] = []
    for number, group in enumerate(GROUPS, start=1):
        start, rows = list(before), list[str]()
        for name in group.exhibits:
            plan = plan_exhibit(read_exhibit(name), "paper")
            rows.append(_row(f"`{name}`", ", ".join(plan.needs), _added(before, [plan])))
            before.append(plan)
        whole = _row("all", "", _added(start, before[len(start) :]))
        lines += [f"### {number}. {group.title}", "", group.teaches, ""]
        lines += ["| exhibit | needs | tokens | H100 hours | on eight | cost | memory |"]
        lines += ["|---|---|--:|--:|--:|--:|--:|", *rows]
        lines += [whole, ""] if len(rows) > 1 else [""]
    total = total_cost(before)
    lines.append(
        f"Together {total.runs} runs, {_tokens(total)} tokens, {_hours(total):,.0f} H100 hours, "
        f"${_hours(total) * PRICE:,.0f} at ${PRICE:.2f} an hour."
    )
    return "\n".join(lines) + "\n"


def _added(before: Iterable[Plan], plans: Iterable[Plan]) -> TotalCost:
    """Return what exhibits take that those before them have not trained already."""
    trained = {name for plan in before for name in plan.costs_by_folder}
    return total_cost(plans, trained.__contains__)


def _row(name: str, needs: str, total: TotalCost) -> str:
    if not total.runs:
        return f"| {name} | {needs} | – | – | – | – | {total.memory / 1e9:,.0f} GB |"
    hours = _hours(total)
    return (
        f"| {name} | {needs} | {_tokens(total)} | {_figure(hours)} | "
        f"{_figure(total.busiest_card / H100 / 3600)} | "
        f"${_figure(hours * PRICE)} | {total.memory / 1e9:,.0f} GB |"
    )


def _hours(total: TotalCost) -> float:
    return total.operations / H100 / 3600


def _tokens(total: TotalCost) -> str:
    return f"{total.tokens / 1e9:,.1f}B" if total.tokens >= 1e8 else f"{total.tokens / 1e6:,.1f}M"


def _figure(count: float) -> str:
    return f"{count:,.0f}" if count >= 10 else f"{max(count, 0.01):.1g}" if count < 1 else (
        f"{count:.1f}")  # fmt: skip


def main(arguments: list[str]) -> int:
    """Return 0 where the page is as the exhibits are, or has become so."""
    text = PAGE.read_text("utf-8")
    whole = text.partition(FROM)[0] + FROM + "\n" + section()
    if "--check" in arguments:
        if whole != text:
            print("papers/docs/reproduce.md is stale: run python papers/tools/paper_scale.py")
        return int(whole != text)
    PAGE.write_text(whole, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
