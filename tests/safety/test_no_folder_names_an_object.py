"""A string that comes out of a folder names no Python object: none is imported, none is called."""

import contextlib
import json
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomli_w
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from damage import refusal
from helpers import tiny_decoder
from safety.folders import sign
from safety.test_damaged_runs import StopAfter
from training.runs import tiny, write_text
from wakeful.cli import main
from wakeful.config.schema import Config, DataConfig
from wakeful.data.preparing import load_data, prepare
from wakeful.data.tokenizer import Tokenizer
from wakeful.errors import Interrupted, WakefulError
from wakeful.hf.weights_out import export_decoder
from wakeful.inheritance.tool import inherit
from wakeful.loading.load import load, read_decoder
from wakeful.quantization.compressed import save_compressed
from wakeful.quantization.convert import quantize_module
from wakeful.runs.run import Run
from wakeful.terminal.display import Display
from wakeful.training.cluster import cluster_of
from wakeful.training.loop import train_run

pytestmark = pytest.mark.usefixtures("as_users_run_it")
ABSENT, THERE = "wakeful_canary", "wakeful_witness"
"""A module on the path that nobody has imported, and one that is imported already."""
PLANTED = (
    f"{ABSENT}:fire",
    f"{ABSENT}:fire(word='x')",
    f"{THERE}:fire(word='x')",
    f"{THERE}:Fire",
    f"{ABSENT}.fire",
)
SMALL = ["--batch_size", "4", "--length", "16", "--device", "cpu", "--bridge.tokens",
         "160"]  # fmt: skip
Use = Callable[[Path], object]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Give a folder of whatever a tool reads, each in a folder of its own."""
    base = tmp_path_factory.mktemp("folders")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WAKEFUL_CACHE", str(base / "cache"))
        text = str(write_text(base / "text"))
        prepare(text, base / "data", vocab_size=280, validation_fraction=0.1)
        config = tiny(base / "data", train={"steps": 6, "checkpoint_every": 0, "eval_every": 0})
        train_run(config, base / "run")
        with pytest.raises(Interrupted):
            train_run(config, base / "stopped", show=StopAfter())
        heirs = ["inherit", str(base / "run"), "--text", text, "--out", str(base / "heirs"),
                 "--layers", "1", "--steps", "2", "--baseline", "random", "reference"]  # fmt: skip
        assert main([*heirs, *SMALL]) == 0
        shutil.rmtree(base / "heirs" / "random")
        own = tiny_decoder(dtype=torch.float32, vocab_size=257, route="svformer").eval()
        tokenizer = Tokenizer.train(["a b c"], 257)
        export_decoder(own, base / "export", tokenizer=tokenizer)
        llama = LlamaForCausalLM(
            LlamaConfig(vocab_size=257, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                        num_attention_heads=2, max_position_embeddings=32)
        ).eval()  # fmt: skip
        llama.save_pretrained(base / "llama")
        save_compressed(quantize_module(llama, "fine"), base / "quantized", lambda _: None)
        for name in ("llama", "quantized"):
            tokenizer.save(base / name)
        yield base


@pytest.fixture
def fired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Give the list of what was imported or called, which must stay empty."""
    seen: list[str] = []
    monkeypatch.setattr(sys, "wakeful_seen", seen, raising=False)
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / f"{ABSENT}.py").write_text(
        "import sys\nsys.wakeful_seen.append('imported')\n"
        "def fire(*a, word='', **k):\n    sys.wakeful_seen.append('called')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "path"))
    monkeypatch.chdir(tmp_path / "path")

    class Fire:
        def __init__(self, *_: object, word: str = "") -> None:
            seen.append("made")

    def fire(*_: object, word: str = "") -> None:
        seen.append("called")

    monkeypatch.setitem(sys.modules, THERE, SimpleNamespace(fire=fire, Fire=Fire))  # pyright: ignore
    return seen


def strings(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield where every string of a table is, and every list, in which one can be put."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from strings(item, (*place, key))
    elif isinstance(value, list):
        yield (*place, len(value))
        if len(value) <= 8:  # not every token of a vocabulary
            for number, item in enumerate(value):
                yield from strings(item, (*place, number))
    elif isinstance(value, str):
        yield place


def plant(table: Any, place: tuple[Any, ...], text: str) -> None:
    """Put a text at a place of a table, at the end of a list where nothing is there."""
    for key in place[:-1]:
        table = table[key]
    if isinstance(table, list) and place[-1] == len(table):
        table.append(text)
    else:
        table[place[-1]] = text


def read(file: Path) -> Any:
    return (tomllib.loads if file.suffix == ".toml" else json.loads)(file.read_text("utf-8"))


def write(file: Path, table: Any) -> None:
    dumps = tomli_w.dumps if file.suffix == ".toml" else json.dumps
    file.write_text(dumps(table), "utf-8")


def resume(folder: Path) -> None:
    train_run(Config(), folder, resume=True)


def resume_heirs(folder: Path) -> None:
    Run(folder).set_status("stopped")
    inherit(resume=str(folder), display=lambda _: contextlib.nullcontext(Display()))


def read_data(folder: Path) -> None:
    load_data(DataConfig(source=str(folder)))


def read_model(folder: Path) -> None:
    model = load(str(folder), device="cpu")
    model.tokenizer.decode([1, 2])
    if not model.is_quantized:
        read_decoder(folder)


READ: dict[str, tuple[tuple[str, ...], Use]] = {
    "run": (("run.json", "config.toml", "data.json", "tokenizer_config.json"), read_model),
    "stopped": (
        ("run.json", "config.toml", "data.json", "checkpoints/*/*.json"), resume,
    ),
    "data": (("data.json", "tokenizer_config.json"), read_data),
    "export": (("*.json",), read_model),
    "llama": (("*.json",), read_model),
    "quantized": (("*.json",), read_model),
    "heirs": (("run.json", "recipe.toml", "plan.json", "*/config.toml"), resume_heirs),
}  # fmt: skip
"""The files of each folder that hold names, and what reads them."""


def hurt(base: Path, work: Path, use: Use, file: str, place: tuple[Any, ...], text: str) -> None:
    """Use a copy of a folder in which one string is another."""
    if work.exists():
        shutil.rmtree(work)
    shutil.copytree(base, work)
    table = read(work / file)
    plant(table, place, text)
    write(work / file, table)
    if (work / file).parent.name.startswith("step-"):
        sign((work / file).parent)
    refusal(lambda: use(work), seconds=60, megabytes=2048)


WORST: dict[str, list[tuple[str, tuple[Any, ...]]]] = {
    "stopped": [
        ("config.toml", ("optimizer", "name")),
        ("config.toml", ("model", "route")),
        ("config.toml", ("data", "source")),
    ],
    "export": [("config.json", ("parts", "route"))],
    "heirs": [
        ("recipe.toml", ("baselines", 0)),
        ("recipe.toml", ("optimizer", "name")),
        ("recipe.toml", ("route",)),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WORST)
def test_an_object_named_where_names_are_read_is_not_one(
    folders: Path, tmp_path: Path, fired: list[str], name: str
) -> None:
    for file, place in WORST[name]:
        for text in PLANTED[:3]:
            hurt(folders / name, tmp_path / "w", READ[name][1], file, place, text)
            assert not fired, (file, place, text)
    assert ABSENT not in sys.modules


@pytest.mark.long
@pytest.mark.parametrize("name", READ)
def test_no_string_of_any_file_names_an_object(
    folders: Path, tmp_path: Path, fired: list[str], name: str
) -> None:
    patterns, use = READ[name]
    files = sorted({file for pattern in patterns for file in (folders / name).glob(pattern)})
    assert files
    count = 0
    for file in files:
        own = str(file.relative_to(folders / name))
        for number, place in enumerate(strings(read(file))):
            if file.name == "tokenizer.json" and "vocab" in place:
                continue
            text = PLANTED[number % len(PLANTED)]
            hurt(folders / name, tmp_path / "w", use, own, place, text)
            assert not fired, (own, place, text)
            count += 1
    assert count > 5
    assert ABSENT not in sys.modules


@pytest.mark.slow
def test_what_the_user_writes_is_imported_and_a_file_may_then_name_it(
    folders: Path, tmp_path: Path, fired: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (Path.cwd() / "slow_optimizer.py").write_text(
        "import torch\nclass Slow(torch.optim.SGD):\n"
        "    def __init__(self, groups, lr=0.1):\n        super().__init__(groups, lr=lr)\n"
    )
    name = "slow_optimizer:Slow"
    work = shutil.copytree(folders / "stopped", tmp_path / "own")
    table = read(work / "config.toml")
    table["optimizer"]["name"] = name
    write(work / "config.toml", table)
    with pytest.raises(WakefulError, match=r"slow_optimizer:Slow .*is not part of wakeful"):
        resume(work)
    assert "slow_optimizer" not in sys.modules
    config = tiny(folders / "data", train={"steps": 2}, optimizer={"name": name})
    train_run(config, tmp_path / "mine")  # the user's own configuration
    with pytest.raises(WakefulError, match="checkpoint"):  # of another optimizer's state
        resume(work)
    sys.modules.pop("slow_optimizer")
    assert not fired


def test_a_cluster_is_one_of_two_names(fired: list[str]) -> None:
    for text in PLANTED[:3]:
        with pytest.raises(WakefulError):
            cluster_of(text)
    assert not fired
