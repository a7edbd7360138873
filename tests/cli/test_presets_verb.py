"""The catalogue of presets: the listing, the page, the file itself."""

import pytest

from tool import tool_of
from wakeful.cli import main
from wakeful.cli.console import OUT
from wakeful.cli.verbs import list_presets
from wakeful.config.schema import config_from_table, split_variants
from wakeful.config.tables import preset_names, read_preset, read_table
from wakeful.demonstration.presets import compute_preset_facts

TOOL = tool_of("presets")


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_begins_with_a_line_that_says_what_it_is(name: str) -> None:
    first = read_preset(name).splitlines()[0]
    assert first.startswith("# ")
    assert first.endswith(".")
    assert len(first) <= 90


def test_what_compares_is_told_from_what_trains_alone() -> None:
    several = [name for name in preset_names() if "variants" in read_table(name)]
    assert list_presets(several=True) == several
    assert list_presets(several=False) == [name for name in preset_names() if name not in several]


@pytest.mark.slow
def test_facts_are_those_of_the_file() -> None:
    small = compute_preset_facts("cpu-tiny")
    config = config_from_table(read_table("cpu-tiny"))
    assert (small.variants, small.seeds, small.runs) == (1, 1, "1")
    assert small.tokens == config.train.steps * config.train.batch_size * config.train.length
    # 8 layers of 4 · 128² + 3 · 128 · 344 and two norms, 4,096 tokens twice, and the last norm.
    assert small.parameters == 8 * (4 * 128**2 + 3 * 128 * 344 + 2 * 128) + 2 * 4096 * 128 + 128
    multiplied = small.parameters - 4096 * 128
    attention = 8 * config.train.length * 128
    assert small.operations == 6.0 * (multiplied + attention) * small.tokens
    # Value embeddings, a table in every other layer, are parameters that are looked up.
    assert compute_preset_facts("wakeful-best").parameters == 298_496

    patient = compute_preset_facts("patient")
    rows = split_variants("patient", read_table("patient"))
    assert patient.runs == f"{len(rows)} × 3"
    assert patient.tokens == len(rows) * 3 * 1200 * 32 * 128
    # The task has 97 tokens, whatever a tokenizer would have.
    assert patient.parameters < 100_000


@pytest.mark.slow
def test_the_page_of_the_site_lists_every_preset() -> None:
    page = TOOL.page()
    assert "40 GFLOP/s on two cores" in page
    names = [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")]
    assert names != preset_names()  # from the cheapest up
    assert sorted(names) == preset_names()


@pytest.mark.slow
def test_presets_are_listed_and_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OUT, "_width", 80)
    monkeypatch.setattr(
        "wakeful.demonstration.presets.estimate_seconds", lambda *_: 1 / TOOL.TWO_CORES
    )
    assert main(["presets"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert all(name in shown for name in preset_names())
    assert main(["presets", "cpu-tiny"]) == 0
    assert capsys.readouterr().out == read_preset("cpu-tiny")
    assert main(["presets", "cpu-tny"]) == 1
    assert "did you mean 'cpu-tiny'" in capsys.readouterr().err
    assert main(["presets", "demo", "arena"]) == 1
    assert "name one preset, not 2" in capsys.readouterr().err
