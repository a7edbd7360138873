"""Model cards: what they say is true of the weights beside them, and their commands are taken."""

import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from wakeful.inheritance.options import InheritOptions
from wakeful.quantization.options import QuantizeOptions
from wakeful.runs.records import DataFacts
from wakeful.runs.run import Run
from wakeful.terminal.plain_text import escape_markdown
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


def test_a_run_names_its_text(run: Run, tmp_path: Path) -> None:
    data = run.read(DataFacts, "data.json")
    text = f"Its text: {escape_markdown(data.text)} (SHA-256 {data.corpus_sha256})."
    assert text in card(run, tmp_path / "model")


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
    InheritOptions(layers=2, baseline=("random", "reference"), bos="on"),
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
