"""What the command line says of itself: every verb, every option, every variant."""

import dataclasses
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from training.runs import tiny
from wakeful.cli import VERBS, main
from wakeful.cli.parsing import baselines, catalog
from wakeful.cli.verbs import CompareOptions, DemoOptions, PromptOptions, TrainOptions
from wakeful.config.model import VARIANTS
from wakeful.config.schema import Config, config_to_toml
from wakeful.config.verbs import (
    SHORT,
    CureOptions,
    DiagnoseOptions,
    EvaluateOptions,
    ExportOptions,
    InheritOptions,
    PrepareOptions,
    QuantizeOptions,
    ReportOptions,
    ReproduceOptions,
)
from wakeful.errors import WakefulError
from wakeful.growth.baselines import BASELINES
from wakeful.runs.run import Run
from wakeful.variants import catalog as imported_catalog

OPTIONS = {
    "train": TrainOptions, "compare": CompareOptions, "generate": PromptOptions,
    "data prepare": PrepareOptions, "report": ReportOptions, "diagnose": DiagnoseOptions,
    "demo": DemoOptions, "inherit": InheritOptions, "evaluate": EvaluateOptions,
    "quantize": QuantizeOptions, "export": ExportOptions, "cure": CureOptions,
    "reproduce": ReproduceOptions,
}  # fmt: skip


def options_of(kind: type, prefix: str = "") -> Iterator[tuple[str, str, object]]:
    """Yield every option of a verb: its name, its description in the source and its default."""
    hints = get_type_hints(kind)
    words: dict[str, str] = {}
    for each in reversed(kind.__mro__[:-1]):
        described = re.findall(
            r'^    (\w+): .*\n    """((?:.|\n)+?)"""', inspect.getsource(each), re.M
        )
        words |= {name: " ".join(text.split()) for name, text in described}
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[field.name]):
            below = "" if field.name == "config" else f"{prefix}{field.name}."
            yield from options_of(hints[field.name], below)
        else:
            assert field.name in words, f"{kind.__name__}.{field.name} is not described"
            yield prefix + field.name, words[field.name], field.default


def default_of(kind: type, name: str) -> object:
    """Return an option's default where the parts of a verb's options have defaults of their own."""
    value: Any = kind()
    for part in name.split("."):
        value = getattr(value, part)
    return value


def help_of(capsys: pytest.CaptureFixture[str], *verb: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main([*verb, "--help"])
    assert ended.value.code == 0
    return " ".join(capsys.readouterr().out.replace("│", " ").split())


@pytest.mark.parametrize("verb", OPTIONS)
def test_help_shows_every_option_with_its_description_and_default(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    shown = help_of(capsys, *verb.split())
    found = list(options_of(OPTIONS[verb]))
    assert len(found) == len({name for name, _, _ in found})
    for name, words, plain in found:
        inherits = OPTIONS[verb] is InheritOptions
        default = default_of(InheritOptions, name) if inherits else plain
        assert re.search(rf"--{re.escape(name)}\b", shown), name
        after = shown.split(words, 1)
        assert len(after) == 2, name
        end = after[1].lstrip()[:60]
        if default is dataclasses.MISSING:
            assert end.startswith("(required)"), name
        elif isinstance(default, int | float) and not isinstance(default, bool):
            assert float(re.match(r"\(default: (\S+)\)", end)[1]) == default, name
        else:
            assert end.startswith("(default: "), name
    assert set(VERBS) == {verb.split()[0] for verb in OPTIONS}


def test_help_names_presets_and_variants(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("train", "compare"):
        shown = help_of(capsys, verb)
        for words in ("value-residual-82m", "svformer(anchors", "--model.norm: gated_norm(rank=16)",
                      "--model.rope: plain, linear(factor)"):  # fmt: skip
            assert words in shown
    assert "--out" in help_of(capsys, "data")


def test_every_field_of_the_configuration_is_an_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "mine.toml"
    config.write_text(config_to_toml(tiny(tmp_path)))
    taken: list[Config] = []

    def stub(given: Config, path: str, **_: object) -> Run:
        taken.append(given)
        raise WakefulError(str(path))

    monkeypatch.setattr("wakeful.verbs.train.train_into", stub)
    numbers = {"model.num_layers": 5, "model.num_heads": 8, "model.num_kv_heads": 4,
               "model.width": 48, "model.head_width": 6, "model.max_length": 99,
               "model.rotary_width": 4, "model.relaxed_prefix": 3, "train.length": 21,
               "train.steps": 77, "train.batch_size": 12, "train.micro_batch_size": 6}  # fmt: skip
    words = {"model.norm": "layernorm", "model.positions": "rotary", "model.mlp": "gelu",
             "model.attention_bias": "qkv", "train.dtype": "bfloat16", "name": "other",
             "train.distill.over": "mean", "train.distill.rest": "renormalize",
             "train.lora.modules": "mlp", "train.parallel": "ddp",
             "data.tokenizer": ""}  # fmt: skip
    expected: dict[str, Any] = {}
    arguments: list[str] = []
    for name, _, default in options_of(Config):
        if name == "model.stored_prefix":
            continue
        value: object
        if name == "sample.prompts":
            value = ("a b", "")
            arguments += [f"--{name}", *value]
        elif isinstance(default, tuple):
            value = (3,) if name == "train.distill.layers" else ("text",)
            arguments += [f"--{name}", *map(str, value)]
        elif isinstance(default, bool):
            if default:
                assert name == "data.cross_documents"
                continue
            value = True
            arguments.append(f"--{name}")
        else:
            value = (
                numbers.get(name, 9)
                if isinstance(default, int)
                else 0.125
                if isinstance(default, float)
                else words.get(name, "text")
            )
            arguments += [f"--{name}", str(value)]
        expected[name] = value
    assert main(["train", str(config), "--out", str(tmp_path / "r"), *arguments]) == 1
    for name, value in expected.items():
        found: Any = taken[0]
        for part in name.split("."):
            found = getattr(found, part)
        assert found == value, name
    # A relaxed prefix goes with neither of these.
    alone = ["--data.no_cross_documents", "--model.stored_prefix", "2"]
    assert main(["train", str(config), "--out", str(tmp_path / "r"), *alone]) == 1
    assert taken[1].data.cross_documents is False
    assert taken[1].model.stored_prefix == 2


def test_the_overview_lists_the_verbs(capsys: pytest.CaptureFixture) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(f"wakeful {verb}" in shown for verb in VERBS)


QUICK = ("torch", "transformers", "polars", "numpy", "altair")


def test_help_imports_nothing_heavy() -> None:
    # Every verb's in a fork of its own, of one process that has the command line alone.
    program = (
        "import os, sys\n"
        "from wakeful.cli import main\n"
        "for verb in sys.argv[1:]:\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        try:\n            main([*verb.split(), '--help'])\n"
        "        except SystemExit as ended:\n            assert ended.code == 0\n"
        f"        heavy = [name for name in {QUICK} if name in sys.modules]\n"
        "        print(verb, heavy, file=sys.stderr)\n"
        "        sys.stdout.flush()\n"
        "        os._exit(0)\n"
        "    assert os.waitpid(child, 0)[1] == 0\n"
    )
    verbs = ["", *OPTIONS]
    ended = subprocess.run(
        [sys.executable, "-c", program, *verbs], capture_output=True, text=True, check=True
    )
    assert ended.stderr.splitlines() == [f"{verb} []" for verb in verbs]
    assert ended.stdout.count("wakeful") >= len(verbs)


@pytest.mark.parametrize("folder", VARIANTS.values())
def test_what_help_reads_from_source_is_what_can_be_written(folder: str) -> None:
    assert sorted(catalog(folder)) == sorted(
        f"{entry.name}({entry.signature})".removesuffix("()") for entry in imported_catalog(folder)
    )


def test_help_names_every_baseline() -> None:
    assert list(baselines()) == [f"{name}: {entry.summary}" for name, entry in BASELINES.items()]


def test_short_names_of_an_inheritance_stand_for_options_that_exist() -> None:
    names = {name for name, _, _ in options_of(InheritOptions)}
    assert {target for targets in SHORT.values() for target in targets} <= names
    assert not set(SHORT) & names
