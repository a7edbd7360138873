"""Run directories and prepared data from others: used, or refused in one line."""

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from damage import refusal
from pages.test_report import make_comparison
from safety.folders import TRIALS, damage_one
from training.runs import tiny, write_text
from wakeful.cli import main
from wakeful.config.schema import Config, DataConfig, config_to_toml
from wakeful.data.order import Batches, ValidationWindows
from wakeful.data.preparing import load_data, prepare
from wakeful.errors import Interrupted, WakefulError
from wakeful.loading.load import read_decoder
from wakeful.model.generate import generate_tokens
from wakeful.reports import html
from wakeful.reports.terminal import render_terminal
from wakeful.runs import checkpoint
from wakeful.runs.records import data_facts
from wakeful.terminal.display import Display
from wakeful.training.compared import read_comparison
from wakeful.training.loop import train_run
from wakeful.training.report import comparison_report
from wakeful.training.rows import train_variants

pytestmark = pytest.mark.usefixtures("as_users_run_it")
CHECKPOINT = ["checkpoints/step-00000006/*", "checkpoints/step-00000004/*"]


class StopAfter(Display):
    """Ends the run as SIGTERM does."""

    def step(self, done: int, *_: object) -> None:
        if done == 4:
            os.kill(os.getpid(), signal.SIGTERM)


@contextlib.contextmanager
def stopping(_name: str) -> Iterator[Display]:
    yield StopAfter()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder with prepared data, a finished run on it and one that was stopped."""
    folder = tmp_path_factory.mktemp("runs")
    prepare(
        str(write_text(folder / "text")), folder / "data", vocab_size=280, validation_fraction=0.1
    )
    config = tiny(folder / "data", train={"steps": 6, "checkpoint_every": 0, "eval_every": 0})
    train_run(config, folder / "done")
    with pytest.raises(Interrupted):
        train_run(config, folder / "stopped", show=StopAfter())
    return folder


def write(folder: Path) -> None:
    trained = read_decoder(folder, dtype="auto")
    trained.tokenizer.decode(
        list(generate_tokens(trained.decoder(), [1, 2], num_tokens=3, temperature=0))
    )


def read_data(folder: Path) -> None:
    data = load_data(DataConfig(source=str(folder)))
    data_facts(data)
    batches = Batches(data.train, length=16, batch_size=4, seed=0)
    for step in range(60):
        batches.batch(step)
    list(ValidationWindows(data.validation, length=16, batch_size=4))


@pytest.mark.slow
@pytest.mark.parametrize("trials", TRIALS)
def test_a_damaged_run_writes_or_is_refused(base: Path, tmp_path: Path, trials: int) -> None:
    names = ["run.json", "config.toml", "tokenizer*.json", *CHECKPOINT * 2]
    assert damage_one(base / "done", tmp_path / "w", names, write, trials)


@pytest.mark.slow
@pytest.mark.parametrize("trials", TRIALS)
def test_a_damaged_run_goes_on_or_is_refused(base: Path, tmp_path: Path, trials: int) -> None:
    names = ["run.json", "config.toml", "data.json", "metrics.jsonl", *CHECKPOINT]
    assert damage_one(
        base / "stopped", tmp_path / "w", names,
        lambda folder: train_run(Config(), folder, resume=True), trials,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("trials", TRIALS)
def test_damaged_data_is_read_or_refused(base: Path, tmp_path: Path, trials: int) -> None:
    assert damage_one(base / "data", tmp_path / "w", ["data.json", "*"], read_data, trials)


@pytest.mark.slow
@pytest.mark.parametrize("trials", TRIALS)
def test_a_report_on_damaged_runs_is_written_or_refused(
    tmp_path: Path, trials: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(html, "vega_bundle", lambda: "")

    def report(folder: Path) -> None:
        comparison = read_comparison(folder)
        render_terminal(comparison_report(comparison))
        page = html.write_page(
            comparison_report(comparison, title="t"), folder / "report.html"
        ).read_text("utf-8")
        assert "<i>" not in re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)

    base = make_comparison(tmp_path / "c", {"a": 0.0, "b": -0.5}, [0])
    names = ["run.json", "b/seed-0/*"]
    assert damage_one(base, tmp_path / "w", names, report, trials)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 10_000}, "tensors, and the configuration 10000 layers"),
        ({"num_layers": 10**9}, r"model\.num_layers must be in \[1, 2\*\*14\], got 1000000000"),
        ({"width": 2**40}, "does not fit into memory"),
        ({"mlp_width": 10**15}, "is of another model"),
        ({"max_length": 10**12}, "does not fit into memory"),
        ({"num_heads": 10**6, "head_width": 10**6}, "fit into memory|is of another model"),
    ],
)
@pytest.mark.parametrize("kind", ["done", "stopped"])
def test_sizes_that_the_checkpoint_has_not_take_no_memory(
    base: Path, tmp_path: Path, change: dict[str, int], message: str, kind: str
) -> None:
    work = shutil.copytree(base / kind, tmp_path / "w")
    text = (work / "config.toml").read_text()
    for name, value in change.items():
        text = re.sub(rf"(?m)^{name} = \d+$", f"{name} = {value}", text)
    (work / "config.toml").write_text(text)
    with pytest.raises(WakefulError, match=message):
        write(work)
    with pytest.raises(WakefulError, match=message):
        train_run(Config(), work, resume=True)


def test_a_checkpoint_under_another_steps_name_is_refused(base: Path, tmp_path: Path) -> None:
    work = shutil.copytree(base / "stopped", tmp_path / "w")
    step = checkpoint.newest_checkpoint(work / "checkpoints")
    step.rename(step.with_name("step-00000005"))
    with pytest.raises(WakefulError, match=r"the checkpoint of step 4 by its state\.json"):
        train_run(Config(), work, resume=True)


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "checkpoints", "tensorboard"])
def test_a_run_is_not_written_through_a_link(base: Path, tmp_path: Path, name: str) -> None:
    work = shutil.copytree(base / "stopped", tmp_path / "w")
    victim = tmp_path / "victim"
    if name in ("checkpoints", "tensorboard"):
        shutil.copytree(work / "checkpoints", victim)
    else:
        victim.write_text("precious\n")
    if (work / name).is_dir():
        shutil.rmtree(work / name)
    (work / name).unlink(missing_ok=True)
    (work / name).symlink_to(victim)
    before = sorted(path.name for path in victim.rglob("*")) or victim.read_bytes()
    with pytest.raises(
        WakefulError, match=rf"{name} is a symbolic link, and a run writes only inside"
    ):
        train_run(Config(), work, resume=True)
    assert (sorted(path.name for path in victim.rglob("*")) or victim.read_bytes()) == before


def test_a_comparison_is_not_written_through_a_link(base: Path, tmp_path: Path) -> None:
    config = tiny(base / "data", train={"steps": 6})
    folder = tmp_path / "c"
    variants = {"a": config, "b": config}
    with pytest.raises(Interrupted):
        train_variants(variants, folder, seeds=[0], display=stopping)
    shutil.copytree(folder / "a", tmp_path / "victim")
    shutil.rmtree(folder / "a")
    (folder / "a").symlink_to(tmp_path / "victim")
    with pytest.raises(WakefulError, match="a is a symbolic link"):
        train_variants(variants, folder, seeds=[0], display=stopping, resume=True)


@pytest.mark.parametrize("seed", ["0/../../../../x", "../..", None, 1.5])
def test_seeds_of_a_comparison_are_no_paths(tmp_path: Path, seed: object) -> None:
    folder = make_comparison(tmp_path / "c", {"a": 0.0, "b": -0.5}, [0])
    header = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(header | {"seeds": [0, seed]}))
    with pytest.raises(WakefulError, match=r"seeds\[1\] must be a whole number"):
        read_comparison(folder)


@pytest.mark.parametrize("name", ["run.json", "summary.json", "validation.parquet"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, name: str) -> None:
    folder = make_comparison(tmp_path / "c", {"a": 0.0, "b": -0.5}, [0])
    (folder / "b" / "seed-0" / name).unlink()
    os.mkfifo(folder / "b" / "seed-0" / name)
    if name == "run.json":
        assert read_comparison(folder).unfinished == ("b, seed 0",)
    else:
        with pytest.raises(WakefulError, match=f"{name} is (not a file|missing)"):
            read_comparison(folder)


def test_tokens_past_the_vocabulary_are_refused(base: Path, tmp_path: Path) -> None:
    work = shutil.copytree(base / "data", tmp_path / "w")
    tokens = bytearray((work / "train.tokens").read_bytes())
    tokens[400:600] = b"\xff" * 200
    (work / "train.tokens").write_bytes(tokens)
    with pytest.raises(WakefulError, match=r"train\.tokens is damaged \(id 65535 of 28\d\)"):
        train_run(tiny(work, train={"steps": 60}), tmp_path / "run")


def test_a_tokenizer_with_an_id_past_all_others_takes_no_memory(base: Path, tmp_path: Path) -> None:
    work = shutil.copytree(base / "done", tmp_path / "w")
    table = json.loads((work / "tokenizer.json").read_text())
    table["model"]["vocab"]["x" * 9] = 2**31
    (work / "tokenizer.json").write_text(json.dumps(table))
    with pytest.raises(WakefulError, match=r"an id 2147483648 and \d+ tokens: it is damaged"):
        write(work)


SMALL = ["--length", "16", "--num_sequences", "1", "--device", "cpu"]
VERBS = {
    "diagnose": lambda run, out, text: [run, "--out", out, "--text", text, *SMALL],
    "evaluate": lambda run, out, text: [run, "--out", out, "--text", text, *SMALL],
    "quantize": lambda run, out, text: [
        run, "--out", out, "--text", text, "--scheme", "w4", *SMALL,
    ],
    "generate": lambda run, out, text: [run, "--prompt", "def ", "--num_tokens", "2"],
    "export": lambda run, out, text: [run, out],
    "inherit": lambda run, out, text: [
        run, "--out", out, "--text", text, "--steps", "1", "--length", "16", "--batch_size", "2",
        "--validation_fraction", "0.02", "--layers", "1", "--device", "cpu",
    ],
    "report": lambda run, out, text: [run, "--out", f"{out}.html"],
    "train": lambda run, out, text: ["--resume", run],
    "compare": lambda run, out, text: [
        str(Path(text).parent / "pair.toml"), "--resume", "--out", str(Path(run).parent.parent),
    ],
}  # fmt: skip
"""Every verb that reads a run, as it is typed."""


@pytest.fixture(scope="module")
def pair(base: Path) -> Path:
    """Give a comparison of two finished runs, whose file lies beside it."""
    config = tiny(base / "data", train={"steps": 2, "checkpoint_every": 0, "eval_every": 0})
    variants = '\n[variants.a]\n[variants.b.model]\nroute = "svformer"\n'
    (base / "pair.toml").write_text(config_to_toml(config) + variants)
    assert main(["compare", str(base / "pair.toml"), "--out", str(base / "pair")]) == 0
    return base / "pair"


@pytest.mark.slow
@pytest.mark.parametrize("trials", [
    pytest.param(4, id="few"), pytest.param(200, id="many", marks=pytest.mark.long)
])  # fmt: skip
@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_uses_a_damaged_run_or_refuses_it(
    pair: Path, tmp_path: Path, verb: str, trials: int, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    text = str(pair.parent / "text")
    monkeypatch.setenv("WAKEFUL_CACHE", str(pair.parent / "cache"))
    outs = (str(tmp_path / f"out-{number}") for number in itertools.count())

    def use(folder: Path) -> None:
        run = str(folder / "a" / "seed-0")
        status = main([verb, *VERBS[verb](run, next(outs), text)])
        line = capsys.readouterr().err.strip().splitlines()
        assert status in (0, 1)
        if status:
            raise WakefulError(line[-1])

    files = sorted(path.relative_to(pair) for path in (pair / "a").rglob("*") if path.is_file())
    refused = 0
    work = tmp_path / "w"
    # Each of them missing; of few trials a third of them, another with each verb.
    part = slice(None) if trials > 4 else slice(list(VERBS).index(verb) % 3, None, 3)
    for file in {*files[part], Path("a/seed-0/run.json")}:
        shutil.copytree(pair, work)
        (work / file).unlink()
        refused += bool(refusal(lambda: use(work), seconds=60))
        shutil.rmtree(work)
    assert refused
    names = [str(file) for file in files if file.name not in (".lock", "report.html")]
    damage_one(pair, tmp_path / "w", names, use, trials)
