"""Reports: what they say, that they are whole, and that nothing in a run can break out of them."""

import io
import json
import math
import re
import shutil
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from rich.console import Console

from wakeful.config.schema import Config, config_to_toml
from wakeful.config.tables import to_table
from wakeful.errors import WakefulError
from wakeful.reporting.tool import report
from wakeful.reports.charts import save_chart
from wakeful.reports.html import write_page
from wakeful.reports.terminal import render_terminal
from wakeful.runs.run import environment
from wakeful.training.charts import difference_chart, relative_loss_chart, training_loss_chart
from wakeful.training.compared import read_comparison
from wakeful.training.report import caveat, comparison_report, comparison_verdicts, notes
from wakeful.training.tables import (
    paired_difference,
    relative_training_loss,
    smoothing_window,
    summary_table,
)

STEPS, WINDOWS = 40, 12


def make_run(
    path: Path, name: str, *, seed: int = 0, shift: float = 0.0, corpus: str = "c0"
) -> Path:
    """Write a finished run directory whose losses lie `shift` above a common curve."""
    path.mkdir(parents=True)
    noise = np.random.default_rng(seed)
    config = Config(name=name)
    object.__setattr__(config.train, "seed", seed)
    common = 5.0 - np.linspace(0, 2, STEPS) + 0.1 * noise.standard_normal(STEPS)
    train = [
        {"kind": "train", "step": n + 1, "loss": float(loss + shift), "tokens": 64 * (n + 1),
         "seconds": 0.1 * (n + 1), "tokens_per_second": 640.0}
        for n, loss in enumerate(common)
    ]  # fmt: skip
    windows = 3.0 + 0.2 * noise.standard_normal(WINDOWS)
    wobble = 0.01 * np.random.default_rng(7).standard_normal(WINDOWS) if shift else 0.0
    tokens = [64] * (WINDOWS - 1) + [10]
    pl.DataFrame(train).write_parquet(path / "metrics.parquet")
    pl.DataFrame(
        {"window": range(WINDOWS), "loss": windows + shift + wobble, "tokens": tokens}
    ).write_parquet(path / "validation.parquet")
    files = {
        "run.json": {"format": 1, "kind": "train", "name": name, "status": "done"},
        "environment.json": to_table(environment(torch.device("cpu")))
                            | {"device_name": "CPU", "threads": 2, "torch": "2", "python": "3",
                               "wakeful": "0"},
        "summary.json": {
            "steps": STEPS, "tokens": 64 * STEPS, "seconds": 4.0, "tokens_per_second": 640.0,
            "parameters": {"total": 1000, "embedding": 400, "non_embedding": 600},
            "kv_cache_bytes_per_token": 512, "kv_cache_dtype": "float32",
            "validation": {"loss": 3.0, "standard_error": 0.1, "perplexity": 20.0,
                           "num_windows": WINDOWS, "num_tokens": sum(tokens), "length": 64},
            "diagnosis": {}, "quantization": {}, "bytes": {},
            "data": {"source": ["s"], "corpus_sha256": corpus, "tokenizer": "t",
                     "train_tokens": 1000, "validation_tokens": sum(tokens) + 1,
                     "vocab_size": 300, "train_sha256": "", "validation_sha256": ""},
        },
    }  # fmt: skip
    for file, content in files.items():
        (path / file).write_text(json.dumps(content))
    (path / "config.toml").write_text(config_to_toml(config))
    return path


def make_comparison(path: Path, shifts: dict[str, float], seeds: list[int]) -> Path:
    path.mkdir()
    header = {"format": 1, "kind": "compare", "name": path.name, "status": "done",
              "baseline": next(iter(shifts)), "variants": list(shifts), "seeds": seeds}  # fmt: skip
    (path / "run.json").write_text(json.dumps(header))
    for seed in seeds:
        for number, (name, shift) in enumerate(shifts.items()):
            extra = 0.003 * seed * number
            make_run(path / name / f"seed-{seed}", name, seed=seed, shift=shift + extra)
    return path


def test_differences_are_paired_over_the_windows_of_one_seed(tmp_path: Path) -> None:
    comparison = read_comparison(make_comparison(tmp_path / "c", {"a": 0.0, "b": -0.5}, [0]))
    assert comparison.paired_over("b") == "windows"
    run, base = comparison.pairs("b")[0]
    gaps = (run.validation["loss"] - base.validation["loss"]).to_numpy()
    tokens = run.validation["tokens"].to_numpy()
    mean = (gaps * tokens).sum() / tokens.sum()
    residuals = tokens * (gaps - mean)
    error = math.sqrt(WINDOWS / (WINDOWS - 1) * (residuals**2).sum()) / tokens.sum()
    assert paired_difference(comparison, "b") == pytest.approx((mean, error), rel=1e-12)
    # The windows' own spread of 0.2 cancels in the pairs.
    assert error < 0.01
    assert comparison_verdicts(comparison)[0].startswith("b ends 0.")
    assert "below a." in comparison_verdicts(comparison)[0]
    assert "one seed" in caveat(comparison)


def test_differences_are_paired_over_seeds_where_there_are_several(tmp_path: Path) -> None:
    folder = make_comparison(tmp_path / "c", {"a": 0.0, "b": -0.5, "c": 1e-4}, [0, 1, 2])
    comparison = read_comparison(folder)
    assert comparison.paired_over("b") == "seeds"
    each = [
        np.average(r.validation["loss"], weights=r.validation["tokens"])
        - np.average(b.validation["loss"], weights=b.validation["tokens"])
        for r, b in comparison.pairs("b")
    ]
    expected = np.mean(each), np.std(each, ddof=1) / math.sqrt(3)
    assert paired_difference(comparison, "b") == pytest.approx(expected, rel=1e-9)
    assert "cannot be distinguished" in comparison_verdicts(comparison)[1]
    table = summary_table(comparison)
    assert table["variant"].to_list() == ["a", "b", "c"]
    assert table["seeds"].to_list() == [3, 3, 3]


def test_two_seeds_that_differ_do_not_resolve_a_difference(tmp_path: Path) -> None:
    comparison = read_comparison(make_comparison(tmp_path / "c", {"a": 0.0, "b": -0.005}, [0, 1]))
    difference, error = paired_difference(comparison, "b")
    assert abs(difference) > 2 * error
    assert "cannot be distinguished" in comparison_verdicts(comparison)[0]


def test_relative_loss_is_the_smoothed_difference(tmp_path: Path) -> None:
    comparison = read_comparison(make_comparison(tmp_path / "c", {"a": 0.0, "b": -0.5}, [0, 1]))
    frame = relative_training_loss(comparison, 10)
    assert len(frame) == STEPS
    assert frame["difference"].to_numpy() == pytest.approx(np.full(STEPS, -0.4985), abs=1e-9)
    half = 12.706 * 0.003 / math.sqrt(2) / math.sqrt(2)  # Student's t of two seeds
    assert (frame["high"] - frame["difference"]).to_numpy() == pytest.approx(
        np.full(STEPS, half), abs=1e-9
    )
    assert smoothing_window(comparison) == 50


def test_runs_given_by_hand_are_compared(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "x", "x"), make_run(tmp_path / "y", "y", shift=0.2)]
    comparison = read_comparison(runs)
    assert comparison.baseline == "x"
    assert paired_difference(comparison, "y")[0] == pytest.approx(0.2, abs=0.01)
    with pytest.raises(WakefulError, match="named twice"):
        read_comparison([runs[0], runs[0]])


def test_runs_of_one_name_are_called_by_their_paths_too(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "x", "same"), make_run(tmp_path / "y", "same", shift=0.2)]
    comparison = read_comparison([*runs, make_run(tmp_path / "z", "other")])
    assert comparison.variants == (f"same ({runs[0]})", f"same ({runs[1]})", "other")
    assert paired_difference(comparison, comparison.variants[1])[0] == pytest.approx(0.2, abs=0.01)


def test_runs_on_other_data_are_not_compared(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "x", "x"), make_run(tmp_path / "y", "y", corpus="other")]
    with pytest.raises(WakefulError, match="corpus_sha256 differs"):
        read_comparison(runs)


@pytest.mark.slow
def test_the_summary_of_a_comparison_is_json(tmp_path: Path) -> None:
    folder = make_comparison(tmp_path / "c", {"a": 0.0, "b": -0.5}, [0, 1])
    shutil.rmtree(folder / "b" / "seed-1")
    summary = report(folder, out=tmp_path / "r.html").summary
    assert json.loads(json.dumps(summary))["paired_over"] == {"a": "seeds", "b": "windows"}


@pytest.mark.slow
def test_an_unfinished_run_is_left_out_and_named(tmp_path: Path) -> None:
    folder = make_comparison(tmp_path / "c", {"a": 0.0, "b": 0.1, "d": 0.2}, [0])
    header = folder / "d" / "seed-0" / "run.json"
    header.write_text(header.read_text().replace("done", "stopped"))
    comparison = read_comparison(folder)
    assert comparison.variants == ("a", "b")
    assert comparison.unfinished == ("d, seed 0",)
    page = write_page(comparison_report(comparison, title="t"), tmp_path / "r.html").read_text()
    assert "Not finished and left out: d, seed 0" in page


@pytest.mark.parametrize("file", ["summary.json", "validation.parquet", "config.toml"])
def test_a_damaged_run_is_refused_in_one_line(tmp_path: Path, file: str) -> None:
    run = make_run(tmp_path / "x", "x")
    (run / file).write_bytes(b"\xff[[garbage")
    with pytest.raises(WakefulError, match=re.escape(file.partition(".")[0])) as caught:
        read_comparison(run)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_the_page_is_whole_and_escapes_everything(tmp_path: Path) -> None:
    evil = "</script><img src=x onerror=alert(1)>"
    runs = [make_run(tmp_path / "x", "x"), make_run(tmp_path / "y", evil, shift=0.1)]
    page = write_page(
        comparison_report(read_comparison(runs), title=evil), tmp_path / "r.html"
    ).read_text()
    assert "<img src=x" not in page
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", page)
    assert "default-src 'none'" in page
    specs = re.findall(r'<script type="application/json" class="spec"[^>]*>(.*?)</script>', page)
    assert len(specs) == 3
    assert evil in json.dumps([json.loads(spec) for spec in specs])


def test_a_page_that_fails_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparison = read_comparison(make_run(tmp_path / "x", "x"))
    page = tmp_path / "r.html"
    page.write_text("old")

    def full(self: Path, *_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(WakefulError, match="disk is full"):
        write_page(comparison_report(comparison, title="t"), page)
    monkeypatch.undo()
    assert page.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir() if "part" in entry.name] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suffix", "magic"), [("svg", b"<svg"), ("png", b"\x89PNG"), ("pdf", b"%PDF")]
)
def test_charts_are_written_for_papers(tmp_path: Path, suffix: str, magic: bytes) -> None:
    comparison = read_comparison(make_comparison(tmp_path / "c", {"a": 0.0, "b": -0.5}, [0, 1]))
    charts = [
        relative_loss_chart(comparison),
        difference_chart(comparison),
        training_loss_chart(comparison),
    ]
    for number, chart in enumerate(charts):
        assert chart is not None
        path = save_chart(chart, tmp_path / f"{number}.{suffix}")
        assert path.read_bytes().startswith(magic)
    with pytest.raises(WakefulError, match=r"\.svg, \.png or \.pdf"):
        save_chart(training_loss_chart(comparison), tmp_path / "x.gif")


def test_the_terminal_table_names_every_variant(tmp_path: Path) -> None:
    comparison = read_comparison(make_comparison(tmp_path / "c", {"a": 0.0, "b": -0.5}, [0, 1]))
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(render_terminal(comparison_report(comparison)))
    text = console.export_text()
    assert "baseline" in text
    assert re.search(r"^b .*−0\.500 ± 0\.019", text, re.MULTILINE)


@pytest.mark.slow
def test_what_is_shown_of_other_seeds_is_what_was_compared(tmp_path: Path) -> None:
    folder = make_comparison(tmp_path / "c", {"a": 0.0, "b": -0.5, "c": 0.1, "d": 0.2}, [0, 1, 2])
    for name, seed in (("b", 0), ("b", 2), ("d", 0)):
        shutil.rmtree(folder / name / f"seed-{seed}")
    comparison = read_comparison(folder)
    table = {row["variant"]: row for row in summary_table(comparison).iter_rows(named=True)}
    # b has one seed of the baseline's: loss and difference are both of it.
    base = next(run for run in comparison.of("a") if run.seed == 1)
    theirs = np.average(base.validation["loss"], weights=base.validation["tokens"])
    assert table["b"]["seeds_used"] == "1"
    assert table["b"]["loss"] - theirs == pytest.approx(table["b"]["difference"], abs=1e-12)
    # That b and d have fewer seeds takes nothing from c.
    assert [table[name]["paired_over"] for name in "abcd"] == [
        "seeds", "windows", "seeds", "seeds"
    ]  # fmt: skip
    each = [
        np.average(r.validation["loss"], weights=r.validation["tokens"])
        - np.average(b.validation["loss"], weights=b.validation["tokens"])
        for r, b in comparison.pairs("c")
    ]
    assert len(each) == 3
    expected = np.mean(each), np.std(each, ddof=1) / math.sqrt(3)
    assert paired_difference(comparison, "c") == pytest.approx(expected, rel=1e-9)
    assert table["d"]["seeds_used"] == "1, 2"
    assert "Differences of b are paired over the validation windows of one" in caveat(comparison)
    html = write_page(comparison_report(comparison, title="t"), tmp_path / "r.html").read_text(
        "utf-8"
    )
    assert ">1, 2<" in html
    console = Console(file=io.StringIO(), width=200)
    console.print(render_terminal(comparison_report(comparison)))
    shown = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "seeds" in shown


@pytest.mark.slow
def test_two_seeds_are_told_to_be_few_and_every_figure_has_the_same_interval(
    tmp_path: Path,
) -> None:
    """A verdict, its bar, its table and its files show one interval; two seeds ask for a third."""
    folder = make_comparison(tmp_path / "c", {"a": 0.0, "b": -0.5}, [0, 1])
    comparison = read_comparison(folder)
    row = summary_table(comparison).row(1, named=True)
    reach = 12.706 * row["difference_error"]
    ends = (row["difference"] - reach, row["difference"] + reach)
    assert (row["difference_low"], row["difference_high"]) == pytest.approx(ends)
    few = (
        " Of two seeds it reaches 12.7 standard errors to either side, of three 4.3: train a third"
    )
    assert few in " ".join(notes(comparison))
    more = read_comparison(make_comparison(tmp_path / "d", {"a": 0.0, "b": -0.5}, [0, 1, 2]))
    assert "third seed" not in " ".join(notes(more))
    chart = difference_chart(comparison)
    assert chart is not None
    (drawn,) = (line for rows in chart.to_dict()["datasets"].values() for line in rows
                if line.get("variant") == "b" and "low" in line)  # fmt: skip
    assert (drawn["low"], drawn["high"]) == pytest.approx(ends, rel=1e-5)
    assert not any("error" in name for name in drawn)
    page = write_page(comparison_report(comparison), tmp_path / "r.html").read_text()
    assert "one standard error" not in page
    assert (row["perplexity_low"], row["perplexity_high"]) == pytest.approx(
        (math.exp(row["loss_low"]), math.exp(row["loss_high"]))
    )
