"""Every Python snippet of README and the docs runs, a page's in their order and in one namespace.

What a page names (smollm2, book.txt, runs/first ...) is there in little: a random Llama of two
layers, text of a few words (the standard library, too), runs of a few steps. A snippet that cannot
run says why, in a comment before it: `<!-- not run: REASON -->`.
"""

import re
import shutil
import string
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

import wakeful
from evaluation.models import save_llama
from training.runs import WORDS, write_text
from wakeful.config.schema import load_config, split_variants
from wakeful.config.tables import merge_over_preset
from wakeful.hf.cache import CACHE
from wakeful.model.decoder import Decoder
from wakeful.training.setup import make_optimizer

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"(?:<!-- not run: (?P<why>[^>]+) -->\n+)?```python\n(?P<code>.*?)```", re.S)
PAGES = [
    path.relative_to(ROOT).as_posix()
    for path in [*ROOT.glob("*.md"), *sorted(ROOT.glob("docs/*.md"))]
    if "```python" in path.read_text("utf-8")
]
TINY = """
name = "cpu-tiny"
[model]
num_layers = 5
num_heads = 2
width = 16
mlp_width = 24
max_length = 64
[data]
source = "text"
vocab_size = 280
validation_fraction = 0.1
[optimizer]
warmup_steps = 2
[train]
steps = 4
batch_size = 4
length = 16
device = "cpu"
"""
COMPARED = (
    TINY.replace("num_layers = 5", "num_layers = 2")
    + '[variants.vanilla]\n[variants.resformer.model]\nroute = "resformer"\n'
)

LLAMA = """
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("path/to/folder")
tokenizer = AutoTokenizer.from_pretrained("path/to/folder")
"""
DECODER = """
import wakeful

loaded = wakeful.load("runs/first")
decoder, tokenizer = loaded.decoder(), loaded.wakeful_tokenizer
"""
TRAINER = """
from transformers import Trainer, TrainingArguments

arguments = TrainingArguments("trainer", report_to=[], use_cpu=True)
data = []
"""
STAND_INS = {
    ("docs/getting-started.md", 3): LLAMA + "hf_model, ids = model, torch.tensor([[1, 2, 3]])",
    ("docs/getting-started.md", 5): 'path = "path/to/folder"',
    ("docs/huggingface.md", 0): "import torch; tokens = torch.tensor([[1, 2, 3]])",
    ("docs/huggingface.md", 3): DECODER,
    ("docs/huggingface.md", 4): 'inputs = {"input_ids": tokens}; rows = torch.tensor([0])',
    ("docs/metrics.md", 1): LLAMA + "ids = torch.tensor([[1, 2, 3]])",
    ("docs/orthoadam.md", 0): LLAMA,
    ("docs/orthoadam.md", 3): TRAINER,
    ("docs/quantization.md", 1): DECODER + "model = decoder; import torch\n"
    "tokens = torch.tensor([[1, 2, 3]])",
}
"""Names that a page's n-th snippet takes from the reader, before it."""


def snippets(page: str) -> list[tuple[int, str, str]]:
    """Return the line, the code and the reason not to run it ("" to run it) of each snippet."""
    text = (ROOT / page).read_text("utf-8")
    found = [
        (text[: match.start("code")].count("\n") + 1, match["code"], match["why"] or "")
        for match in FENCE.finditer(text)
    ]
    assert len(found) == text.count("```python"), f"{page}: a fence that is not understood"
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder with what the pages name in it."""
    folder = tmp_path_factory.mktemp("snippets")
    write_text(folder / "text")
    write_text(folder / "library", documents=150)
    (folder / "library/characters.py").write_text(string.printable * 2)
    (folder / "book.txt").write_text(" ".join(WORDS * 400))
    (folder / "cpu-tiny").write_text(TINY)  # a file goes before the preset of that name
    (folder / "my.toml").write_text(COMPARED)
    llama = save_llama(folder / "cache/models/smollm2-135m-instruct")
    config = (llama / "config.json").read_text()
    longer = '"max_position_embeddings": 256'  # rotary: no weight knows
    (llama / "config.json").write_text(re.sub(r'"max_position_embeddings": \d+', longer, config))
    for name in ("path/to/folder", "cured"):
        shutil.copytree(llama, folder / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("WAKEFUL_CACHE", str(folder / "cache"))
        for name in ("runs/first", "runs/second", "runs/mine"):
            wakeful.train("cpu-tiny", out=name, train={"diagnose": {"every": 2, "heads": True}})
    return folder


def test_stand_ins_are_for_snippets_that_there_are() -> None:
    for page, number in STAND_INS:
        assert number < len(snippets(page))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft's
@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize("page", PAGES)
def test_the_snippets_of_a_page_run(
    page: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(place, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WAKEFUL_CACHE", str(tmp_path / "cache"))
    library = [(path.name, path) for path in sorted((tmp_path / "library").iterdir())]
    monkeypatch.setattr("wakeful.data.sources.stdlib_files", lambda: library)
    # A module, so that a class of a snippet's own has one to be found in.
    module = ModuleType("snippet")
    monkeypatch.setitem(sys.modules, "snippet", module)
    for number, (line, code, why) in enumerate(snippets(page)):
        if why:
            continue
        exec(STAND_INS.get((page, number), ""), vars(module))
        padded = "\n" * line + code  # so that a traceback names the page's own line
        for given in ("copy.deepcopy(cache)", "cache"):  # as older Transformers call it
            padded = padded.replace(f", cache={given}", f", {CACHE}={given}")
        exec(compile(padded, str(ROOT / page), "exec"), vars(module))


TABLES = [
    (page.relative_to(ROOT).as_posix(), number, text)
    for page in [*ROOT.glob("*.md"), *sorted(ROOT.glob("docs/*.md"))]
    for number, text in enumerate(re.findall(r"```toml\n(.*?)```", page.read_text("utf-8"), re.S))
]
OUTSIDE = """
from torch.optim import SGD
from wakeful.routes import ResFormer


class MyRoute(ResFormer):
    def __init__(self, *, k: int = 1) -> None:
        super().__init__()
        self.k = k


class MyOptimizer(SGD):
    def __init__(self, params, lr, *, k: int = 1) -> None:
        super().__init__(params, lr)
"""


@pytest.mark.parametrize(
    ("page", "number", "text"), TABLES, ids=[f"{page}-{number}" for page, number, _ in TABLES]
)
def test_the_tables_of_a_page_describe_models_and_optimizers(
    page: str, number: int, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = ModuleType("my_module")
    monkeypatch.setitem(sys.modules, "my_module", outside)
    exec(OUTSIDE, vars(outside))
    table = merge_over_preset({"preset": "cpu-tiny"} | tomllib.loads(text), f"{page}, {number}")
    for row in split_variants("table", table).values():
        config = load_config(row)
        make_optimizer(config, Decoder(replace(config.model, vocab_size=300)))
