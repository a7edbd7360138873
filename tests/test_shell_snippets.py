"""The `wakeful` lines of the pages that a newcomer reads first run in a shell, in their order."""

import os
import re
import string
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import tomli_w

from evaluation.models import save_llama
from test_commands import BEGINS, BLOCK, PLACEHOLDER, ROOT
from training.runs import write_text
from wakeful.config.tables import merge_over_preset, merge_tables, read_preset_table

PAGES = ("README.md", "docs/getting-started.md", "docs/train.md", "docs/compare.md")
SKIPPED: dict[str, str] = {}
"""Lines that no test can run, and why: they need the hub, a GPU or several processes. These pages
have none: such lines have placeholders."""
MODEL = """
[model]
num_layers = {layers}
num_heads = {heads}
width = 16
mlp_width = 24
max_length = 128
[data]
{data}
[train]
steps = 4
batch_size = 2
length = {length}
eval_every = 2
device = "cpu"
{train}
"""
TEXT = 'source = "notes"\nvocab_size = 320\nvalidation_fraction = 0.1'
LOOK = "[train.diagnose]\nevery = 2\nnum_sequences = 2"
PRESETS = {
    "cpu-tiny": MODEL.format(layers=5, heads=2, data=TEXT, length=16, train=""),
    "demo": MODEL.format(layers=2, heads=2, data=TEXT, length=16, train=""),
    "patient": MODEL.format(layers=1, heads=1, data="", length=32, train=LOOK),
    "small-sinks": MODEL.format(layers=2, heads=1, data=TEXT, length=16, train=LOOK),
}
"""What stands on each preset in its place: a file goes before the preset of that name."""
STEPS = re.compile(r"(--(?:train\.)?steps) \d+")
MORE = {
    "wakeful train cpu-tiny --out runs/mixture": "--data.max_bytes 300_000",
}
"""Options that lines which begin so have here besides: less text."""
TRAINED = tuple(f"wakeful train cpu-tiny --out runs/{name}" for name in ("first", "second"))
BEFORE = {"docs/compare.md": TRAINED}
"""Lines of an earlier page whose runs a page speaks of."""


def lines(page: str) -> list[str]:
    """Return the commands of a page's blocks, each once, without those that are forms.

    Those of wakeful, and the folders that are made for them.
    """
    text = (ROOT / page).read_text("utf-8")
    blocks = [found["fenced"] or found["indented"] for found in BLOCK.finditer(text)]
    told = [
        re.sub(r"\s+#.*", "", line).strip()
        for block in blocks
        for line in block.replace("\\\n", " ").splitlines()
        if BEGINS.match(line) or line.lstrip().startswith("mkdir ")
    ]
    return [line for line in dict.fromkeys(told) if not PLACEHOLDER.search(line)]


def table(page: str) -> str:
    """Return a page's only TOML table."""
    (found,) = re.findall(r"```toml\n(.*?)```", (ROOT / page).read_text("utf-8"), re.S)
    return found


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Give a folder with what the pages name in it, each of them tiny."""
    for name, text in PRESETS.items():
        small = merge_tables(merge_over_preset(read_preset_table(name), name), tomllib.loads(text))
        (tmp_path / name).write_text(tomli_w.dumps(small), "utf-8")
    compared = table("docs/compare.md") + PRESETS["cpu-tiny"]
    (tmp_path / "my.toml").write_text(compared, "utf-8")
    write_text(tmp_path / "notes")
    (tmp_path / "notes/characters.txt").write_text(string.printable * 2, "utf-8")
    llama = save_llama(tmp_path / "cache/models/smollm2-135m-instruct")
    config = (llama / "config.json").read_text("utf-8")
    longer = '"max_position_embeddings": 512'  # rotary: no weight knows
    (llama / "config.json").write_text(
        re.sub(r'"max_position_embeddings": \d+', longer, config), "utf-8"
    )
    return tmp_path


def run(line: str, place: Path) -> str:
    """Return what a shell's last words are where a line fails; "" where it does not."""
    environment = {
        **os.environ, "HOME": str(place), "WAKEFUL_CACHE": str(place / "cache"),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }  # fmt: skip
    more = " ".join(options for begins, options in MORE.items() if line.startswith(begins))
    short = STEPS.sub(r"\1 2", line)
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{short} {more}"], cwd=place, env=environment,
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    return "" if done.returncode == 0 else (done.stderr or done.stdout)[-500:]


@pytest.mark.long
@pytest.mark.parametrize("page", PAGES)
def test_the_lines_of_a_page_run_in_a_shell(page: str, place: Path) -> None:
    """In their order, in one new folder, as they stand, but for what would take hours.

    - The presets cpu-tiny, demo, patient and small-sinks are replaced by files of those names: the
      same variants, of a few layers of width 16, trained for 4 steps on a few words.
    - `--train.steps N` and `--steps N` become 2 steps, and `MORE` is appended.
    - smollm2 is a random Llama of two layers, `my.toml` the table of docs/compare.md with the sizes
      of the small cpu-tiny, `notes` a few words.
    - A line that a page has twice runs once, and one with a placeholder (`MODEL`, `...`) does not.
    """
    for line in BEFORE.get(page, ()):
        assert not run(line, place)
    ran = [line for line in lines(page) if line not in SKIPPED]
    failed = {line: wrong for line in ran if (wrong := run(line, place))}
    assert failed == {}


def test_lines_are_found_and_those_skipped_are_lines() -> None:
    found = [line for page in PAGES for line in lines(page)]
    assert len(found) > 25
    assert {*SKIPPED} <= {*found}
    assert all(any(line.startswith(begins) for line in found) for begins in MORE)
    verbs = {line.split()[1] for line in found if line.startswith("wakeful ")}
    assert verbs >= {"cure", "compare", "diagnose", "evaluate", "generate",
                     "inherit", "quantize", "report", "train"}  # fmt: skip
