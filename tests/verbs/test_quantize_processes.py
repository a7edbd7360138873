"""Quantization on several processes, which share the calibration text."""

import json
from pathlib import Path

import polars as pl
import pytest
import torch
from safetensors.torch import load_file

from training import processes
from verbs.test_diagnose import llama
from wakeful.cli import main
from wakeful.errors import WakefulError
from wakeful.quant.merging import merge
from wakeful.quant.schemes.seen import Readers, Seen
from wakeful.world import World

__all__ = ["llama"]
TEXT = "The quick brown fox jumps over the lazy dog; the dog sleeps on. " * 20


def test_two_processes_write_what_one_does(llama: Path, tmp_path: Path) -> None:
    """Scales of text to the bit, GPTQ's sums to rounding; and figures of the text."""
    (tmp_path / "words.txt").write_text(TEXT, "utf-8")

    def commands(where: str) -> list[list[str]]:
        read = ["--text", str(tmp_path / "words.txt"), "--length", "16", "--num_sequences", "2"]
        kinds = {"static": ["coarse", "--scales", "static"], "gptq": ["w4g128_gptq"],
                 "few": ["w4g128_gptq", "--calibration_sequences", "1"]}  # fmt: skip
        return [
            ["quantize", str(llama), *read, "--scheme", *kind, "--save",
             str(tmp_path / where / name), "--out", str(tmp_path / where / f"{name}-damage")]
            for name, kind in kinds.items()
        ]  # fmt: skip

    (tmp_path / "job.json").write_text(json.dumps({"commands": commands("two"), "harm": None}))
    running = processes.start(2, str(tmp_path / "job.json"), module="spread_jobs")
    for command in commands("one"):
        assert main(command) == 0
    status, _, errors = processes.ended(running)
    assert status == 0, errors
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


def test_what_processes_saw_is_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    top, sums, products = torch.tensor([1.0, 5.0]), torch.tensor([4.0, 6.0]), torch.eye(2)
    readers = Readers(torch.ones(2))
    found = {name: Seen(top, sums, 2.0, products, readers) for name in ("q", "k")}
    monkeypatch.setattr(World, "check_same", lambda *_: None)
    monkeypatch.setattr(World, "most", lambda _, each: each.clamp_min(3))
    monkeypatch.setattr(World, "sum", lambda _, each: 2 * each)
    merge(found, World(0, 2))
    for seen in found.values():
        assert seen.channels.tolist() == [3.0, 5.0]
        assert seen.sums.tolist() == [8.0, 12.0]
        assert seen.outputs == 3.0
        assert seen.products is not None
        assert torch.equal(seen.products, 2 * torch.eye(2))  # once, though two layers share it

    def differ(_: World, value: list[str], otherwise: str) -> None:
        raise WakefulError(otherwise)

    monkeypatch.setattr(World, "check_same", differ)
    with pytest.raises(WakefulError, match="calibration_sequences"):
        merge(found, World(0, 2))
