"""Model cards: what they say is true of the weights beside them, and their commands are taken."""

import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml

import wakeful
from training.runs import tiny, write_text
from wakeful.cli.command import parse_arguments
from wakeful.cli.verbs import VERBS
from wakeful.config.commands import _format_flags, format_command_line
from wakeful.config.keywords import fill_options
from wakeful.config.schema import DataConfig
from wakeful.config.tables import to_table
from wakeful.curing.options import CureOptions
from wakeful.estimates import format_interval
from wakeful.inheritance.options import InheritOptions
from wakeful.quantization.options import QuantizeOptions
from wakeful.runs.records import ValidationRow, logged_rows
from wakeful.runs.run import Run
from wakeful.training.loop import train_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Give a run with a checkpoint every second step and an evaluation every fourth."""
    folder = tmp_path_factory.mktemp("card")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WAKEFUL_CACHE", str(folder / "cache"))
        settings = {"steps": 8, "eval_every": 4, "checkpoint_every": 2, "keep_checkpoints": 9}
        config = tiny(write_text(folder / "text"), model={"num_layers": 3}, train=settings)
        return train_run(config, folder / "run")


ORIGIN = {"reference": "some/model", "arm": "heir-3", "offset": 0, "layers": []}


@pytest.fixture
def begun(run: Run) -> Iterator[Run]:
    """Give the run to a test that changes what run.json says it began with."""
    before = run.read_json("run.json")
    yield run
    run.write_json("run.json", before)


def card(run: Run, folder: Path, **options: Any) -> str:
    wakeful.export(run.path, folder, **options)
    return (folder / "README.md").read_text("utf-8")


@pytest.mark.slow
def test_an_earlier_step_has_figures_of_its_own(run: Run, tmp_path: Path) -> None:
    count = len(pl.read_parquet(run.path / "validation.parquet"))
    losses = {
        row.step: f"Loss {format_interval(row.loss, row.standard_error, count)} nats per token (95%"
        for row in logged_rows(run, ValidationRow)
    }
    assert losses.keys() == {4, 8}
    assert losses[4] != losses[8]
    last = card(run, tmp_path / "last")
    assert "of which 512 were read in 8 steps of 4 × 16" in last
    assert losses[8] in last
    assert card(run, tmp_path / "named", step=8).count(losses[8]) == 1
    earlier = card(run, tmp_path / "earlier", step=4)
    assert "of which 256 were read in 4 steps of 4 × 16" in earlier
    assert losses[4] in earlier
    assert losses[8] not in earlier
    between = card(run, tmp_path / "between", step=6)
    assert "of which 384 were read in 6 steps of 4 × 16" in between
    assert "## Figures" not in between
    assert "Loss" not in between


@pytest.mark.slow
def test_tokens_that_are_drawn_without_end_are_not_none(run: Run, tmp_path: Path) -> None:
    summary = run.read_json("summary.json")
    run.write_json("summary.json", summary | {"data": summary["data"] | {"train_tokens": 0}})
    text = card(run, tmp_path / "model")
    run.write_json("summary.json", summary)
    assert "endless training tokens, of which 512 were read" in text


def test_steps_before_the_run_count_at_an_earlier_step_too(begun: Run, tmp_path: Path) -> None:
    begun.update(initial=ORIGIN | {"arm": "heir", "offset": 10})
    text = card(begun, tmp_path / "model", step=4)
    assert "of which 896 were read in 14 steps of 4 × 16" in text


def test_a_model_with_fewer_layers_has_none_of_the_whole_ones_figures(
    run: Run, tmp_path: Path
) -> None:
    wakeful.inherit(
        run.path, layers=1, choose="first", bridge={"map": "none"}, heal={"by": "none"},
        text=str(run.config.data.source), length=16, out=tmp_path / "shorter",
    )  # fmt: skip
    shorter = (tmp_path / "shorter" / "README.md").read_text("utf-8")
    assert "## Data" in shorter
    assert "## Figures" not in shorter
    assert "Loss" not in shorter


@pytest.mark.slow
def test_what_a_cured_model_had_before_is_said_to_be_that(run: Run, tmp_path: Path) -> None:
    wakeful.cure(
        run.path, rotate="hadamard", text=str(run.config.data.source), length=16, num_sequences=2,
        out=tmp_path / "cured",
    )  # fmt: skip
    text = (tmp_path / "cured/README.md").read_text("utf-8")
    assert "one seed. It was measured before these steps." in text
    assert "measured before" not in card(run, tmp_path / "model")


def test_a_license_holds_where_weights_come_from(begun: Run, tmp_path: Path) -> None:
    begun.update(initial=ORIGIN | {"arm": "random", "baseline": "a start", "random": True})
    text = card(begun, tmp_path / "random")
    begun.update(initial=ORIGIN | {"arm": "whole", "baseline": "all of it", "random": False})
    copied = card(begun, tmp_path / "whole")
    facts = [yaml.safe_load(each.split("---\n")[1]) for each in (text, copied)]
    assert "The baseline random beside the heirs of some/model: a start." in text
    assert "No weight comes from that model." in text
    assert "holds here too" not in text
    assert "base_model" not in facts[0]
    assert "The license of that model holds here too." in copied
    assert facts[1]["base_model"] == "some/model"


INHERITED = [
    InheritOptions(),
    InheritOptions(layers=2, baseline=("random", "reference"), seeds=(3, 0), bos="on"),
    replace(
        InheritOptions(),
        data=DataConfig(source="a b", validation_fraction=0.02, cross_documents=False, bos=True),
    ),
]


@pytest.mark.parametrize("options", INHERITED, ids=range(len(INHERITED)))
def test_the_command_of_an_inheritance_gives_its_options(options: InheritOptions) -> None:
    flags = " ".join(_format_flags(to_table(options), to_table(InheritOptions())))
    _, table = parse_arguments("inherit", VERBS["inherit"], shlex.split(flags))
    assert fill_options(InheritOptions, table) == options


@pytest.mark.parametrize(
    ("verb", "options"),
    [("cure", CureOptions(rotate="hadamard", text="a b.txt", num_sequences=3)),
     ("quantize", QuantizeOptions(text="a b.txt", length=16))],
)  # fmt: skip
def test_the_command_of_a_verb_gives_its_options(verb: str, options: object) -> None:
    command, name, *flags = shlex.split(format_command_line(verb, options, "a model"))[1:]
    assert (command, name) == (verb, "a model")
    names, table = parse_arguments(verb, VERBS[verb], [name, *flags])
    assert (names, fill_options(type(options), table)) == ([name], options)
