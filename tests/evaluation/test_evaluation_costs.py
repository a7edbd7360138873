"""What a model costs who serves it, and several texts beside each other."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import wakeful
from evaluation.models import llama, loaded_llama, save_llama
from training.runs import text, tiny
from wakeful.cli import main
from wakeful.config.verbs import EvaluateOptions
from wakeful.errors import WakefulError
from wakeful.evaluation.costs import DECODED, ROUNDS, costs
from wakeful.training.loop import train

__all__ = ["llama", "text"]
LENGTHS = (9, 20)


def test_sizes_are_counted_and_speeds_timed_over_rounds(tmp_path: Path) -> None:
    model = loaded_llama(tmp_path / "llama", dtype=torch.float32)
    seen: list[tuple[int, int]] = []
    found = {
        score.metric: score for score in costs(model, LENGTHS, progress=lambda *at: seen.append(at))
    }
    assert seen[-1] == (ROUNDS, ROUNDS)
    count = sum(parameter.numel() for parameter in model.module.parameters())
    assert found["parameters, M"].figure == pytest.approx(count / 1e6)
    held = sum(buffer.nbytes for buffer in model.module.buffers())
    assert found["weights, MB"].figure == pytest.approx((4 * count + held) / 1e6)
    # Keys and values of 2 layers, 2 heads of 4 channels in float32.
    assert found["cache, KB a token"].figure == pytest.approx(2 * 2 * 2 * 4 * 4 / 1e3)
    whole = found["weights and cache of 20 tokens, MB"].figure
    assert whole == pytest.approx((4 * count + held + 128 * 20) / 1e6)
    stored = (tmp_path / "llama/model.safetensors").stat().st_size
    assert found["files, MB"].figure == pytest.approx(stored / 1e6)
    for length in LENGTHS:
        prefill, decode = (
            found[f"prefill of {length}, tokens/s"],
            found[f"decode after {length}, tokens/s"],
        )
        assert np.array_equal(prefill.values, [length] * ROUNDS)
        assert np.array_equal(decode.values, [DECODED] * ROUNDS)
        assert prefill.figure > 0 < decode.figure
        assert prefill.higher_is_better
    assert not found["weights, MB"].higher_is_better


def test_our_decoder_costs_what_its_export_does(text: Path, tmp_path: Path) -> None:
    run = train(tiny(text, model={"max_length": 64}), tmp_path / "run")
    wakeful.export(run.path, tmp_path / "export")
    ours, theirs = (
        {s.metric: s.figure for s in costs(wakeful.load(place), (16,), progress=lambda *_: None)}
        for place in (run.path, tmp_path / "export")
    )
    assert ours["cache, KB a token"] == theirs["cache, KB a token"]
    assert ours["parameters, M"] == theirs["parameters, M"]
    assert "files, MB" not in ours
    assert theirs["files, MB"] > theirs["weights, MB"] * 0.99


def test_several_texts_and_the_costs_stand_in_one_table(
    text: Path, llama: Path, tmp_path: Path
) -> None:
    other = save_llama(tmp_path / "other", seed=1)
    first, second = text / "000.txt", text / "001.txt"
    out = tmp_path / "out"
    command = [
        "evaluate", str(llama), str(other), "--texts", str(first), str(second), "--length", "24",
        "--num_sequences", "5", "--speed", "8", "--out", str(out),
    ]  # fmt: skip
    assert main(command) == 0
    summary = json.loads((out / "summary.json").read_text())
    scores = {(s["task"], s["metric"]): s for s in summary["models"][0]["scores"]}
    assert {task for task, _ in scores} == {"000", "001", "size", "speed"}
    alone = wakeful.evaluate(llama, text=str(second), length=24, num_sequences=5)
    (perplexity,) = (s for s in alone.scores if s.metric == "perplexity")
    assert scores["001", "perplexity"]["value"] == pytest.approx(perplexity.figure)
    page = (out / "report.html").read_text("utf-8")
    assert "As ratios to llama, other has parameters 1.00, weights 1.00, cache 1.00" in page
    assert "×1.000" in page
    assert "001.txt" in page
    assert f"then {DECODED} greedy tokens with the cache" in page


def test_what_cannot_be_is_said_before_anything_is_measured(
    text: Path, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    capsys.readouterr()
    assert main(["evaluate", str(llama), "--speed", "40", "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err
    assert f"speed = 40: the prompt and {DECODED} tokens after it are more than llama" in said
    assert not (tmp_path / "out").exists()
    with pytest.raises(WakefulError, match="texts stand in place of text and data"):
        EvaluateOptions(text="a.txt", texts=("b.txt",))
    with pytest.raises(WakefulError, match="two of the texts are called a"):
        EvaluateOptions(texts=("x/a.txt", "y/a.txt"))
    with pytest.raises(WakefulError, match="lengths of at least 1, each once"):
        EvaluateOptions(speed=(8, 8))
    with pytest.raises(WakefulError, match="each once, with one number of shots"):
        EvaluateOptions(tasks=("mmlu", "mmlu@5"))
    with pytest.raises(WakefulError, match="the number of solved examples"):
        EvaluateOptions(tasks=("mmlu@five",))
