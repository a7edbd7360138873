"""`inherit --heal.by none`: heirs that are not trained, of references in memory or in files."""

import contextlib
import importlib
import json
import random
import shlex
from pathlib import Path
from typing import Any

import polars as pl
import polars.testing
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import wakeful
from inheritance.references import SMALL, reference, text, trained
from test_cli import fails
from verbs.test_diagnose import save_tokenizer
from wakeful.cli import main
from wakeful.errors import WakefulError
from wakeful.estimates import weighted_mean
from wakeful.inheritance.untrained import HEIR, REFERENCE, UntrainedHeir
from wakeful.loading.load import read_decoder
from wakeful.paged import Paged
from wakeful.runs.distributed import World
from wakeful.runs.run import Run

__all__ = ["reference", "text", "trained"]
loading = importlib.import_module("wakeful.loading.load")  # whose name a function has, too


@pytest.fixture
def texts(tmp_path: Path) -> dict[str, Any]:
    """Give the options of a small inheritance, with two texts of random letters."""
    generator, sizes = random.Random(0), {"text": 4000, "validation_text": 400}
    for name, size in sizes.items():
        words = "".join(generator.choices("etaoin shrdlu", k=size))
        (tmp_path / f"{name}.txt").write_text(words, "utf-8")
    options = {name: str(tmp_path / f"{name}.txt") for name in sizes}
    return options | {"length": 32, "device": "cpu"}


@pytest.fixture(params=["float32", "bfloat16"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a folder with a random Llama of five layers in one of two types."""
    monkeypatch.setenv("WAKEFUL_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257, hidden_size=32, intermediate_size=48, num_hidden_layers=5,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        initializer_range=0.2,
    )  # fmt: skip
    path = tmp_path / "llama"
    LlamaForCausalLM(config).to(getattr(torch, request.param)).save_pretrained(path)
    save_tokenizer(path)
    settings = json.loads((path / "tokenizer_config.json").read_text("utf-8"))
    (path / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<bos>"}))
    return path


def untrained_heir(path: Path, out: Path, **kwargs: Any) -> UntrainedHeir:
    heir = wakeful.inherit(path, heal={"by": "none"}, out=str(out), **kwargs).untrained
    assert heir is not None
    return heir


def test_it_is_what_healing_would_begin_with(reference: Run, text: Path, tmp_path: Path) -> None:
    layers = ["--blocks", "0", "3"]
    there = ["inherit", str(reference.path), "--text", str(text), *layers, *SMALL]
    healed, out = tmp_path / "healed", tmp_path / "out"
    assert main([*there, "--out", str(healed), "--steps", "2"]) == 0
    assert main([*there, "--out", str(out), "--heal.by", "none"]) == 0
    summary = json.loads((healed / "summary.json").read_text())
    untrained = json.loads((out / "inherit.json").read_text())
    heir = summary["arms"][0]
    assert untrained["layers"] == heir["layers"] == [0, 3]
    losses = untrained["losses"]
    assert losses[HEIR][0] == pytest.approx(heir["start_loss"], abs=1e-6)
    assert losses[REFERENCE][0] == pytest.approx(summary["reference"]["loss"], abs=1e-6)
    assert untrained["bridges"] == summary["bridges"]
    assert untrained["parameters"][HEIR] == heir["parameters"]
    card = (out / "README.md").read_text()
    for words in ("its layers 0, 3", "Layers 1–2 are bridged", "nothing was trained"):
        assert words in card, words


def test_the_losses_are_those_of_the_files(
    folder: Path, texts: dict[str, Any], tmp_path: Path
) -> None:
    heir = untrained_heir(folder, tmp_path / "heir", layers=3, **texts)
    windows, out = heir.windows, tmp_path / "heir"
    assert windows.columns == ["window", "tokens", REFERENCE, HEIR]
    polars.testing.assert_frame_equal(pl.read_parquet(out / "windows.parquet"), windows)
    gaps = windows[HEIR] - windows[REFERENCE]
    assert heir.cost == weighted_mean(gaps, windows["tokens"])
    hf_model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert len(hf_model.model.layers) == 3
    tokens = torch.arange(60).view(2, 30) * 7 % 257
    written = read_decoder(out).decoder()
    assert torch.equal(written(tokens), heir.model.decoder()(tokens))
    assert torch.allclose(hf_model(tokens).logits, written(tokens), atol=1e-4)
    assert any("3 of llama's 5 layers cost" in line for line in heir.report.sentences)
    assert [shlex.split(step.command)[1] for step in heir.report.steps] == ["generate", "quantize"]
    assert main(shlex.split(heir.report.steps[0].command)[1:]) == 0
    assert (out / "report.html").read_text().count("are bridged by the layer before them") == 1


def test_the_result_has_the_same_parts_with_and_without_training(
    folder: Path, texts: dict[str, Any], tmp_path: Path
) -> None:
    made = texts | {"layers": 3, "bridge": {"tokens": 512}}
    trained = wakeful.inherit(folder, out=str(tmp_path / "trained"), steps=1, **made)
    untrained = wakeful.inherit(folder, out=str(tmp_path / "out"), heal={"by": "none"}, **made)
    heir = untrained.untrained
    assert heir is not None
    assert trained.untrained is None
    assert (trained.path, untrained.path) == (tmp_path / "trained", tmp_path / "out")
    assert untrained.page.is_file()
    assert untrained.frame.schema == trained.frame.schema
    assert untrained.frame["arm"].to_list() == [HEIR]
    start = trained.frame.row(0, named=True)
    assert start["loss"] == pytest.approx(heir.losses[HEIR][0], abs=0.01)
    assert untrained.summary == json.loads((untrained.path / "inherit.json").read_text())
    assert untrained.verdicts == heir.report.sentences
    copied = untrained.save(tmp_path / "copy")
    expected = (untrained.path / "model.safetensors").read_bytes()
    assert (copied / "model.safetensors").read_bytes() == expected


def test_without_a_bridge_the_layers_are_the_references(
    folder: Path, texts: dict[str, Any], tmp_path: Path
) -> None:
    options = texts | {"blocks": (0, 4), "bridge": {"map": "none"}}
    untrained_heir(folder, tmp_path / "heir", **options)
    before = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    after = load_file(tmp_path / "heir" / "model.safetensors")
    for name, tensor in after.items():
        assert torch.equal(tensor, before[name.replace("layers.1.", "layers.4.")]), name


@pytest.mark.parametrize("choose", ["angle", "first"])
@pytest.mark.parametrize("kind", ["down", "output"])
def test_files_give_the_same_heir_as_memory(
    folder: Path, texts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    choose: str, kind: str,
) -> None:  # fmt: skip
    options = texts | {"layers": 3, "choose": choose, "bridge": {"map": kind, "tokens": 512}}
    in_memory = untrained_heir(folder, tmp_path / "in_memory", **options)
    monkeypatch.setattr(loading, "COPIES", 10**12)
    paged = untrained_heir(folder, tmp_path / "paged", **options)
    for model in (paged.reference, paged.model):
        matrices = [weight for weight in model.module.parameters() if weight.ndim > 1]
        assert all(isinstance(matrix, Paged) for matrix in matrices)
    assert not any(isinstance(weight, Paged) for weight in in_memory.model.module.parameters())
    assert paged.summary == in_memory.summary
    files = [heir.path / "model.safetensors" for heir in (paged, in_memory)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_reference_in_its_files_is_healed_from(
    folder: Path, texts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = texts | {"layers": 3, "choose": "angle", "steps": 2, "batch_size": 2}
    in_memory = wakeful.inherit(folder, out=str(tmp_path / "in_memory"), **options)
    monkeypatch.setattr(loading, "COPIES", 10**12)
    paged = wakeful.inherit(folder, out=str(tmp_path / "paged"), **options)
    weights, expected = (heir.model.module.state_dict() for heir in (paged, in_memory))
    assert weights.keys() == expected.keys()
    stored = AutoModelForCausalLM.from_pretrained(folder).dtype
    atol = 0.0 if stored == torch.float32 else 0.01  # a bridge in a file has the file's type
    assert all(torch.allclose(weights[n], expected[n], rtol=0, atol=atol) for n in weights)


@pytest.mark.parametrize(
    "more", [["--steps", "3"], ["--baseline", "random"], ["--lr", "1e-3"],
             ["--grow", "1"], ["--heal.alpha", "0.5"]],
)  # fmt: skip
def test_what_only_training_does_is_refused(
    more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = fails(capsys, "inherit", "smollm2", "--heal.by", "none", *more)
    assert more[0].removeprefix("--").rpartition(".")[2] in message
    assert "--heal.by none" in message
    assert "nothing is trained" in message or "predictions are not learned from" in message


def test_several_processes_and_a_folder_that_is_there_are_refused(
    folder: Path, texts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(WakefulError, match="out exists"):
        untrained_heir(folder, tmp_path / "out", **texts)
    several = contextlib.nullcontext(World(size=2))
    monkeypatch.setattr("wakeful.inheritance.tool.join_processes", lambda: several)
    with pytest.raises(WakefulError, match="leave out torchrun"):
        untrained_heir(folder, tmp_path / "other", **texts)
