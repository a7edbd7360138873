"""Quantization and cures on several processes, which share the text."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from polars.testing import assert_frame_equal
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer

from helpers import tiny_decoder
from training import processes
from verbs.test_diagnose import llama
from wakeful.cli import main
from wakeful.config.verbs import CureOptions
from wakeful.errors import WakefulError
from wakeful.quant.observing import merge
from wakeful.quant.schemes.methods import Readers, Seen
from wakeful.surgery import learned_gates, learned_sinks, store_prefix
from wakeful.training.matching import divergence
from wakeful.verbs.retraining import check_retrains
from wakeful.world import World

__all__ = ["llama"]
TEXT = "The quick brown fox jumps over the lazy dog; the dog sleeps on. " * 40
CURES = {
    "sinks": ["--sinks", "--steps", "2", "--batch_size", "2", "--train_length", "16"],
    "chosen": ["--for", "w4a4"],
}  # fmt: skip


def test_two_processes_write_what_one_does(llama: Path, tmp_path: Path) -> None:
    """Scales of text to the bit, GPTQ's sums to rounding; cures; and figures of the text."""
    (tmp_path / "words.txt").write_text(TEXT, "utf-8")
    tokenizer = AutoTokenizer.from_pretrained(llama)
    tokenizer.eos_token = "<bos>"
    tokenizer.save_pretrained(llama)

    def commands(where: str) -> list[list[str]]:
        read = ["--text", str(tmp_path / "words.txt"), "--length", "16", "--num_sequences", "2"]
        kinds = {"static": ["coarse", "--scales", "static"], "gptq": ["w4g128_gptq"],
                 "few": ["w4g128_gptq", "--calibration_sequences", "1"]}  # fmt: skip
        cures = [
            ["cure", str(llama), *read, *given, "--out", str(tmp_path / where / name)]
            for name, given in CURES.items()
        ]
        return cures + [
            ["quantize", str(llama), *read, "--scheme", *kind, "--save",
             str(tmp_path / where / name), "--out", str(tmp_path / where / f"{name}-damage")]
            for name, kind in kinds.items()
        ]  # fmt: skip

    (tmp_path / "job.json").write_text(json.dumps({"commands": commands("two"), "harm": None}))
    running = processes.start(2, str(tmp_path / "job.json"), module="spread_jobs")
    for command in commands("one"):
        assert main(command) == 0
    status, said, errors = processes.ended(running)
    assert status == 0, errors
    assert said.count("cured model") == len(CURES)
    for name in CURES:
        assert_one_cure(*(tmp_path / where / name for where in ("two", "one")))
    for name in ("static", "gptq", "few"):
        one, two = (
            load_file(tmp_path / where / name / "model.safetensors") for where in ("one", "two")
        )
        assert one.keys() == two.keys()
        for key, tensor in one.items():
            if name == "gptq" and key.endswith("integers"):
                assert (two[key] != tensor).float().mean() < 0.01, key
            else:
                assert torch.equal(two[key], tensor), key
        frames = [
            pl.read_parquet(tmp_path / where / f"{name}-damage" / "quantization.parquet")
            for where in ("one", "two")
        ]
        assert frames[0].equals(frames[1]) or name == "gptq"


def assert_one_cure(two: Path, one: Path) -> None:
    """Assert that what was chosen is the same, and weights and figures to rounding."""
    weights, expected = (load_file(place / "model.safetensors") for place in (two, one))
    assert weights.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(weights[key], tensor, rtol=0, atol=2e-5)
    found, figures = (json.loads((place / "cure.json").read_text()) for place in (two, one))
    assert found["prefix"] == figures["prefix"]
    assert found["done"].keys() == figures["done"].keys()
    for arithmetic, each in figures["differences"].items():
        if arithmetic.startswith("float"):
            assert found["differences"][arithmetic] == pytest.approx(each, rel=0.05, abs=1e-5)
    if figures["choice"] is not None:
        assert found["choice"]["chosen"] == figures["choice"]["chosen"]
        for mine, theirs in zip(
            found["choice"]["candidates"], figures["choice"]["candidates"], strict=True
        ):
            assert mine["damage"] == pytest.approx(theirs["damage"], rel=1e-4, abs=1e-5)
    frames = (pl.read_parquet(place / "diagnosis.parquet") for place in (two, one))
    assert_frame_equal(*frames, check_exact=False, rel_tol=1e-3, abs_tol=1e-4)


def test_parts_of_a_text_are_the_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes, one after the other: the first gets what the second had."""
    decoder = tiny_decoder().eval()
    text = torch.randint(29, (3, 11), generator=torch.Generator().manual_seed(0))
    parts: list[Tensor] = []

    def first(_: World, part: Tensor, rows: int) -> Tensor:
        found = torch.cat([part, parts.pop(0)])
        assert len(found) == rows
        return found

    def second(_: World, part: Tensor, rows: int) -> Tensor:
        parts.append(part)
        return torch.cat([part] * 3)[:rows]

    def both(work: Callable[[World], Any]) -> Any:
        for rank, whole in ((1, second), (0, first)):
            with monkeypatch.context() as patch:
                patch.setattr(World, "whole", whole)
                found = work(World(rank, 2))
        assert not parts
        return found

    for fit in (learned_sinks, learned_gates):
        whole = fit(decoder, 3, text)
        for made in (both(partial(fit, decoder, 3, text)), fit(decoder, 3, text, World(0, 4))):
            for name, parameter in made.named_parameters():
                torch.testing.assert_close(parameter, whole.get_parameter(name), rtol=0, atol=1e-9)
    student, teacher = learned_sinks(decoder, 3, text), store_prefix(decoder, [3])
    apart = divergence(student, teacher, text)
    assert both(partial(divergence, student, teacher, text)) == apart
    with pytest.raises(WakefulError, match="multiple of the 2 processes"):
        check_retrains(decoder.float(), CureOptions(sinks=True, steps=1, batch_size=3), World(0, 2))


def test_what_processes_saw_is_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    top, products = torch.tensor([1.0, 5.0]), torch.eye(2)
    readers = Readers(torch.ones(2))
    found = {name: Seen(top, 2.0, products, readers) for name in ("q", "k")}
    monkeypatch.setattr(World, "check_same", lambda *_: None)
    monkeypatch.setattr(World, "most", lambda _, each: each.clamp_min(3))
    monkeypatch.setattr(World, "sum", lambda _, each: 2 * each)
    merge(found, World(0, 2))
    for seen in found.values():
        assert seen.channels.tolist() == [3.0, 5.0]
        assert seen.outputs == 3.0
        assert seen.products is not None
        assert torch.equal(seen.products, 2 * torch.eye(2))  # once, though two layers share it

    def differ(_: World, value: list[str], otherwise: str) -> None:
        raise WakefulError(otherwise)

    monkeypatch.setattr(World, "check_same", differ)
    with pytest.raises(WakefulError, match="calibration_sequences"):
        merge(found, World(0, 2))
