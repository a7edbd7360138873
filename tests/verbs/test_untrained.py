"""`inherit --heal.by none`: what choosing and bridging leave, of memory or of files."""

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
from wakeful.inheritance.untrained import HEIR, PLAIN, REFERENCE, UntrainedHeir
from wakeful.loading.load import read_decoder
from wakeful.paged import Paged
from wakeful.runs.distributed import World
from wakeful.runs.run import Run

__all__ = ["reference", "text", "trained"]
loading = importlib.import_module("wakeful.loading.load")  # whose name a function has, too


@pytest.fixture
def texts(tmp_path: Path) -> dict[str, Any]:
    """Give two texts of drawn letters, and what else makes a small inheritance."""
    drawn, sizes = random.Random(0), {"text": 4000, "validation_text": 400}
    for name, size in sizes.items():
        words = "".join(drawn.choices("etaoin shrdlu", k=size))
        (tmp_path / f"{name}.txt").write_text(words, "utf-8")
    given = {name: str(tmp_path / f"{name}.txt") for name in sizes}
    return given | {"length": 32, "diagnose_length": 32, "device": "cpu"}


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
    place = tmp_path / "llama"
    LlamaForCausalLM(config).to(getattr(torch, request.param)).save_pretrained(place)
    save_tokenizer(place)
    settings = json.loads((place / "tokenizer_config.json").read_text("utf-8"))
    (place / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "<bos>"}))
    return place


def made_of(path: Path, out: Path, **kwargs: Any) -> UntrainedHeir:
    made = wakeful.inherit(path, heal={"by": "none"}, out=str(out), **kwargs)
    assert isinstance(made, UntrainedHeir)
    return made


def test_it_is_what_healing_would_begin_with(reference: Run, text: Path, tmp_path: Path) -> None:
    layers = ["--blocks", "0", "3"]
    there = ["inherit", str(reference.path), "--text", str(text), *layers, *SMALL]
    healed, out = tmp_path / "healed", tmp_path / "out"
    assert main([*there, "--out", str(healed), "--steps", "2"]) == 0
    assert main([*there, "--out", str(out), "--heal.by", "none"]) == 0
    summary = json.loads((healed / "summary.json").read_text())
    found = json.loads((out / "inherit.json").read_text())
    heir = summary["arms"][0]
    assert found["layers"] == heir["layers"] == [0, 3]
    assert found["losses"][HEIR][0] == pytest.approx(heir["start_loss"], abs=1e-6)
    assert found["losses"][REFERENCE][0] == pytest.approx(summary["reference"]["loss"], abs=1e-6)
    assert found["bridges"] == summary["choice"]["bridges"]
    assert found["parameters"][HEIR] == heir["parameters"]
    card = (out / "README.md").read_text()
    for words in ("its layers 0, 3", "Layers 1–2 are bridged", "nothing was trained"):
        assert words in card, words


def test_the_losses_are_those_of_the_files(
    folder: Path, texts: dict[str, Any], tmp_path: Path
) -> None:
    found = made_of(folder, tmp_path / "heir", layers=3, **texts)
    frame, place = found.frame, tmp_path / "heir"
    assert frame.columns == ["window", "tokens", REFERENCE, PLAIN, HEIR]
    polars.testing.assert_frame_equal(pl.read_parquet(place / "windows.parquet"), frame)
    gaps = frame[HEIR] - frame[REFERENCE]
    assert found.costs[HEIR] == weighted_mean(gaps, frame["tokens"])
    theirs = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    assert len(theirs.model.layers) == 3
    tokens = torch.arange(60).view(2, 30) * 7 % 257
    written = read_decoder(place).decoder()
    assert torch.equal(written(tokens), found.model.decoder()(tokens))
    assert torch.allclose(theirs(tokens).logits, written(tokens), atol=1e-4)
    assert any("3 of llama's 5 layers cost" in line for line in found.verdicts)
    assert [shlex.split(step.command)[1] for step in found.report.steps] == ["generate", "quantize"]
    assert main(shlex.split(found.report.steps[0].command)[1:]) == 0
    assert (place / "report.html").read_text().count("are bridged by the layer before them") == 1


def test_without_a_bridge_two_losses_are_told(
    folder: Path, texts: dict[str, Any], tmp_path: Path
) -> None:
    found = made_of(folder, tmp_path / "heir", blocks=(0, 4), bridge={"map": "none"}, **texts)
    assert found.frame.columns == ["window", "tokens", REFERENCE, HEIR]
    before = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    after = load_file(tmp_path / "heir" / "model.safetensors")
    for name, each in after.items():
        assert torch.equal(each, before[name.replace("layers.1.", "layers.4.")]), name


@pytest.mark.parametrize("choose", ["angle", "bridge"])
@pytest.mark.parametrize("kind", ["down", "output"])
def test_files_give_the_same_heir_as_memory(
    folder: Path, texts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    choose: str, kind: str,
) -> None:  # fmt: skip
    given = texts | {"layers": 3, "choose": choose, "bridge": {"map": kind, "tokens": 512}}
    inside = made_of(folder, tmp_path / "inside", **given)
    monkeypatch.setattr(loading, "COPIES", 10**12)
    found = made_of(folder, tmp_path / "found", **given)
    for model in (found.reference, found.model):
        matrices = [each for each in model.module.parameters() if each.ndim > 1]
        assert all(isinstance(each, Paged) for each in matrices)
    assert not any(isinstance(each, Paged) for each in inside.model.module.parameters())
    assert found.summary == inside.summary
    ours, theirs = (tmp_path / name / "model.safetensors" for name in ("found", "inside"))
    assert ours.read_bytes() == theirs.read_bytes()


def test_a_reference_in_its_files_is_healed_from(
    folder: Path, texts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = texts | {"layers": 3, "choose": "bridge", "steps": 2, "batch_size": 2}
    inside = wakeful.inherit(folder, out=str(tmp_path / "inside"), **given)
    monkeypatch.setattr(loading, "COPIES", 10**12)
    found = wakeful.inherit(folder, out=str(tmp_path / "found"), **given)
    ours, theirs = (each.model.module.state_dict() for each in (found, inside))  # pyright: ignore
    assert ours.keys() == theirs.keys()
    stored = AutoModelForCausalLM.from_pretrained(folder).dtype
    apart = 0.0 if stored == torch.float32 else 0.01  # a bridge in a file has the file's type
    assert all(torch.allclose(ours[n], theirs[n], rtol=0, atol=apart) for n in ours)


@pytest.mark.parametrize(
    "more", [["--steps", "3"], ["--baseline", "random"], ["--lr", "1e-3"],
             ["--grow", "1"], ["--heal.alpha", "0.5"]],
)  # fmt: skip
def test_what_only_training_does_is_refused(
    more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = fails(capsys, "inherit", "smollm2", "--heal.by", "none", *more)
    assert more[0].removeprefix("--").rpartition(".")[2] in said
    assert "--heal.by none" in said
    assert "nothing is trained" in said or "predictions are not learned from" in said


def test_several_processes_and_a_folder_that_is_there_are_refused(
    folder: Path, texts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(WakefulError, match="out exists"):
        made_of(folder, tmp_path / "out", **texts)
    several = contextlib.nullcontext(World(size=2))
    monkeypatch.setattr("wakeful.inheritance.tool.joined", lambda: several)
    with pytest.raises(WakefulError, match="leave out torchrun"):
        made_of(folder, tmp_path / "other", **texts)
