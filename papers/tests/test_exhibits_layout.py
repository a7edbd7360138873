"""Comparisons laid out as a paper's tables, its figures beside ours."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pages.test_report import make_comparison
from wakeful.errors import WakefulError
from wakeful.reports.html import write_page
from wakeful.training.compared import TrainedRun, read_comparison, read_run
from wakeful.training.layouts import layout_of
from wakeful.training.report import comparison_report
from wakeful_papers.exhibits.exhibit import read_exhibit
from wakeful_papers.exhibits.filled import FilledCell, FilledTable, fill_table
from wakeful_papers.exhibits.run_figures import run_figure
from wakeful_papers.exhibits.table import Column, PublishedTable
from wakeful_papers.reports import layout
from wakeful_papers.reports.layout import TableLayout

ROWS = ("vanilla", "softmax1", "orthoadam", "softmax1-orthoadam")
SEEDS = [0, 1, 2]
Figures = dict[tuple[str, int], dict[str, Any]]


def measured(folder: Path, layouts: list[str], diagnosis: Figures, **more: Any) -> Path:
    """Write a comparison whose runs have logged these figures."""
    path = make_comparison(folder, dict.fromkeys(ROWS, 0.0), SEEDS)
    header = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps({**header, "layouts": layouts}))
    for variant in ROWS:
        for seed in SEEDS:
            file = path / variant / f"seed-{seed}" / "summary.json"
            summary = json.loads(file.read_text())
            summary |= {"diagnosis": diagnosis.get((variant, seed), {}), **more}
            file.write_text(json.dumps(summary))
    return path


def changed(folder: Path, **fields: Any) -> TrainedRun:
    """Return the first run with other fields in its summary."""
    run = folder / ROWS[0] / "seed-0"
    before = (run / "summary.json").read_text()
    (run / "summary.json").write_text(json.dumps(json.loads(before) | fields))
    try:
        return read_run(run)
    finally:
        (run / "summary.json").write_text(before)


def cell_of(table: FilledTable, variant: str, name: str) -> FilledCell:
    row = next(row for row in table.rows if row.variant == variant)
    return row.cells[[column.figure for column in table.published.columns].index(name)]


def test_a_cell_is_a_mean_over_seeds_beside_the_printed_one(tmp_path: Path) -> None:
    base, wobble = [10.0, 11.0, 12.0], [0.0, 0.1, -0.1]
    diagnosis: Figures = {("vanilla", seed): {"kurtosis_first": base[seed]} for seed in SEEDS}
    for variant, shift in {"softmax1": -5.0, "orthoadam": 0.01}.items():
        for seed in SEEDS:
            diagnosis[variant, seed] = {"kurtosis_first": base[seed] + shift + wobble[seed]}
    folder = measured(tmp_path / "c", ["activation/table2"], diagnosis)
    table = fill_table(read_comparison(folder), read_exhibit("activation/table2").table)

    cell = cell_of(table, "softmax1", "kurtosis_first")
    assert cell.value == pytest.approx((6.0, np.std([5.0, 6.1, 6.9], ddof=1) / math.sqrt(3)))
    # Seeds differ by 1, pairs by 0.1: the pairing is what tells them apart.
    assert (cell.printed, cell.is_significant) == (105.6, True)
    assert not cell_of(table, "orthoadam", "kurtosis_first").is_significant
    # Not measured at all.
    cell = cell_of(table, "softmax1-orthoadam", "kurtosis_first")
    assert (cell.value, cell.is_significant) == (None, False)
    # The baseline is what all is set against.
    assert not any(cell.is_significant for cell in table.rows[0].cells)


def test_a_word_stands_where_no_figure_is_at_hand(tmp_path: Path) -> None:
    rows = {"vanilla": "V", "softmax1": "S", "nobody": "N"}
    cells = {("softmax1", "kurtosis_rest"): "lower", ("softmax1", "loss"): 2.5}
    layout = PublishedTable("T", "Note.", "vanilla", (Column("loss", "loss"),
                            Column("kurtosis_rest", "kurtosis")), rows, cells)  # fmt: skip
    diagnosis: Figures = {(v, s): {"kurtosis_rest": 9.0} for v in ROWS for s in SEEDS}
    comparison = read_comparison(measured(tmp_path / "c", [], diagnosis))
    section = TableLayout(layout)(comparison)[-1]
    report = comparison_report(comparison, title="t")
    report = replace(report, sections=[*report.sections, section])
    page = write_page(report, tmp_path / "page.html").read_text()
    assert "paper lower" in page
    assert "paper 2.50" in page
    assert "Rows of the paper that were not trained: N." in page


def test_one_seed_separates_nothing(tmp_path: Path) -> None:
    folder = measured(tmp_path / "c", ["activation/table2"], {
        (variant, seed): {"kurtosis_rest": 5.0 * (1 + (variant == "vanilla"))}
        for variant in ROWS for seed in SEEDS
    })  # fmt: skip
    header = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**header, "seeds": [0]}))
    comparison = read_comparison(folder)
    table = fill_table(comparison, read_exhibit(comparison.layouts[0]).table)
    assert not any(each.is_significant for row in table.rows for each in row.cells)
    page = write_page(comparison_report(comparison, title="t"), tmp_path / "page.html").read_text()
    assert ">10.0<" in page
    assert "± nan" not in page
    assert "One seed, which leaves no standard error." in page


def test_figures_of_a_run(tmp_path: Path) -> None:
    folder = measured(
        tmp_path / "c", [], {}, quantization={"coarse": {"increase": 2.5, "perplexity": 9.0}},
        bytes={"weights": 1_000_000, "optimizer": 2_000_000},
    )  # fmt: skip
    run = read_comparison(folder).runs[0]
    tokens = run.validation["tokens"]
    loss = (run.validation["loss"] * tokens).sum() / tokens.sum()
    assert run_figure(run, "perplexity") == pytest.approx(math.exp(loss))
    assert run_figure(run, "increase_coarse") == 2.5
    assert run_figure(run, "increase_fine") is None
    assert run_figure(run, "training_megabytes") == 4.0
    steps = 640.0 / (run.config.train.batch_size * run.config.train.length)
    assert run_figure(run, "steps_per_second") == steps
    run = changed(folder, bytes={"weights": 1, "optimizer": 1, "peak": 7_000_000})
    assert run_figure(run, "training_megabytes") == 7.0
    assert run_figure(changed(folder, diagnosis={"kurtosis_rest": None}), "kurtosis_rest") is None
    for wrong in ("many", [], True, float("inf"), float("nan"), {"fine": "x"}):
        for name in ("diagnosis", "quantization"):
            with pytest.raises(WakefulError, match=rf"{name}\.x(\.y)? must be|is not JSON"):
                changed(folder, **{name: {"x": wrong if name == "diagnosis" else {"y": wrong}}})


def test_the_page_shows_the_tables(tmp_path: Path) -> None:
    diagnosis: Figures = {
        (variant, seed): {"kurtosis_rest": 50.0 + seed - 40.0 * (variant == "orthoadam")}
        for variant in ROWS
        for seed in SEEDS
    }
    folder = measured(tmp_path / "c", ["activation/table2", "activation/table6"], diagnosis)
    comparison = read_comparison(folder)
    page = write_page(comparison_report(comparison, title="t"), tmp_path / "page.html").read_text()
    assert read_exhibit("activation/table2").table.title in page
    assert "paper 77.9" in page
    # Table 6 has two rows, and no figures of the paper's.
    assert read_exhibit("activation/table6").table.note in page


@pytest.mark.parametrize("layouts", ["activation/table2", ["no-such"], [["x"]], {"a": 1}])
def test_a_run_json_that_names_no_layout_is_refused(tmp_path: Path, layouts: Any) -> None:
    with pytest.raises(WakefulError, match="layouts"):
        comparison_report(read_comparison(measured(tmp_path / "c", layouts, {})))


def test_an_unknown_layout_is_refused_with_the_nearest() -> None:
    with pytest.raises(WakefulError, match="activation/table2"):
        layout_of("activation/table-2.")


def test_bold_is_against_the_tables_first_row_whatever_the_baseline(tmp_path: Path) -> None:
    shifts = {"resformer": 0.0, "vanilla": -0.4}
    folder = make_comparison(tmp_path / "c", shifts, SEEDS)
    header = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(header | {"layouts": ["own/combination"]}))
    comparison = read_comparison(folder)
    table = fill_table(comparison, read_exhibit(comparison.layouts[0]).table)
    bold = {row.variant for row in table.rows if any(cell.is_significant for cell in row.cells)}
    assert (comparison.baseline, table.rows[0].variant, bold) == (
        "resformer", "vanilla", {"resformer"},
    )  # fmt: skip
    page = write_page(comparison_report(comparison, title="t"), tmp_path / "r.html").read_text()
    assert "difference from the first row, paired over seeds, leaves out zero" in page


@pytest.mark.parametrize(
    ("value", "told"),
    [(0, "0"), (6174336.0, "6,174,336"), (1181.25, "1,181.2"), (100, "100"), (9.0, "9.00"),
     (0.5, "0.500"), (-0.0005, "−0.0005"), (43.56, "43.6")],
)  # fmt: skip
def test_counts_are_whole_and_measures_have_three_digits(value: float, told: str) -> None:
    assert layout.format_figure(value) == told
