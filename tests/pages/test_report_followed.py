"""What heads came to over training steps, on the page of a comparison."""

import json
from pathlib import Path

import pytest

from pages.test_report import make_comparison
from wakeful.errors import WakefulError
from wakeful.reports.charts import specification
from wakeful.reports.html import write_page
from wakeful.runs.run import Run
from wakeful.training.charts import metric_charts, training_loss_chart
from wakeful.training.compared import read_comparison
from wakeful.training.report import comparison_report
from wakeful.training.tables import followed_figures

# Attention on BOS of two heads at steps 0, 10 and 20, a third of it for the second head.
MASSES = {
    ("ill", 0): (0.02, 0.3, 0.60), ("ill", 1): (0.02, 0.4, 0.62), ("ill", 2): (0.02, 0.5, 0.64),
    ("well", 0): (0.02, 0.02, 0.03), ("well", 1): (0.02, 0.02, 0.01),
    ("well", 2): (0.02, 0.02, 0.017),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = make_comparison(tmp_path / "c", {"ill": 0.0, "well": 0.0, "quiet": 0.0}, [0, 1, 2])
    for (variant, seed), masses in MASSES.items():
        run = Run(path / variant / f"seed-{seed}")
        for step, mass in zip((0, 10, 20), masses, strict=True):
            row = {"kind": "figure", "step": step, "position": "other", "metric": "bos_mass",
                   "variant": "paper", "standard_error": 0.01}  # fmt: skip
            for layer, share in ((0, 1.5), (1, 0.5)):
                for head, of_head in ((None, 1.0), (0, 1.5), (1, 0.5)):
                    value = mass * share * of_head
                    run.append(
                        row | {"layer": layer, "head": head, "value": value},
                        log="trajectories.jsonl",
                    )
            drain = row | {"metric": "value_drain", "position": "first"}
            for layer in (0, 1):
                joined = 1 - mass * (layer + 1) / 2  # of all its heads together, not their mean
                for head, times in ((None, 1.0), (0, 0.5), (1, 2.0)):
                    kind = "paper" if head is None else "per_head"
                    place = {"layer": layer, "head": head, "variant": kind}
                    run.append(drain | place | {"value": joined * times}, log="trajectories.jsonl")
            peak = {"metric": "residual_peak", "position": "first", "head": None}
            for layer, value in ((-1, 99.0), (0, 2.0), (1, 4.0)):  # the embedding is left out
                run.append(row | peak | {"layer": layer, "value": value}, log="trajectories.jsonl")
            run.append({"kind": "validation", "step": step, "loss": 2.0, "standard_error": 0.1,
                        "num_windows": 12, "num_tokens": 714,
                        "excess_loss": 0.5 - step / 100})  # fmt: skip
    return path


@pytest.mark.slow
def test_figures_over_steps_are_means_over_layers_then_seeds(folder: Path) -> None:
    table = followed_figures(read_comparison(folder))
    rows = {(r["figure"], r["variant"], r["step"]): r for r in table.iter_rows(named=True)}
    assert len(rows) == len(table) == 4 * 2 * 3
    assert rows["bos_mass_other", "ill", 10]["value"] == pytest.approx(0.4)
    assert rows["bos_mass_other", "ill", 10]["error"] == pytest.approx(0.1 / 3**0.5)
    assert rows["value_drain_first", "ill", 10]["value"] == pytest.approx(1 - 0.4 * 3 / 4)
    assert rows["residual_peak_first", "well", 20]["value"] == 3.0
    assert rows["excess_loss", "ill", 20]["value"] == pytest.approx(0.3)
    assert {row["seeds"] for row in rows.values()} == {3}
    assert [each.label for each in metric_charts(read_comparison(folder))] == [
        "attention on BOS, no copy due",
        "BOS's value norm over the others'",
        "BOS's residual norm over the others'",
        "loss over the task's own (nats)",
    ]
    chart = specification(metric_charts(read_comparison(folder))[0].draw())
    assert [layer["mark"]["type"] for layer in chart["layer"]] == ["area", "line", "point"]


def test_one_seed_shows_curves_without_bands(folder: Path) -> None:
    header = json.loads((folder / "run.json").read_text()) | {"seeds": [1]}
    (folder / "run.json").write_text(json.dumps(header))
    comparison = read_comparison(folder)
    chart = specification(metric_charts(comparison)[0].draw())
    assert [layer["mark"]["type"] for layer in chart["layer"]] == ["line", "point"]


@pytest.mark.slow
def test_every_line_has_a_color_and_dash_of_its_own(tmp_path: Path) -> None:
    names = [f"v{n}" for n in range(12)]
    comparison = read_comparison(make_comparison(tmp_path / "c", dict.fromkeys(names, 0.0), [0]))
    lines, points = specification(training_loss_chart(comparison))["layer"]
    assert points["encoding"]["color"]["legend"] is None
    encoding = lines["encoding"]
    color, dash = (encoding[name]["scale"] for name in ("color", "strokeDash"))
    assert color["domain"] == dash["domain"] == names
    assert len(set(zip(color["range"], map(tuple, dash["range"]), strict=True))) == 12


@pytest.mark.slow
def test_runs_that_followed_nothing_have_no_curves(tmp_path: Path) -> None:
    comparison = read_comparison(make_comparison(tmp_path / "c", {"a": 0.0, "b": 0.1}, [0, 1]))
    assert followed_figures(comparison).is_empty()
    assert metric_charts(comparison) == []
    page = write_page(comparison_report(comparison, title="t"), tmp_path / "r.html").read_text()
    assert "Heads over training steps" not in page


def test_a_damaged_trajectory_is_refused_by_the_page(folder: Path) -> None:
    file = folder / "well" / "seed-1" / "trajectories.jsonl"
    file.write_text(file.read_text().replace('"value": ', '"valve": ', 1))
    with pytest.raises(WakefulError, match=r"trajectories\.jsonl"):
        read_comparison(folder)
