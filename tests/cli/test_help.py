"""What the command line says of itself: every verb, every option, every variant."""

import ast
import dataclasses
import inspect
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from training.runs import tiny
from wakeful.catalog import FOLDERS, NAMES
from wakeful.cli import main
from wakeful.cli.command import list_options
from wakeful.cli.console import OUT
from wakeful.cli.verbs import all_verbs
from wakeful.config import options as declared
from wakeful.config.model import VARIANTS
from wakeful.config.rules import forbidden_options
from wakeful.config.schema import Config, config_to_toml
from wakeful.config.tables import preset_names
from wakeful.errors import WakefulError
from wakeful.inheritance.options import SHORT_NAMES, InheritOptions
from wakeful.optim.build import BUILDERS
from wakeful.quantization.schemes import NAMED
from wakeful.runs.run import Run
from wakeful.variants import variants_by_name

VERBS = all_verbs()
KINDS = {name: verb.options for name, verb in VERBS.items()}


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
            yield from options_of(hints[field.name], f"{prefix}{field.name}.")
        else:
            assert field.name in words, f"{kind.__name__}.{field.name} is not described"
            yield prefix + field.name, words[field.name], field.default


def default_of(kind: type, name: str) -> object:
    """Return an option's default where the parts of a verb's options have defaults of their own."""
    value: Any = kind()
    for part in name.split("."):
        value = getattr(value, part)
    return value


def lines_of(capsys: pytest.CaptureFixture[str], *arguments: str, ask: str = "--help") -> list[str]:
    with pytest.raises(SystemExit) as ended:
        main([*" ".join(arguments).split(), ask])
    assert ended.value.code == 0
    return capsys.readouterr().out.splitlines()


def help_of(capsys: pytest.CaptureFixture[str], *arguments: str, ask: str = "--help") -> str:
    return " ".join(" ".join(lines_of(capsys, *arguments, ask=ask)).replace("│", " ").split())


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"(?<=[ │])(--[a-z][\w.]*)(?= )", text))


@pytest.mark.slow
@pytest.mark.parametrize("verb", KINDS)
def test_all_help_has_every_option_with_its_description_and_default(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = help_of(capsys, verb, ask="--help-all")
    options = [
        each for each in options_of(KINDS[verb]) if each[0] not in forbidden_options(KINDS[verb])
    ]
    assert len(options) == len({name for name, _, _ in options})
    for name, described, plain in options:
        words, default = described, plain
        if verb == "inherit":
            default = default_of(InheritOptions, name)
        words = words.replace("runs/VERB-", f"runs/{verb}-")
        flag = f"--{name.removesuffix('_')}"
        if verb == "inherit" and name in SHORT_NAMES.values():  # two names that may wrap, likewise
            assert flag in shown
            continue
        if default is True:  # its two flags stand above each other, beside the words
            assert f"--no_{flag[2:]}" in shown or re.sub(r"(\w+)$", r"no_\1", flag) in shown
            continue
        found = re.search(rf"{re.escape(flag)} .*?{re.escape(words)}(.{{0,300}})", shown)
        assert found, f"{flag}: {words}"
        end = re.sub(r"^ \[choices: [^\]]+\]", "", found[1])
        if default is dataclasses.MISSING:
            assert end.startswith(" [required]"), name
        elif isinstance(default, int | float) and not isinstance(default, bool):
            value = re.match(r" \[default: (\S+)\]", end)
            assert float(value[1]) == default if default else value is None, name
        elif isinstance(default, bool) or default in ("", ()) or callable(default):
            assert not end.startswith(" [default"), name
        elif isinstance(default, str):
            assert end.startswith(f" [default: {default}]"), name


@pytest.mark.slow
@pytest.mark.parametrize("verb", KINDS)
def test_help_begins_with_two_examples_and_has_the_usual_options_in_groups(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = lines_of(capsys, verb)
    text = "\n".join(lines)
    assert lines[0].startswith(f"Usage: wakeful {verb}")
    assert VERBS[verb].summary in lines
    commands = [line for line in text.partition("╭")[0].split("\n") if line.startswith("wakeful ")]
    assert commands == [command for command, _ in VERBS[verb].examples]
    options = list_options(KINDS[verb])
    usual = {each.flag for each in options if each.group}
    shown = {each.flag for each in options} & flags_in(text)
    assert usual == shown
    titles = re.findall(r"╭─ (.*?) ─", text)
    assert titles == [
        group.value for group in declared.Heading if group in {each.group for each in options}
    ]
    rare = len(options) - len(usual)
    assert len(re.findall(rf"{rare} more options?: wakeful {verb} --help-all", text)) == bool(rare)
    assert len(usual) <= 37


@pytest.mark.slow
@pytest.mark.parametrize("width", [80, 140])
def test_help_fits_the_terminal(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OUT, "_width", width)
    for verb in KINDS:
        lines = lines_of(capsys, verb, ask="--help-all")
        assert [line for line in lines if len(line) > min(width, 100)] == []


ROOT = Path(__file__).parents[2]
EXAMPLE_FILES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("page", EXAMPLE_FILES, ids=lambda page: page.name)
def test_the_commands_of_the_examples_name_their_options(page: Path) -> None:
    tree = ast.parse(page.read_text("utf-8"))
    commands = re.findall(r"^    python (\S+)(.*)", ast.get_docstring(tree) or "", re.M)
    assert [name for name, _ in commands] == ["examples/" + page.name] * len(commands)
    options = {
        argument.arg
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name == "main"
        for argument in (*node.args.args, *node.args.kwonlyargs)
    }
    for _, words in commands:
        assert {word[2:] for word in shlex.split(words) if word.startswith("--")} <= options


@pytest.mark.slow
def test_help_names_presets_and_variants(capsys: pytest.CaptureFixture[str]) -> None:
    names = {
        verb: help_of(capsys, verb).partition(" Configs: ")[2] for verb in ("train", "compare")
    }
    assert sorted(
        word
        for shown in names.values()
        for word in re.split(r",? ", shown)
        if word in preset_names()
    ) == sorted({*preset_names()})
    assert "value-residual-82m" in names["train"]
    for verb, shown in names.items():
        assert "--model.route: own, " in shown
        assert "--model.rope:" not in shown
        assert "--model.rope: plain, linear" in help_of(capsys, verb, ask="--help-all")
    assert "--out" in help_of(capsys, "prepare")
    assert ", ".join(NAMES["quantization.schemes"]) in help_of(capsys, "quantize")
    assert "--for STR" in (shown := help_of(capsys, "cure"))
    assert "for_" not in shown


def test_help_says_how_one_row_is_set(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--steps is --train.steps" in help_of(capsys, "inherit")


@pytest.mark.slow
def test_help_of_an_heir_is_what_an_heir_needs(capsys: pytest.CaptureFixture[str]) -> None:
    def of(ask: str) -> set[str]:
        return flags_in("\n".join(lines_of(capsys, "inherit", ask=ask)))

    usual, whole = of("--help"), of("--help-all")
    assert {"--keep", "--text", "--steps", "--lr", "--out", "--resume"} <= usual <= whole
    assert "--rounds" in whole - usual
    assert not {"--data.tokenizer", "--train.distill.teacher"} & whole  # they are always refused


@pytest.mark.slow
def test_help_is_asked_for_in_several_ways(capsys: pytest.CaptureFixture[str]) -> None:
    plain = lines_of(capsys, "cure")
    assert lines_of(capsys, "cure", ask="-h") == plain
    assert lines_of(capsys, "help", ask="cure") == plain
    assert lines_of(capsys, "cure", "smollm2", "--sinks") == plain
    assert lines_of(capsys, "cure", ask="--help_all") == lines_of(capsys, "cure", ask="--help-all")


@pytest.mark.slow
def test_every_field_of_the_configuration_is_an_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "mine.toml"
    config.write_text(config_to_toml(tiny(tmp_path)))
    taken: list[Config] = []

    def stub(given: Config, path: str, **_: object) -> Run:
        taken.append(given)
        raise WakefulError(str(path))

    monkeypatch.setattr("wakeful.training.tool.train_into", stub)
    numbers = {"model.num_layers": 5, "model.num_heads": 8, "model.num_kv_heads": 4,
               "model.width": 48, "model.head_width": 6, "model.max_length": 99,
               "model.rotary_width": 4, "train.length": 21,
               "train.steps": 77, "train.batch_size": 12, "train.micro_batch_size": 6,
               "model.window": 99}  # fmt: skip
    words = {"model.norm": "layernorm", "model.positions": "rotary", "model.mlp": "gelu",
             "model.attention_bias": "qkv", "train.dtype": "bfloat16", "name": "other",
             "train.distill.over": "mean", "train.parallel": "ddp",
             "data.tokenizer": "", "optimizer.rotation": "haar",
             "optimizer.name": "muon"}  # fmt: skip
    words |= {f"model.{field}": NAMES[folder][1]
              for field, folder in VARIANTS.items()}  # fmt: skip
    expected: dict[str, Any] = {}
    arguments: list[str] = []
    for name, _, default in options_of(Config):
        value: object
        if isinstance(default, tuple):
            value = (3,) if name.endswith("layers") else ("w4",)
            arguments += [f"--{name}", *map(str, value)]
        elif isinstance(default, bool):
            if default:
                assert name == "data.cross_documents"
                expected[name] = False
                arguments.append("--data.no_cross_documents")
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


def test_the_overview_lists_the_verbs(capsys: pytest.CaptureFixture) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(f"│ {verb.partition(' ')[0]} " in shown for verb in VERBS)


QUICK = ("torch", "transformers", "polars", "numpy", "altair", "tyro")


@pytest.mark.slow
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
    verbs = ["", *KINDS]
    ended = subprocess.run(
        [sys.executable, "-c", program, *verbs], capture_output=True, text=True, check=True
    )
    assert ended.stderr.splitlines() == [f"{verb} []" for verb in verbs]
    assert ended.stdout.count("wakeful") >= len(verbs)


@pytest.mark.parametrize("folder", NAMES)
def test_the_catalog_names_what_each_folder_defines(folder: str) -> None:
    known = set(BUILDERS) if folder == "optim" else {*variants_by_name(folder)}
    if folder == "quantization.schemes":
        known = {*NAMED, "scheme"}
    assert {*NAMES[folder]} == known
    assert folder in FOLDERS.values()


WRONG = {
    "train cpu-tiny --train.steps abc": 'for --train.steps: unable to convert "abc" into int',
    "train cpu-tiny --model.route resformr": "model.route='resformr' is not one of own,",
    "train cpu-tiny --optimizer.name adm": "optimizer.name='adm' is not one of adamw",
    "quantize smollm2 --scheme w5": "scheme='w5' is not one of fine, moderate, coarse, w4, w4g128",
    "quantize smollm2 --scheme absmax(bits=8)": "scheme='absmax' is not one of fine, moderate",
    "cure smollm2 --rotate hadamrd": "rotate='hadamrd' is not one of",
    "inherit smollm2 --rounds 3": "--rounds",
    "diagnose nothere --num_sequences -1": "num_sequences must be at least 1, got -1",
    "export smollm2 x.gguf --gguf q4_k_m": 'Invalid value "q4_k_m" for --gguf. Choose from: "auto"',
    "evaluate smollm2 --speed 1 x": 'for --speed: unable to convert "x" into int',
    "generate smollm2 --prompt a --temperature -1": "temperature must be in [0, inf), got -1.0",
    "generate smollm2 --prompt a --top_p 2": "top_p must be in (0, 1], got 2.0",
}


@pytest.fixture(scope="module")
def quick_errors() -> dict[str, str]:
    """Return what each wrong command says, and that it imported nothing heavy to say it."""
    program = (
        "import os, shlex, sys\n"
        "from wakeful.cli import main\n"
        "for command in sys.argv[1:]:\n"
        "    child = os.fork()\n"
        "    if not child:\n"
        "        status = main(shlex.split(command))\n"
        f"        heavy = [name for name in {QUICK} if name in sys.modules]\n"
        "        print('status', status, heavy, file=sys.stderr)\n"
        "        os._exit(0)\n"
        "    assert os.waitpid(child, 0)[1] == 0\n"
    )
    commands = [command.replace("(bits=8)", "'(bits=8)'") for command in WRONG]
    ended = subprocess.run(
        [sys.executable, "-c", program, *commands], capture_output=True, text=True, check=True
    )
    said = ended.stderr.splitlines()
    assert said[1::2] == ["status 1 []"] * len(WRONG)
    return dict(zip(WRONG, said[::2], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("command", WRONG)
def test_a_wrong_value_is_found_before_anything_heavy_is_imported(
    command: str, quick_errors: dict[str, str]
) -> None:
    said = quick_errors[command]
    assert said.startswith(f"wakeful {command.partition(' ')[0]}: ")
    assert WRONG[command] in said
    assert "literal" not in said
    assert " scheme," not in said


@pytest.mark.slow
def test_bars_of_other_libraries_do_not_cut_through_a_sentence() -> None:
    program = (
        "import sys, types\n"
        "def stream_text(*_, **__):\n"
        "    from tqdm import tqdm\n"
        "    for word in tqdm([' a', ' b'], desc='unpacking'):\n"
        "        yield word\n"
        "sys.modules['wakeful.generation.tool'] = types.SimpleNamespace(stream_text=stream_text)\n"
        "from wakeful.cli import main\n"
        "main(['generate', 'model', '--prompt', 'Once'])\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ended.stdout == "Once a b\n"
    assert "unpacking" not in ended.stderr


def test_short_names_of_an_inheritance_stand_for_options_that_exist() -> None:
    names = {name for name, _, _ in options_of(InheritOptions)}
    assert {*SHORT_NAMES.values()} <= names
    assert not set(SHORT_NAMES) & names


@pytest.mark.parametrize("verb", ["cure", "quantize", "export", "diagnose", "evaluate"])
def test_help_names_quantized_models_where_the_verb_takes_them(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    takes = verb in ("diagnose", "evaluate")
    assert ("a hub name or a quantized model" in help_of(capsys, verb)) == takes
