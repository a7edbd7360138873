"""The command line, as its users type it."""

import io
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from training.runs import text, tiny, write_text
from wakeful.cli import main, verbs
from wakeful.cli.command import choose_out
from wakeful.config.schema import config_to_toml
from wakeful.errors import Interrupted
from wakeful.evaluation.options import EvaluateOptions
from wakeful.loading.load import read_decoder
from wakeful.reports.charts import slug
from wakeful.runs.run import Run
from wakeful.training.compared import read_comparison
from wakeful.training.report import comparison_report

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


@pytest.mark.slow
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


@pytest.mark.slow
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
    assert Run.open(folder).header.variants == ("a", "b c")
    for run in ("a/seed-0", "a/seed-1", "b c/seed-0", "b c/seed-1"):
        assert Run.open(folder / run).header.status == "done"
        assert Run.open(folder / run).config.train.steps == 3
    assert "exists already" in fails(capsys, *command)
    stamp = (folder / "a/seed-0/summary.json").stat().st_mtime_ns
    assert main([*command, "--resume", "--figures", "svg"]) == 0
    titles = [title for title, _ in comparison_report(read_comparison(folder)).charts()]
    assert {path.name for path in (folder / "figures").iterdir()} == {
        f"{slug(title)}.svg" for title in titles
    }
    assert (folder / "a/seed-0/summary.json").stat().st_mtime_ns == stamp
    assert main([*command, "--resume", "--seeds", "5"]) == 0  # it grows
    assert Run.open(folder).header.seeds == (0, 1, 5)
    other = str(tmp_path / "other.html")
    assert (
        main(["report", str(folder / "a/seed-0"), str(folder / "b c/seed-0"), "--out", other]) == 0
    )
    assert "one seed" in Path(other).read_text()
    assert main(["report", str(folder), "--out", other, "--baseline", "b c", "--only", "a"]) == 0
    assert re.search("The validation loss of a is .* that of b c", Path(other).read_text())
    said = fails(capsys, "report", str(folder), "--baseline", "resformer")
    assert "baseline = 'resformer' is none of the variants with a finished run: a, b c" in said


def test_data_is_prepared_and_used(
    text: Path, config: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = str(tmp_path / "data")
    assert main(["prepare", str(text), "--out", out, "--vocab_size", "290"]) == 0
    assert "training and" in capsys.readouterr().out
    assert main(["train", config, "--data.source", out, "--out", str(tmp_path / "r"), *FAST]) == 0
    assert Run.open(tmp_path / "r").config.model.vocab_size <= 290


@pytest.mark.slow
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
    assert "did you mean 'train'" in fails(capsys, "tarin", config)
    assert "neither a file nor a preset" in fails(capsys, "train", "none.toml", *where)
    assert "name a configuration" in fails(capsys, "train", *where)
    assert "holds no model" in fails(capsys, "generate", str(text), "--prompt", "x")
    assert "not a run directory" in fails(capsys, "report", str(text))
    assert "not a run directory" in fails(capsys, "train", "--resume", str(text))
    assert f"did you mean '{text}'?" in fails(capsys, "report", f"{text}s")
    assert f"did you mean '{config}'?" in fails(capsys, "train", f"{config}x", *where)
    assert f"did you mean '{text}'?" in fails(
        capsys, "train", config, "--data.source", f"{text}s", *where
    )
    assert "empty" in fails(capsys, "train", config, "--data.source", str(empty), *where)
    assert "UTF-8" in fails(capsys, "train", config, "--data.source", str(latin), *where)
    few = ["--data.source", str(short), "--data.validation_fraction", "0.5"]
    assert "one sequence of 16 needs 17" in fails(capsys, "train", config, *few, *where)
    same = ["--data.validation_source", str(text / "000.txt")]
    assert "validation overlaps training" in fails(capsys, "train", config, *same, *where)
    assert "did you mean 'resformer'" in fails(
        capsys, "train", config, "--model.route", "resformr", *where
    )
    assert "did you mean 'backcopy'" in fails(
        capsys, "train", config, "--data.source", "bakcopy", *where
    )
    assert "name a configuration" in fails(capsys, "train", "--resume", "", *where)
    assert "did you mean 'smollm2'" in fails(capsys, "generate", "smolm2", "--prompt", "x")
    assert "no CUDA" in fails(capsys, "train", config, "--train.device", "cuda", *where)
    assert "nothing to compare" in fails(capsys, "compare", config, *where)
    assert not out.exists()


@pytest.mark.slow
def test_a_wrong_option_is_refused_with_the_nearest_and_begins_nothing(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "out")]
    for wrong, hint in (
        (["--train.stepz", "3"], "Did you mean --train.steps?"),
        (["--steps=3"], "Did you mean --train.steps?"),
        (["--num-sequences", "3"], "Did you mean --train.quantize.num_sequences?"),
        (["--train.dtype", "float32x"], 'Choose from: "float32", "float64", "bfloat16". Did you'),
    ):
        assert hint in fails(capsys, "train", config, *out, *wrong)
    for wrong, said in (
        (["--train.steps", "many"], 'for --train.steps: unable to convert "many" into int'),
        (["--optimizer.lr=1e-3x"], 'for --optimizer.lr: unable to convert "1e-3x" into float'),
        (["--train.steps"], "--train.steps requires an argument"),
        (["--train.steps", "3", "4"], "takes one configuration, not 2"),
        (["--train.compile", "yes"], "takes one configuration, not 2"),
        (["-x"], "Unknown option: -x"),
        (["--train.steps=3", "-x"], "Unknown option: -x"),
    ):
        assert said in fails(capsys, "train", config, *out, *wrong)
    assert "--prompt requires an argument" in fails(capsys, "generate", "smollm2")
    assert "at least 1" in fails(capsys, "train", config, *out, "--train.steps", "0")
    assert "finite" in fails(capsys, "train", config, *out, "--optimizer.lr", "inf")
    assert "does not divide" in fails(capsys, "train", config, *out, "--model.num_heads", "3")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_unusual_files_and_paths_are_one_line(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "out"), *FAST]
    bad = tmp_path / "bad.toml"
    bad.write_text("[train]\nsteps = " + "1" * 5000)
    assert "is not TOML" in fails(capsys, "train", str(bad), *out)
    bad.write_text("[train]\nstep = 3\n")
    assert "did you mean 'steps'" in fails(capsys, "train", str(bad), *out)
    bad.write_text("[train]\ndtype = 'float'\n")
    assert "did you mean 'float32' or 'float64'" in fails(capsys, "train", str(bad), *out)
    assert "neither a file" in fails(capsys, "train", "x" * 5000, *out)
    assert "Not a directory" in fails(capsys, "train", config, "--out", f"{config}/run", *FAST)
    assert "not UTF-8" in fails(capsys, "train", config, *out, "--name", "\udcff")
    assert "cannot be loaded" in fails(capsys, "generate", "two\nlines", "--prompt", "x")
    assert "name one model" in fails(capsys, "generate", "--prompt", "x")
    assert "name a comparison" in fails(capsys, "report")
    assert "did you mean 'prepare'" in fails(capsys, "prepared")
    assert "name a source" in fails(capsys, "prepare", "--out", str(tmp_path / "d"))
    assert "one configuration, not 2" in fails(capsys, "train", config, config, *out)
    assert "use wakeful compare" in fails(capsys, "train", "demo", *out)
    assert not (tmp_path / "out").exists()


def test_a_name_with_brackets_is_printed_as_it_is(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", config, "--name", "[bold]x[/y]", *FAST]) == 0
    assert "wakeful diagnose 'runs/[bold]x[/y]'" in capsys.readouterr().out
    assert Run.open("runs/[bold]x[/y]").config.name == "[bold]x[/y]"


def test_comparisons_refuse_what_they_would_ignore(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.toml"
    other.write_text("seeds = [1]\n" + Path(config).read_text())
    out = ["--out", str(tmp_path / "out"), *FAST]
    assert "use --seeds" in fails(capsys, "compare", config, str(other), *out)
    seeded = [config, str(other), "--seeds", "2", "--train.seed", "4"]
    assert "train.seed = 4, but a comparison sets the seed" in fails(
        capsys, "compare", *seeded, *out
    )
    twice = [config, str(other), "--seeds", "2", "2"]
    assert "names one twice" in fails(capsys, "compare", *twice, *out)
    assert "two variants are called 'mine'" in fails(capsys, "compare", config, config, *out)
    assert "name one configuration" in fails(capsys, "compare", *out)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_several_configurations_are_compared_by_their_files_names(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.toml"
    other.write_text(Path(config).read_text().replace('"own"', '"svformer"'))
    out = tmp_path / "cmp"
    assert main(["compare", config, str(other), "--out", str(out), *FAST]) == 0
    assert Run.open(out).header.variants == ("mine", "other")
    assert Run.open(out / "other" / "seed-0").config.model.route == "svformer"
    assert "other" in capsys.readouterr().out


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    file = folder / "mine.toml"
    file.write_text(config_to_toml(tiny(write_text(folder / "text"))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WAKEFUL_CACHE", str(folder / "cache"))
        assert main(["train", str(file), "--out", str(folder / "run"), *FAST]) == 0
    return folder / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> str:
    return str(shutil.copytree(trained, tmp_path / "run"))


@pytest.mark.slow
def test_a_finished_run_is_resumed_by_its_path_alone(
    run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--resume", run]) == 0
    assert f"wakeful diagnose {run}" in capsys.readouterr().out
    assert not (Path(run) / "figures").exists()
    assert main(["train", f"--resume={run}", "--figures", "svg"]) == 0
    assert (Path(run) / "figures" / "training-loss.svg").read_text().startswith("<svg")


@pytest.mark.slow
def test_resuming_takes_a_new_length_and_no_other_option(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    longer = ["train", "--resume", run, "--train.steps", "5"]
    assert "no other option" in fails(capsys, *longer, "--optimizer.lr", "2")
    assert "no other option" in fails(capsys, *longer, "--train.batch_size", "3")
    assert "no other option" in fails(capsys, *longer[:3], "--train.batch_size", "3")
    assert "no other option" in fails(capsys, *longer, "--out", str(tmp_path / "elsewhere"))
    assert "train.steps = 2 is less than the 3" in fails(capsys, *longer[:-1], "2")
    assert Run.open(run).config.train.steps == 3
    assert main(longer) == 0
    assert Run.open(run).config.train.steps == 5
    assert Run.open(run).read_json("summary.json")["steps"] == 5


class Stdin:
    """Standard input that holds some bytes."""

    def __init__(self, content: bytes) -> None:
        self.buffer = io.BytesIO(content)


@pytest.mark.slow
def test_prompts_come_from_standard_input_too(
    run: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", Stdin("def é".encode()))
    assert main(["generate", run, "--prompt", "-", "--num_tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("def é")
    monkeypatch.setattr("sys.stdin", Stdin(b"caf\xe9"))
    assert "standard input is not UTF-8" in fails(capsys, "generate", run, "--prompt", "-")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--num_tokens", "40"], "more than the model's context of 32"),
        (["--step", "2"], "has no checkpoint of step 2; it has 3"),
        (["--device", "abacus"], "is not a device"),
    ],
)
def test_impossible_generation_prints_nothing_but_its_line(
    run: str, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["generate", run, "--prompt", "def", *options]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert message in shown.err
    assert shown.err.count("\n") == 1


def test_wrong_numbers_are_found_before_the_model_is_looked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for options, message in (
        (["--num_tokens", "-1"], "num_tokens must not be negative"),
        (["--temperature", "nan"], "temperature must be in [0, inf)"),
        (["--seed", "-1"], "seed must be in"),
        (["--top_p", "1.5"], "top_p must be in (0, 1]"),
        (["--top_k", "-1"], "top_k must not be negative"),
        (["--step", "-1"], "step must not be negative"),
    ):
        assert message in fails(capsys, "generate", "no/such/model", "--prompt", "x", *options)


def test_text_streams_in_whole_characters(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "é漢字😀"
    tokens = read_decoder(run, dtype="auto").tokenizer.encode(text)
    assert len(tokens) > len(text)  # some characters are several tokens
    monkeypatch.setattr("wakeful.loading.model.generate_tokens", lambda *_, **__: iter(tokens))
    written: list[str] = []
    monkeypatch.setattr("sys.stdout.write", lambda piece: written.append(piece) or len(piece))
    assert main(["generate", run, "--prompt", "p"]) == 0
    assert "".join(written) == f"p{text}\n"
    assert "\ufffd" not in "".join(written)
    # As it comes: the first character is out before the last token is in.
    assert written[0] == "p"
    assert [piece for piece in written[1:-1] if piece] == list(text)


def test_two_texts_are_refused(
    run: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "out")]
    for verb, other in (("evaluate", "--texts"), ("inherit", "--data.source")):
        said = fails(capsys, verb, run, "--text", str(text), other, "python-stdlib", *out)
        assert "leave out one of the two" in said or "specified multiple times" in said
        assert other.removeprefix("--") in said
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_what_would_be_ignored_or_lie_elsewhere_is_refused(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path / "..")
    before = set(Path.cwd().rglob("*"))
    one = ["--tokenizer", "x.json", "--vocab_size", "300"]
    out = ["--out", str(tmp_path / "out")]
    assert "leave out one" in fails(capsys, "prepare", "x.txt", *one, *out)
    both = [f"--data.{option.removeprefix('--')}" if option[0] == "-" else option for option in one]
    assert "leave out one" in fails(capsys, "train", config, *both, *out)
    assert "would lie elsewhere" in fails(capsys, "train", config, "--name", "../x", *FAST)
    assert "would lie elsewhere" in fails(capsys, "train", config, "--name", "/tmp/x", *FAST)
    file = Path(config)
    file.write_text(file.read_text() + "\n[variants.a]\n[variants.b]\n")
    assert "a seed lies in" in fails(capsys, "compare", config, *out, *FAST, "--seeds", "-1")
    assert set(Path.cwd().rglob("*")) == before


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "LONG"],
        ["train", "CONFIG", "--out", "LONG"],
        ["train", "CONFIG", "--out", "OUT", "--data.source", "LONG"],
        ["train", "CONFIG", "--out", "OUT", "--data.tokenizer", "LONG"],
        ["train", "--resume", "LONG"],
        ["compare", "LONG", "LONG"],
        ["diagnose", "LONG"],
        ["diagnose", "RUN", "--out", "LONG"],
        ["evaluate", "RUN", "--lambada", "LONG", "--out", "OUT"],
        ["quantize", "RUN", "--out", "OUT", "--scheme", "fine", "--save", "LONG"],
        ["inherit", "LONG"],
        ["inherit", "RUN", "--text", "LONG", "--out", "OUT"],
        ["inherit", "--resume", "LONG"],
        ["export", "LONG", "OUT"],
        ["export", "RUN", "LONG"],
        ["report", "LONG"],
        ["report", "RUN", "--out", "LONG"],
        ["prepare", "LONG", "--out", "OUT"],
        ["prepare", "x.txt", "--out", "LONG"],
        ["generate", "LONG", "--prompt", "x"],
        ["train", "CONFIG", "--out", "OUT", "--model.num_layers", "100000000000000000000"],
        ["train", "CONFIG", "--out", "OUT", "--model.width", "100000000000000000000"],
        ["inherit", "RUN", "--text", "TEXT", "--out", "OUT", "--layers", "100000000000000000000"],
        ["inherit", "RUN", "--text", "TEXT", "--out", "OUT", "--blocks", "100000000000000000000"],
        ["diagnose", "RUN", "--text", "TEXT", "--out", "OUT", "--layers", "100000000000000000000"],
        ["diagnose", "RUN", "--text", "TEXT", "--out", "OUT", "--heads", "-1"],
        ["generate", "RUN", "--prompt", "x", "--num_tokens", "100000000000000000000"],
    ],
)  # fmt: skip
def test_what_is_far_too_long_or_too_large_is_one_line_at_once(
    arguments: list[str],
    run: str,
    config: str,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = {"LONG": "x" * 5000, "RUN": run, "CONFIG": config, "OUT": str(tmp_path / "out"),
             "TEXT": str(text)}  # fmt: skip
    began = time.monotonic()
    line = fails(capsys, *(words.get(word, word) for word in arguments))
    assert time.monotonic() - began < 20
    assert len(line) < 1200
    assert not (tmp_path / "out").exists()


def test_interruptions_have_the_shells_status(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: list[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(verbs.VERBS, "train", replace(verbs.VERBS["train"], run=interrupted))
    assert main(["train", config]) == 130
    assert capsys.readouterr().err == "interrupted\n"

    def saved(_: list[str]) -> None:
        raise Interrupted("stopped by SIGINT after step 3, which is saved", "continue with: x")

    monkeypatch.setitem(verbs.VERBS, "train", replace(verbs.VERBS["train"], run=saved))
    assert main(["train", config]) == 130
    assert "which is saved; continue with" in capsys.readouterr().err


def test_a_mistake_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: list[str]) -> None:
        raise ZeroDivisionError

    monkeypatch.setitem(verbs.VERBS, "train", replace(verbs.VERBS["train"], run=broken))
    with pytest.raises(ZeroDivisionError):
        main(["train", "x"])


@pytest.mark.slow
def test_the_program_runs_in_a_process_of_its_own(run: str) -> None:
    command = [sys.executable, "-m", "wakeful", "generate", run, "--prompt", "def"]
    reader = subprocess.Popen(
        [*command, "--num_tokens", "20"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    # Whoever reads may go away, as `head` does: no traceback.
    assert reader.stdout is not None
    assert reader.stderr is not None
    reader.stdout.close()
    errors = reader.stderr.read()
    reader.stderr.close()
    assert reader.wait() == 141
    assert b"Traceback" not in errors


def ran(command: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Run a line of the shell in which "$@" is wakeful with arguments."""
    wakeful = [sys.executable, "-m", "wakeful", *arguments]
    return subprocess.run(
        ["sh", "-c", command, "sh", *wakeful], capture_output=True, check=False,
        env=os.environ | environment,
    )  # fmt: skip


@pytest.mark.slow
def test_output_is_printable_in_any_encoding_and_may_be_closed() -> None:
    whole = ran('"$@"', "parts", "softmax1")
    plain = ran('"$@"', "parts", "softmax1", PYTHONIOENCODING="ascii")
    assert (whole.returncode, plain.returncode) == (0, 0)
    assert "Σ" in whole.stdout.decode()
    assert rb"\u03a3" in plain.stdout
    closed = ran('"$@" >&-', "presets")
    assert (closed.returncode, closed.stdout, closed.stderr) == (0, b"", b"")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("asked", [("--help",), ("presets",), ("train", "--help")])
def test_an_output_that_takes_nothing_is_said_in_one_line(asked: tuple[str, ...]) -> None:
    done = ran('"$@" > /dev/full', *asked)
    assert done.returncode == 1
    assert done.stderr.decode().splitlines() == [
        f"wakeful {asked[0]}: the output cannot be read or written: No space left on device"
    ]


def test_a_folder_that_is_called_by_a_dot_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path / "model")
    for name, said in ((".", "model"), ("./", "model"), ("..", tmp_path.name), ("a/b.gguf", "b")):
        assert choose_out("evaluate", [name], EvaluateOptions()).out == f"runs/evaluate-{said}"
