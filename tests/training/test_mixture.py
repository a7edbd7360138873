"""Training on a mixture: losses by domain on the record and the page, resumed to the bit."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import wakeful
from training.runs import tiny
from wakeful.config.schema import Config
from wakeful.config.tables import from_table, to_table
from wakeful.runs import checkpoint
from wakeful.runs.run import Run
from wakeful.training.compared import read_run
from wakeful.training.loop import train_run


def mixture(tmp_path: Path) -> Config:
    for name, word in (("one", "apples and "), ("two", "0123456789 ")):
        (tmp_path / name).mkdir()
        for number in range(40):
            text = f"{word}{number * 7919 % 1000} " * 30
            (tmp_path / name / f"{number}.txt").write_text(text)
    source = f'mixture(parts=[("words", "{tmp_path}/one", 3), ("numbers", "{tmp_path}/two", 1)])'
    table = to_table(tiny(tmp_path / "one"))
    table["data"] |= {"source": source, "validation_fraction": 0.1, "keep_overlap": True,
                      "validation_source": "", "vocab_size": 300, "tokenizer": ""}  # fmt: skip
    table["train"] |= {"steps": 4, "checkpoint_every": 2, "eval_every": 2, "length": 16,
                       "keep_checkpoints": 3}  # fmt: skip
    return from_table(Config, table)


@pytest.mark.slow
def test_a_mixture_is_trained_on_validated_by_domain_and_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WAKEFUL_CACHE", str(tmp_path / "cache"))
    config = mixture(tmp_path)
    uninterrupted = train_run(config, tmp_path / "whole")
    domains = read_run(uninterrupted.path, "r").summary.validation.domains
    assert domains is not None
    assert set(domains) == {"words", "numbers"}
    facts = read_run(uninterrupted.path, "r").data
    assert facts.text == "a mixture of words (0.75), numbers (0.25)"
    loss = read_run(uninterrupted.path, "r").summary.validation.loss
    assert min(domains.values()) < loss < max(domains.values())
    last = [row for row in uninterrupted.metrics() if row["kind"] == "validation"]
    assert [row["step"] for row in last] == [2, 4]
    assert last[-1]["loss_numbers"] == domains["numbers"]

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("wakeful.training.loop.finish_run", killed)
        with pytest.raises(KeyboardInterrupt):
            train_run(config, tmp_path / "cut")
    cut = Run.open(tmp_path / "cut")
    for folder in cut.checkpoints.iterdir():
        if folder.name.endswith("4"):
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()
    train_run(config, cut.path, resume=True)
    actual, expected = (
        load_file(checkpoint.newest_checkpoint(run.checkpoints) / "model.safetensors")
        for run in (uninterrupted, cut)
    )
    assert all(torch.equal(actual[name], expected[name]) for name in actual)
    wakeful.report(uninterrupted.path, out=tmp_path / "page.html")
    output = (tmp_path / "page.html").read_text("utf-8")
    assert "Loss by domain" in output
    assert "numbers" in output
