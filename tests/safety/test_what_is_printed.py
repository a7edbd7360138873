"""What comes from a folder steers no terminal and writes no section of a model's card."""

import io
import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from rich.console import Console
from rich.text import Text
from tokenizers import Regex, decoders
from tokenizers import Tokenizer as Inner

from training.runs import tiny, write_text
from wakeful.cli import main
from wakeful.cli.console import Printer
from wakeful.loading.card import model_card
from wakeful.loading.load import load
from wakeful.runs.run import Run
from wakeful.terminal.display import open_display
from wakeful.terminal.plain_text import escape_controls, escape_markdown
from wakeful.training.loop import train_run

STEERS = [
    "\x1b]0;owned\x07",
    "\x1b[31m",
    "\x9b31m",
    "\u202egnp.exe",
    "\u2066",
    "\x08",
    "\r",
    "\x7f",
    "\x00",
]
FORBIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Give a finished run."""

    place = tmp_path_factory.mktemp("printed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WAKEFUL_CACHE", str(place / "cache"))
        words = write_text(place / "text")
        yield train_run(tiny(words, train={"steps": 1, "eval_every": 0}), place / "run").path


@pytest.mark.parametrize("steers", STEERS)
def test_control_characters_are_drawn(steers: str) -> None:
    assert not FORBIDDEN.search(escape_controls(f"a{steers}b", keep="\n\t"))
    assert escape_controls("\x1b\x7f\n") == "␛␡␊"
    kept = "naïve 日本\u00a0👩\u200d👩 می\u200cخواهم\n\t"
    assert escape_controls(kept, keep="\n\t") == kept


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("steers", STEERS)
def test_progress_sends_a_terminal_nothing_of_a_name(steers: str, terminal: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=160, _environ={})
    with open_display(console, f"run{steers}x") as show:
        show.note(f"loading ev{steers}mil")
        show.count(f"layer{steers}s", 1, 2)
        show.stage(f"file{steers}", 1, 2)
        show.begin(0, 2, f"what{steers}")
        show.step(1, 2, 1.0, 1.0)
    said = re.sub(r"\x1b\[[\d;?]*[A-Za-z]|[\r]", "", out.getvalue())  # rich's own
    assert not FORBIDDEN.search(said)
    assert "31m" not in said or "␛[31m" in said or "�31m" in said


def test_the_printer_draws_what_a_result_holds() -> None:
    out = io.StringIO()
    Printer(file=out, force_terminal=True, _environ={}).print(
        Text("a\x1b]0;owned\x07b\u202e", "red")
    )
    assert (
        re.sub(r"\x1b\[[\d;]*m", "", out.getvalue()).rstrip() == "a␛]0;ownedb�"
    )  # rich drops a bell


def test_generated_text_is_drawn(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = shutil.copytree(folder, tmp_path / "w")
    inner = Inner.from_file(str(work / "tokenizer.json"))
    steals = decoders.Replace(Regex("."), "\x1b]0;owned\x07")
    inner.decoder = decoders.Sequence([decoders.ByteLevel(), steals])
    inner.save(str(work / "tokenizer.json"))
    prompt = ["generate", str(work), "--prompt", "def \x1b[2J", "--num_tokens", "20"]
    assert main([*prompt, "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "␛]0;owned␇" in said
    assert said.startswith("def ␛[2J")
    assert not FORBIDDEN.search(said)


def test_a_message_of_another_library_is_drawn(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert main(["--version"]) == 0
    capsys.readouterr()
    logging.getLogger("another_library").warning("of type %s", "ev\x1b[31mil")
    assert [record.getMessage() for record in caplog.records] == ["of type ev␛[31mil"]


HOSTILE = "mine\n\n## Usage\n\n<script>x</script>[run](http://x) `rm`\n\n```sh\nrm -rf ~\n```\n"


def test_a_name_writes_no_section_of_a_card(folder: Path, tmp_path: Path) -> None:
    work = shutil.copytree(folder, tmp_path / "w")
    config = work / "config.toml"
    quoted = HOSTILE.replace("\n", "\\n")
    config.write_text(
        re.sub(r'(?m)^name = ".*"$', lambda _: f'name = "{quoted}"', config.read_text())
    )
    assert Run(work).config.name == HOSTILE
    run = Run(work)
    table = run.read_json("data.json")
    run.write_json("data.json", table | {"source": [HOSTILE], "corpus_sha256": HOSTILE})
    run.update(initial={"reference": HOSTILE, "arm": HOSTILE, "layers": [0]})
    model = load(work, device="cpu")
    figures = [("mean max |x|", HOSTILE, "1")]
    card = model_card(model, "llama\n\n# Own", f"wakeful export '{HOSTILE}' x", figures=figures)
    read = ModelCard(card)
    headings = [line for line in read.text.splitlines() if line.startswith("#")]
    sections = ("Lineage", "Before and after", "Command")
    assert headings[1:] == [f"## {section}" for section in sections]
    assert "| mean max \\|x\\| | mine" in read.text  # a bar within a cell ends none
    assert read.text.count("\n```") == 2  # how to load it
    assert "<script>" not in re.sub(r"\\<|    .*", "", read.text)
    assert not re.search(r"(?<!\\)\[run", read.text.partition("## Command")[0])


def test_ordinary_names_stay_as_they_are() -> None:
    for name in ("runs/my_run", "HuggingFaceTB/SmolLM2-135M", "svformer, λ=½", "data/x.txt"):
        assert escape_markdown(name) == name
    assert escape_markdown("# a\n- b") == "\\# a␊- b"
