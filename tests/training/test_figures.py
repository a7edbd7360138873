"""Figures that a run measures besides its loss."""

import json
import math
from pathlib import Path

import pytest
import torch

import wakeful
from training.runs import tiny
from training.test_loop import losses
from wakeful.cli import main
from wakeful.config.schema import config_to_toml
from wakeful.data.order import ValidationWindows
from wakeful.data.preparing import load_data
from wakeful.errors import WakefulError
from wakeful.loading.load import read_decoder
from wakeful.quantization.convert import quantize_module
from wakeful.runs.run import Run
from wakeful.training.finishing import quantization_damage
from wakeful.training.loop import train_run


@pytest.mark.slow
def test_damage_is_measured_on_whole_windows_and_changes_no_training(
    text: Path, tmp_path: Path
) -> None:
    options = {"quantize": {"schemes": ["coarse", "w4"], "num_sequences": 5}}
    plain = train_run(tiny(text), tmp_path / "plain")
    config = tiny(text, train=options)
    run = train_run(config, tmp_path / "run")
    assert losses(run) == losses(plain)
    summary = run.read_json("summary.json")
    assert set(summary["quantization"]) == {"coarse", "w4"}
    assert plain.read_json("summary.json")["quantization"] == {}

    # The same by hand: the first five windows, each alone, their inputs' own tokens predicted.
    trained = read_decoder(run.path, dtype="auto")
    windows = ValidationWindows(load_data(config.data).validation, length=16, batch_size=1)
    rows = [inputs for (inputs, _), _ in zip(windows, range(5), strict=False)]

    def perplexity(model: torch.nn.Module) -> float:
        total = 0.0
        for row in rows:
            logits = model(row)[:, :-1].double().log_softmax(-1)
            total -= float(logits.gather(-1, row[:, 1:, None]).sum())
        return math.exp(total / (5 * 15))

    actual = summary["quantization"]["coarse"]
    before, after = (
        perplexity(trained.decoder()),
        perplexity(quantize_module(trained.decoder(), "coarse")),
    )
    assert actual["perplexity"] == pytest.approx(after, rel=1e-5)
    assert actual["increase"] == pytest.approx(after - before, rel=1e-3, abs=1e-4)
    assert actual["divergence"] > 0


@pytest.mark.slow
def test_what_overflows_is_left_open(text: Path, tmp_path: Path) -> None:
    config = tiny(text, train={"quantize": {"schemes": ["coarse"], "num_sequences": 2}})
    decoder = read_decoder(train_run(config, tmp_path / "run").path, dtype="auto").decoder()
    windows = ValidationWindows(load_data(config.data).validation, length=16, batch_size=1)
    with torch.no_grad():
        decoder.head.weight.mul_(1e6)
    actual = quantization_damage(config, decoder, windows)["coarse"]
    # e to thousands of nats overflows a float, and JSON lacks infinity.
    assert (actual["perplexity"], actual["increase"]) == (None, None)
    json.dumps(actual, allow_nan=False)


def test_bytes_are_those_of_weights_and_moments(text: Path, tmp_path: Path) -> None:
    run = train_run(tiny(text), tmp_path / "run")
    weights = (
        sum(p.numel() for p in read_decoder(run.path, dtype="auto").decoder().parameters()) * 4
    )
    sizes = run.read_json("summary.json")["bytes"]
    assert sizes["weights"] == weights
    # Two moments as large as the weights, and a step count a parameter.
    assert 2 * weights < sizes["optimizer"] < 2.02 * weights
    assert "peak" not in sizes


def test_a_scheme_that_cannot_be_stops_a_run_before_it_begins(text: Path, tmp_path: Path) -> None:
    with pytest.raises(WakefulError, match="coarse"):
        train_run(tiny(text, train={"quantize": {"schemes": ["corse"]}}), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(WakefulError, match="calibrates nothing"):
        train_run(
            tiny(text, train={"quantize": {"schemes": ["coarse(scales='static')"]}}),
            tmp_path / "run",
        )
    with pytest.raises(WakefulError, match="num_sequences must be at least 1"):
        tiny(text, train={"quantize": {"num_sequences": 0}})


@pytest.mark.slow
def test_a_comparison_keeps_the_layouts_its_table_asks_for(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"diagnose": {"every": 8}, "quantize": {"schemes": ["coarse"], "num_sequences": 2}}
    file = tmp_path / "mine.toml"
    body = config_to_toml(tiny(text, train=options)).split("\n", 1)[1]
    variants = '[variants.vanilla]\n[variants.softmax1.model]\nnormalizer = "softmax1"\n'
    file.write_text('layouts = ["activation/table2"]\n' + body + variants)
    out = tmp_path / "out"
    assert main(["compare", str(file), "--out", str(out)]) == 0
    assert Run.open(out).header.layouts == ("activation/table2",)
    page = (out / "report.html").read_text()
    assert "Table 2 of From Attention to Activation" in page
    assert "softmax-1, OrthoAdam" in page  # a row that was not trained

    file.write_text('layouts = ["activation/table22"]\n' + body + variants)
    capsys.readouterr()
    assert main(["compare", str(file), "--out", str(tmp_path / "other")]) == 1
    assert "no layout 'activation/table22'" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
    file.write_text("layouts = 3\n" + body + variants)
    assert main(["compare", str(file), "--out", str(tmp_path / "other")]) == 1
    assert "layouts must be a list of names" in capsys.readouterr().err


@pytest.mark.slow
def test_options_are_for_all_rows(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.toml"
    body = config_to_toml(tiny(text, train={"steps": 4})).split("\n", 1)[1]
    file.write_text(body + "[variants.vanilla]\n[variants.sgd]\noptimizer.name = 'torch.optim:SGD'")
    out = tmp_path / "out"
    options = ["compare", str(file), "--train.steps", "2", "--out"]
    assert main([*options, str(out)]) == 0
    sgd, vanilla = (Run.open(out / name / "seed-0").config for name in ("sgd", "vanilla"))
    assert (vanilla.train.steps, sgd.train.steps) == (2, 2)
    assert main([*options, str(tmp_path / "no"), "--optimizer.name", "muon"]) == 1
    assert "--optimizer.name is for all variants, and they differ in it" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


@pytest.mark.slow
def test_only_the_named_rows_are_trained(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.toml"
    body = config_to_toml(tiny(text, train={"steps": 2})).split("\n", 1)[1]
    file.write_text(body + "[variants.a]\n[variants.b]\n[variants.c]\nmodel.route = 'svformer'\n")
    out = tmp_path / "out"
    options = ["compare", str(file), "--out"]
    assert main([*options, str(out), "--only", "c", "b"]) == 0
    assert Run.open(out).header.variants == ("b", "c")
    assert not (out / "a").exists()
    for wrong, message in (
        (
            ["--only", "bb", "c"],
            "--only: no variant 'bb' (did you mean 'b'?); the variants are a, b, c",
        ),
        (["--only", "b"], "nothing to compare 'b' with"),
    ):
        assert main([*options, str(tmp_path / "no"), *wrong]) == 1
        assert message in capsys.readouterr().err
    assert not (tmp_path / "no").exists()
    actual = wakeful.compare(str(file), only=["a", "c"], out=tmp_path / "second")
    assert actual.summary["baseline"] == "a"
