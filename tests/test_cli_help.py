"""What the command line says of itself: every verb, every option, every variant."""

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from training.runs import tiny
from wakeful.cli import VERBS, main
from wakeful.cli.compare import CompareOptions
from wakeful.cli.data import PrepareOptions
from wakeful.cli.demo import DemoOptions
from wakeful.cli.diagnose import DiagnoseOptions
from wakeful.cli.evaluate import EvaluateOptions
from wakeful.cli.export import ExportOptions
from wakeful.cli.generate import GenerateOptions
from wakeful.cli.inherit import InheritOptions
from wakeful.cli.quantize import QuantizeOptions
from wakeful.cli.report import ReportOptions
from wakeful.cli.train import TrainOptions
from wakeful.config.schema import Config, config_to_toml
from wakeful.errors import WakefulError
from wakeful.runs.run import Run

OPTIONS = {
    "train": TrainOptions, "compare": CompareOptions, "generate": GenerateOptions,
    "data prepare": PrepareOptions, "report": ReportOptions, "diagnose": DiagnoseOptions,
    "demo": DemoOptions, "inherit": InheritOptions, "evaluate": EvaluateOptions,
    "quantize": QuantizeOptions, "export": ExportOptions,
}  # fmt: skip


def options_of(kind: type, prefix: str = "") -> Iterator[tuple[str, str, object]]:
    """Yield every option of a verb: its name, its description in the source and its default."""
    hints = get_type_hints(kind)
    described = re.findall(r'^    (\w+): .*\n    """((?:.|\n)+?)"""', inspect.getsource(kind), re.M)
    words = {name: " ".join(text.split()) for name, text in described}
    for field in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[field.name]):
            below = "" if field.name in ("config", "wishes") else f"{prefix}{field.name}."
            yield from options_of(hints[field.name], below)
        else:
            assert field.name in words, f"{kind.__name__}.{field.name} is not described"
            yield prefix + field.name, words[field.name], field.default


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
    for name, words, default in found:
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
        for words in ("value-residual-82m", "svformer(anchors", "--model.norm {layernorm"):
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

    monkeypatch.setattr("wakeful.training.loop.train", stub)
    numbers = {"model.num_layers": 5, "model.num_heads": 8, "model.num_kv_heads": 4,
               "model.width": 48, "model.head_width": 6, "model.max_length": 99,
               "model.rotary_width": 4, "model.relaxed_prefix": 3, "train.length": 21,
               "train.steps": 77, "train.batch_size": 12, "train.micro_batch_size": 6}  # fmt: skip
    words = {"model.norm": "layernorm", "model.positions": "rotary", "model.mlp": "gelu",
             "model.attention_bias": "qkv", "train.dtype": "bfloat16", "name": "other",
             "train.distill.over": "mean", "train.parallel": "ddp"}  # fmt: skip
    expected: dict[str, Any] = {}
    arguments: list[str] = []
    for name, _, default in options_of(Config):
        value: object
        if name == "sample.prompts":
            value = ("a b", "")
            arguments += [f"--{name}", *value]
        elif isinstance(default, tuple):
            value = ("text",)
            arguments += [f"--{name}", *value]
        elif isinstance(default, bool):
            value = not default
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


def test_the_overview_lists_the_verbs(capsys: pytest.CaptureFixture) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(f"wakeful {verb}" in shown for verb in VERBS)
