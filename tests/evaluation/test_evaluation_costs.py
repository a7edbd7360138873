"""What a model costs who serves it, and several texts beside each other."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM, OPTConfig, OPTForCausalLM, PreTrainedTokenizerFast

import wakeful
from evaluation.models import llama, loaded_llama, save_llama
from probes.architectures import build
from training.runs import text, tiny
from wakeful.cli import main
from wakeful.config.reading import DECODED_TOKENS
from wakeful.errors import WakefulError
from wakeful.evaluation import costs as costs_module
from wakeful.evaluation.costs import OURS, ROUNDS, THEIRS, measure_costs
from wakeful.evaluation.options import EvaluateOptions
from wakeful.evaluation.tool import Evaluation
from wakeful.loading.model import Model
from wakeful.model.decoder import Decoder
from wakeful.quantization import quantize_module
from wakeful.reports.value import Table
from wakeful.training.loop import train_run

__all__ = ["llama", "text"]
LENGTHS = (9, 20)


@pytest.mark.slow
def test_sizes_are_counted_and_speeds_timed_over_rounds(tmp_path: Path) -> None:
    model = loaded_llama(tmp_path / "llama", dtype=torch.float32)
    seen: list[tuple[int, int]] = []
    found = {
        score.metric: score
        for score in measure_costs(model, LENGTHS, progress=lambda *at: seen.append(at))
    }
    assert seen[-1] == (ROUNDS, ROUNDS)
    count = sum(parameter.numel() for parameter in model.module.parameters())
    assert found["parameters, M"].figure == pytest.approx(count / 1e6)
    held = sum(buffer.nbytes for buffer in model.module.buffers())
    assert found["weights, MB"].figure == pytest.approx((4 * count + held) / 1e6)
    # Keys and values of 2 layers, 2 heads of 4 channels in float32.
    assert found["cache, KB a token"].figure == pytest.approx(2 * 2 * 2 * 4 * 4 / 1e3)
    for length in LENGTHS:
        prefill, decode = (
            found[f"prefill of {length}, tokens/s"],
            found[f"decode after {length}, tokens/s"],
        )
        assert np.array_equal(prefill.values, [length] * ROUNDS)
        assert np.array_equal(decode.values, [DECODED_TOKENS] * ROUNDS)
        assert prefill.figure > 0 < decode.figure
        assert prefill.higher_is_better
    assert not found["weights, MB"].higher_is_better


@pytest.mark.slow
def test_states_of_linear_attention_are_counted(tmp_path: Path) -> None:
    module = build("Qwen3_5Text", layer_types=["linear_attention", "full_attention"])
    tokenizer = PreTrainedTokenizerFast.from_pretrained(save_llama(tmp_path / "llama"))
    model = wakeful.load(module, tokenizer=tokenizer)
    sizes = {
        score.metric: score.figure for score in measure_costs(model, (9,), progress=lambda *_: None)
    }
    config = module.config
    keys, values = (
        getattr(config, f"linear_num_{part}_heads") * getattr(config, f"linear_{part}_head_dim")
        for part in ("key", "value")
    )
    convolved = (2 * keys + values) * config.linear_conv_kernel_dim
    recurrent = values * config.linear_key_head_dim
    attended = 2 * 9 * config.num_key_value_heads * config.head_dim
    assert sizes["cache, KB a token"] == 4 * (convolved + recurrent + attended) / 9 / 1e3


@pytest.mark.slow
def test_quantized_matrices_are_parameters_too(tmp_path: Path) -> None:
    model = loaded_llama(tmp_path / "llama", dtype=torch.float32)
    small = dataclasses.replace(model, module=quantize_module(model.module, "fine"))
    whole, quantized = (
        {s.metric: s.figure for s in measure_costs(each, (16,), progress=lambda *_: None)}
        for each in (model, small)
    )
    assert quantized["parameters, M"] == whole["parameters, M"]
    assert quantized["weights, MB"] < whole["weights, MB"]


@pytest.mark.slow
def test_our_decoder_costs_what_its_export_does(text: Path, tmp_path: Path) -> None:
    run = train_run(tiny(text, model={"max_length": 64}), tmp_path / "run")
    wakeful.export(run.path, tmp_path / "export")
    ours, theirs = (
        {
            s.metric: s.figure
            for s in measure_costs(wakeful.load(place), (16,), progress=lambda *_: None)
        }
        for place in (run.path, tmp_path / "export")
    )
    assert ours["cache, KB a token"] == theirs["cache, KB a token"]
    assert ours["parameters, M"] == theirs["parameters, M"]


def save_opt(folder: Path) -> Path:
    """Save a random model of an architecture that our decoder cannot be."""
    save_llama(folder)
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=258, hidden_size=16, word_embed_proj_dim=16, ffn_dim=24, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64,
    )  # fmt: skip
    OPTForCausalLM(config).save_pretrained(folder)
    return folder


def codes(result: Evaluation) -> dict[str, set[str]]:
    """Return what ran each model for its cache and speed."""
    found: dict[str, set[str]] = {}
    for score in result.scores:
        if score.task == "speed" or "cache" in score.metric:
            found.setdefault(score.model, set()).add(score.implementation)
    return found


@pytest.mark.slow
def test_beside_our_decoder_a_known_architecture_is_timed_with_it_too(
    text: Path, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train_run(tiny(text, model={"max_length": 64}), tmp_path / "run")
    timed: list[type] = []
    own = costs_module._time_generation

    def timing(model: Model, prompt: list[int]) -> tuple[float, float]:
        timed.append(type(model.module))
        return own(model, prompt)

    monkeypatch.setattr(costs_module, "_time_generation", timing)
    words = {"text": str(text / "000.txt"), "length": 24, "num_sequences": 4}
    both = wakeful.evaluate(llama, run.path, speed=[8], **words)
    assert {*timed} == {Decoder}
    assert codes(both) == {"llama": {OURS}, "vanilla": {OURS}}
    assert both.method["Implementation timed"] == (
        "llama our decoder in place of LlamaForCausalLM; vanilla our decoder"
    )
    # What it predicts comes from the model as it was loaded.
    alone = wakeful.evaluate(llama, **words)
    assert alone.scores[0].values.tolist() == both.scores[0].values.tolist()
    assert both.names["llama"] == "LlamaForCausalLM"
    timed.clear()
    other = save_llama(tmp_path / "other", seed=1)
    theirs = wakeful.evaluate(llama, other, speed=[8])
    assert {*timed} == {LlamaForCausalLM}
    assert codes(theirs) == {"llama": {THEIRS}, "other": {THEIRS}}
    assert theirs.method["Implementation timed"] == THEIRS


@pytest.mark.slow
def test_models_in_memory_are_known_before_they_are_loaded(
    text: Path, llama: Path, tmp_path: Path
) -> None:
    model = wakeful.load(llama)
    decoder = dataclasses.replace(model, module=model.decoder(), name="ours")
    assert codes(wakeful.evaluate(model, decoder, speed=[8])) == {"llama": {OURS}, "ours": {OURS}}
    assert codes(wakeful.evaluate(model, speed=[8])) == {"llama": {THEIRS}}
    run = train_run(tiny(text, model={"max_length": 64}), tmp_path / "run")
    small = wakeful.quantize(run.path, "w4").model
    assert [*codes(wakeful.evaluate(llama, small, speed=[8])).values()] == [{OURS}, {OURS}]


@pytest.mark.slow
def test_where_our_decoder_cannot_be_a_model_two_implementations_are_compared(
    text: Path, llama: Path, tmp_path: Path
) -> None:
    run = train_run(tiny(text, model={"max_length": 64}), tmp_path / "run")
    foreign = save_opt(tmp_path / "opt")
    found = wakeful.evaluate(run.path, foreign, llama, speed=[8])
    assert codes(found) == {"vanilla": {OURS}, "opt": {THEIRS}, "llama": {OURS}}
    assert (
        "opt Transformers, another implementation, because our decoder cannot be a opt"
        in (found.method["Implementation timed"])
    )
    page = found.save(tmp_path / "out") / "report.html"
    shown = page.read_text("utf-8")
    assert (
        "Cache and speed compare two implementations: vanilla in our decoder and opt in "
        "Transformers."
    ) in shown
    assert shown.count("compare two implementations") == 1
    table = found.report.sections[0].parts[0]
    assert isinstance(table, Table)
    assert table.columns == ["measure", "vanilla", "opt", "llama"]
    cells = {row[0].text: ["".join(each.under) for each in row[1:]] for row in table.cells}
    assert cells["speed: prefill of 8, tokens/s"][1].endswith(", two implementations")
    assert "two" not in cells["speed: prefill of 8, tokens/s"][2]
    assert "two" not in cells["size: parameters, M"][1]
    scores = found.summary["models"][1]["scores"]
    assert {s["implementation"] for s in scores if s["task"] == "speed"} == {THEIRS}


class Doubled(LlamaForCausalLM):
    """A class with a known configuration that computes something else."""

    def forward(self, *rest: Any, **named: Any) -> Any:
        output = super().forward(*rest, **named)
        output.logits = 2 * output.logits
        return output


@pytest.mark.slow
def test_a_class_that_computes_something_else_is_timed_as_it_is(
    text: Path, llama: Path, tmp_path: Path
) -> None:
    model = wakeful.load(llama)
    own = Doubled.from_pretrained(llama)
    doubled = dataclasses.replace(model, module=own.eval(), name="doubled")
    found = wakeful.evaluate(
        dataclasses.replace(model, module=model.decoder(), name="ours"), doubled, speed=[8]
    )
    assert codes(found) == {"ours": {OURS}, "doubled": {THEIRS}}
    assert "gives other logits" in found.method["Implementation timed"]


@pytest.mark.slow
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
    assert re.search(r"prefill of 8 \d[\d.]* ± \d[\d.]* and decode", page)
    times = {each["metric"]: each for each in summary["ratios"]}
    assert times["weights, MB"]["ratio"] == 1
    assert times["weights, MB"]["standard_error"] is None
    assert times["prefill of 8, tokens/s"]["standard_error"] > 0
    # What is timed apart has no paired difference.
    assert {each["task"] for each in summary["differences"]} == {"000", "001"}
    assert "001.txt" in page
    assert f"then {DECODED_TOKENS} greedy tokens with the cache" in page


def test_what_cannot_be_is_said_before_anything_is_measured(
    text: Path, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    capsys.readouterr()
    for speed in (f"{64 - DECODED_TOKENS}", "64"):  # of a context of 64
        assert main(["evaluate", str(llama), "--speed", speed, "--out", str(tmp_path / "out")]) == 1
        words = f"the prompt, the first token and {DECODED_TOKENS} after it are more than"
        assert f"speed = {speed}: {words} llama" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    with pytest.raises(WakefulError, match="every text is named in --texts"):
        EvaluateOptions(text="a.txt", texts=("b.txt",))
    for name, task in (
        ("lambada", {"lambada": "x.jsonl"}), ("piqa", {"tasks": ("piqa@5",)}),
        ("choices", {"choices": "x.jsonl"}),
    ):  # fmt: skip
        with pytest.raises(WakefulError, match=f"a text is called {name}, and so is a task"):
            EvaluateOptions(texts=(f"texts/{name}.txt", "b.txt"), **task)
    EvaluateOptions(texts=("lambada.txt", "b.txt"))
    with pytest.raises(WakefulError, match="two of the texts are called a"):
        EvaluateOptions(texts=("x/a.txt", "y/a.txt"))
    with pytest.raises(WakefulError, match="lengths of at least 1, each once"):
        EvaluateOptions(speed=(8, 8))
    with pytest.raises(WakefulError, match="each once, with one number of shots"):
        EvaluateOptions(tasks=("mmlu", "mmlu@5"))
    with pytest.raises(WakefulError, match="the number of few-shot examples"):
        EvaluateOptions(tasks=("mmlu@five",))
