"""Models from others: Transformers folders, exports and quantized models, whole or refused."""

import json
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from damage import bounded
from helpers import tiny_decoder
from safety.folders import TRIALS, damage_one, with_header
from wakeful.data.tokenizer import Tokenizer
from wakeful.errors import WakefulError
from wakeful.hf.checkpoint_reader import suppress_warnings
from wakeful.hf.weights_out import export_decoder
from wakeful.loading.load import load, read_decoder
from wakeful.quantization.compressed import save_compressed
from wakeful.quantization.convert import quantize_module

pytestmark = pytest.mark.usefixtures("as_users_run_it")
CPU = torch.device("cpu")


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=257, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                    num_attention_heads=2, max_position_embeddings=32)
    )  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Give a folder with a small model of every kind that can be loaded."""
    with suppress_warnings():
        folder = tmp_path_factory.mktemp("models")
        tokenizer = Tokenizer.train(["a b c"], 257)
        llama().save_pretrained(folder / "llama")
        llama().save_pretrained(folder / "sharded", max_shard_size="8KB")
        config = GPT2Config(vocab_size=257, n_positions=32, n_embd=16, n_layer=2, n_head=2)
        GPT2LMHeadModel(config).save_pretrained(folder / "gpt2")
        own = tiny_decoder(dtype=torch.float32, vocab_size=257, route="svformer").eval()
        export_decoder(own, folder / "own", tokenizer=tokenizer)
        save_compressed(quantize_module(llama().eval(), "fine"), folder / "q_llama", lambda _: None)
        for entry in folder.iterdir():
            tokenizer.save(entry)
        yield folder


def use(folder: Path) -> None:
    """Load a folder in every way there is, so that the last refusal counts."""
    if not load(str(folder), device=CPU, dtype=torch.float32).is_quantized:
        read_decoder(folder).tokenizer.encode("a b")


NAMES = ["config.json", "*.safetensors", "*.index.json", "tokenizer*.json"]


@pytest.mark.parametrize("trials", TRIALS)
@pytest.mark.parametrize("name", ["llama", "sharded", "gpt2", "own", "q_llama"])
def test_a_damaged_model_is_loaded_or_refused(
    models: Path, tmp_path: Path, name: str, trials: int
) -> None:
    assert damage_one(models / name, tmp_path / "w", NAMES, use, max(10, trials // 3))


def edited(models: Path, tmp_path: Path, name: str, file: str, change: Callable) -> Path:
    """Return a copy of a model with one JSON file changed."""
    work = shutil.copytree(models / name, tmp_path / "w")
    table = json.loads((work / file).read_text())
    change(table)
    (work / file).write_text(json.dumps(table))
    return work


@pytest.mark.parametrize(
    "change",
    [
        {"num_hidden_layers": 10**9, "n_layer": 10**9},
        {"hidden_size": 2**24, "n_embd": 2**24},
        {"vocab_size": 10**12},
        {"intermediate_size": 10**10, "n_inner": 10**10},
        {"max_position_embeddings": 10**11, "n_positions": 10**11},
    ],
)
@pytest.mark.parametrize("name", ["llama", "gpt2", "q_llama"])
def test_sizes_that_the_weights_have_not_take_no_memory(
    models: Path, tmp_path: Path, name: str, change: dict[str, int]
) -> None:
    if name != "gpt2" and "max_position_embeddings" in change:
        change = {"head_dim": 10**9}
    work = edited(models, tmp_path, name, "config.json", lambda table: table.update(change))
    with bounded(seconds=20, megabytes=700), pytest.raises(WakefulError) as caught:
        load(str(work), device=CPU, dtype=torch.float32)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("layers", [-1, 0, 2.5, "2", None, True, 10**9, 10**400, -(2**70)])
@pytest.mark.parametrize("name", ["llama", "gpt2", "own", "q_llama"])
def test_a_number_of_layers_that_no_model_has_is_one_line(
    models: Path, tmp_path: Path, name: str, layers: object
) -> None:
    def change(table: dict) -> None:
        inner = table.get("parts", table)
        (field,) = {"num_hidden_layers", "n_layer", "num_layers"} & set(inner)
        inner[field] = layers

    work = edited(models, tmp_path, name, "config.json", change)
    for call in (lambda: load(str(work), device=CPU, dtype=torch.float32), lambda: use(work)):
        with bounded(seconds=20, megabytes=700), pytest.raises(WakefulError) as caught:
            call()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["../llama/model.safetensors", "/etc/passwd", "..", "", "a/b.safetensors", "x\0y", 3]
)
def test_an_index_names_no_file_elsewhere(models: Path, tmp_path: Path, name: object) -> None:
    shutil.copytree(models / "llama", tmp_path / "llama")

    def change(table: dict) -> None:
        table["weight_map"] = dict.fromkeys(table["weight_map"], name)

    work = edited(models, tmp_path, "sharded", "model.safetensors.index.json", change)
    for call in (
        lambda: read_decoder(work),
        lambda: load(str(work), device=CPU, dtype=torch.float32),
    ):
        with pytest.raises(WakefulError, match=r"not a shard beside it|not an index of shards"):
            call()


def test_code_beside_a_model_neither_runs_nor_asks(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = tmp_path / "ran"

    def change(table: dict) -> None:
        table["model_type"] = "theirs"
        table["auto_map"] = {name: f"theirs.{name}" for name in
                             ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")}  # fmt: skip

    for name in ("llama", "q_llama"):
        work = edited(models, tmp_path / name, name, "config.json", change)
        (work / "theirs.py").write_text(f"open({str(ran)!r}, 'w')\nclass AutoConfig: ...\n")
        monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks"))
        with pytest.raises(WakefulError, match="describes no model"):
            load(str(work), device=CPU, dtype=torch.float32)
        if name == "llama":
            with pytest.raises(WakefulError, match="describes no model"):
                read_decoder(work)
    assert not ran.exists()


def test_pickled_weights_and_adapters_are_refused(models: Path, tmp_path: Path) -> None:
    work = shutil.copytree(models / "llama", tmp_path / "w")
    state = {"x": torch.zeros(2)}
    (work / "model.safetensors").rename(tmp_path / "kept")
    torch.save(state, work / "pytorch_model.bin")
    with pytest.raises(WakefulError, match="pickled weights are never read"):
        use(work)
    (tmp_path / "kept").rename(work / "model.safetensors")
    (work / "adapter_config.json").write_text('{"base_model_name_or_path": "/somewhere"}')
    with pytest.raises(
        WakefulError, match="holds an adapter of peft without its base model '/somewhere'"
    ):
        use(work)


def entry(**change: object) -> Callable[[bytes], bytes]:
    """Change the first tensor's entry of a safetensors header."""

    def changed(header: bytes) -> bytes:
        table = json.loads(header)
        name = min(key for key in table if key != "__metadata__")
        table[name].update(change)
        return json.dumps(table).encode()

    return changed


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: struct.pack("<Q", 2**63) + content[8:],
        lambda content: struct.pack("<Q", 10**9) + content[8:],
        lambda content: struct.pack("<Q", 0) + content[8:],
        lambda content: content[:7],
        lambda content: b"",
        lambda content: content[:-1],
        lambda content: content + b"\0",
        lambda content: with_header(content, lambda header: b"[" * 100_000),
        lambda content: with_header(content, entry(data_offsets=[0, 2**62])),
        lambda content: with_header(content, entry(data_offsets=[8, 0])),
        lambda content: with_header(content, entry(data_offsets=[-1, 4])),
        lambda content: with_header(content, entry(shape=[2**32, 2**32, 2**32])),
        lambda content: with_header(content, entry(shape=[])),
        lambda content: with_header(content, entry(shape=[-1])),
        lambda content: with_header(content, entry(dtype="F64")),
        lambda content: with_header(content, entry(dtype="BOOL")),
        lambda content: with_header(content, lambda header: header.replace(b"F32", b"I32", 1)),
    ],
)
@pytest.mark.parametrize("name", ["llama", "own"])
def test_a_header_that_lies_is_refused(
    models: Path, tmp_path: Path, name: str, damage: Callable[[bytes], bytes]
) -> None:
    work = shutil.copytree(models / name, tmp_path / "w")
    file = work / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(WakefulError) as caught:
        use(work)
    assert "\n" not in str(caught.value)
