"""The command line, as its users type it."""

import re
from pathlib import Path

import pytest

from train.runs import text, tiny
from wakeful.cli import VERBS, main
from wakeful.config import config_to_toml
from wakeful.run import Run

__all__ = ["text"]
FAST = ["--train.steps", "3", "--train.eval_every", "0", "--train.checkpoint_every", "0"]


@pytest.fixture
def config(text: Path, tmp_path: Path) -> str:
    file = tmp_path / "mine.toml"
    file.write_text(config_to_toml(tiny(text)))
    return str(file)


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that must fail with one line; return that line."""
    assert main(list(arguments)) == 1
    errors = capsys.readouterr().err.strip()
    assert "\n" not in errors
    assert errors.startswith(f"wakeful {arguments[0]}: ")
    return errors


def test_train_then_generate(config: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = str(tmp_path / "run")
    assert main(["train", config, "--out", out, *FAST, "--model.route", "resformer"]) == 0
    assert re.search(r"validation loss \d\.\d+ ± \d\.\d+ nats", capsys.readouterr().out)
    assert Run.open(out).config.model.route == "resformer"
    assert main(["generate", out, "--prompt", "def ", "--num_tokens", "5"]) == 0
    first = capsys.readouterr().out
    assert first.startswith("def ")
    assert len(first) > len("def \n")
    assert main(["generate", out, "--prompt", "def ", "--num_tokens", "5"]) == 0
    assert capsys.readouterr().out == first


def test_a_comparison_is_reported(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = tmp_path / "cmp"
    file = Path(config)
    variants = 'seeds = [0, 1]\n{}\n[variants.a]\n[variants."b c".model]\nroute = "svformer"\n'
    file.write_text(variants.format(file.read_text()))
    command = ["compare", config, "--out", str(folder), *FAST]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "b c" in shown
    assert "paired over seeds" in shown
    page = (folder / "report.html").read_text()
    assert "b c" in page
    assert Run.open(folder).header["variants"] == ["a", "b c"]
    for run in ("a/seed-0", "a/seed-1", "b c/seed-0", "b c/seed-1"):
        assert Run.open(folder / run).header["status"] == "done"
        assert Run.open(folder / run).config.train.steps == 3
    assert "exists already" in fails(capsys, *command)
    stamp = (folder / "a/seed-0/summary.json").stat().st_mtime_ns
    assert main([*command, "--resume"]) == 0
    assert (folder / "a/seed-0/summary.json").stat().st_mtime_ns == stamp
    assert "other seeds" in fails(capsys, *command, "--resume", "--seeds", "5")
    other = str(tmp_path / "other.html")
    assert (
        main(["report", str(folder / "a/seed-0"), str(folder / "b c/seed-0"), "--out", other]) == 0
    )
    assert "one seed" in Path(other).read_text()


def test_data_is_prepared_and_used(
    text: Path, config: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = str(tmp_path / "data")
    assert main(["data", "prepare", str(text), "--out", out, "--vocab_size", "290"]) == 0
    assert "training and" in capsys.readouterr().out
    assert main(["train", config, "--data.source", out, "--out", str(tmp_path / "r"), *FAST]) == 0
    assert Run.open(tmp_path / "r").config.model.vocab_size <= 290


def test_bad_input_is_one_line_and_changes_nothing(
    text: Path, config: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "out"
    where = ["--out", str(out), *FAST]
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9 " * 100)
    short = tmp_path / "short.txt"
    short.write_text("a b c d e f\n" * 4)
    assert "unknown verb" in fails(capsys, "tarin", config)
    assert "neither a file nor a preset" in fails(capsys, "train", "none.toml", *where)
    assert "name a configuration" in fails(capsys, "train", *where)
    assert "no run directory" in fails(capsys, "generate", str(text), "--prompt", "x")
    assert "no run directory" in fails(capsys, "report", str(text))
    assert "no run directory" in fails(capsys, "train", "--resume", str(text))
    assert "empty" in fails(capsys, "train", config, "--data.source", str(empty), *where)
    assert "UTF-8" in fails(capsys, "train", config, "--data.source", str(latin), *where)
    few = ["--data.source", str(short), "--data.validation_fraction", "0.5"]
    assert "one sequence of 16 needs 17" in fails(capsys, "train", config, *few, *where)
    same = ["--data.validation_source", str(text / "000.txt")]
    assert "validation overlaps training" in fails(capsys, "train", config, *same, *where)
    assert "did you mean 'resformer'" in fails(
        capsys, "train", config, "--model.route", "resformr", *where
    )
    assert "no CUDA" in fails(capsys, "train", config, "--train.device", "cuda", *where)
    assert "nothing to compare" in fails(capsys, "compare", config, *where)
    assert not out.exists()


def test_resume_takes_no_other_option(config: str, capsys: pytest.CaptureFixture) -> None:
    assert "no other option" in fails(
        capsys, "train", "--resume", "x", "--train.steps", "600", "--optimizer.warmup_steps", "2"
    )


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "data"])
def test_help_names_the_options(verb: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        main([verb, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "--" in shown
    if verb in ("train", "compare"):
        for words in (
            "--train.batch_size INT",
            "Sequences a step",
            "(default: 16)",
            "--model.norm {layernorm",
            "value-residual-82m",
            "svformer(anchors",
        ):
            assert words in shown


def test_the_overview_lists_the_verbs(capsys: pytest.CaptureFixture) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(f"wakeful {verb}" in shown for verb in VERBS)
