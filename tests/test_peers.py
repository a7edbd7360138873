"""The table of quantization tools: its cells and what it says of them, on a model of two layers."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.peers import cell
from benchmarks.peers.formats import FORMATS, group_of
from benchmarks.peers.table import tables
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        initializer_range=0.2,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("peers") / "model"
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def job(folder: Path, tmp_path: Path, method: str, form: str, tool: str = "wakeful") -> dict:
    rows = torch.randint(61, (26, 32), generator=torch.Generator().manual_seed(1)).tolist()
    item = {"start": rows[0][:8], "right": 1, "endings": [[3, 4], [5]], "sizes": [2, 1]}
    return {
        "model": str(folder), "texts": {"a": rows[:3], "b": rows[3:6]}, "calibration": rows[6:],
        "threads": torch.get_num_threads(), "device": "cpu",
        "first": 1, "steps": 2,
        "tasks": {"choice": [item, item]},
        "tool": tool, "method": method, "format": form, "out": str(tmp_path / "found.json"),
    }  # fmt: skip


def test_a_plain_cell_is_what_transformers_computes(folder: Path, tmp_path: Path) -> None:
    asked = job(folder, tmp_path, "", "")
    found = cell.main(asked)
    model = LlamaForCausalLM.from_pretrained(folder)
    for name, rows in asked["texts"].items():
        tokens = torch.tensor(rows)
        wanted = [model(row[None], labels=row[None]).loss.item() for row in tokens]
        assert found["losses"][name] == pytest.approx(wanted, abs=1e-5)
    with torch.no_grad():
        logs = model(torch.tensor([asked["tasks"]["choice"][0]["start"] + [3]])).logits[0]
    two, one = logs[-2].log_softmax(-1)[3] + logs[-1].log_softmax(-1)[4], logs[-2].log_softmax(-1)
    assert found["tasks"]["choice"] == [float(one[5] > two / 2)] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "form"),
    [
        ("rtn", "w8a8-tensor"),
        ("gptq", "w4a16"),
        ("smoothquant", "w8a8-token"),
        ("cured", "kv4"),
        ("chosen, gptq, tuned", "mixed"),
    ],
)
def test_a_format_costs_little_or_much(
    method: str, form: str, folder: Path, tmp_path: Path
) -> None:
    found, plain = (
        cell.main(job(folder, tmp_path, *asked)) for asked in ((method, form), ("", ""))
    )
    gaps = np.abs(np.array(found["losses"]["a"]) - np.array(plain["losses"]["a"]))
    assert 0 < gaps.max() < (0.1 if form == "w8a8-tensor" else 1.0)
    assert found["group"] == 32
    assert (found["bytes"] is None) == ("unsaved" in found) == (form == "kv4")


@pytest.mark.slow
def test_what_a_tool_cannot_do_is_said(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(json.dumps(job(folder, tmp_path, "gptq", "kv4")))
    command = [sys.executable, "-m", "benchmarks.peers.cell", str(tmp_path / "job.json")]
    subprocess.run(command, check=True, capture_output=True, cwd=Path(__file__).parents[1])
    found = json.loads((tmp_path / "found.json").read_text())
    assert found == {"failed": "NotImplementedError: gptq rounds weights, and the format has none"}


def test_the_table_pairs_windows(tmp_path: Path) -> None:
    def write(name: str, found: dict[str, Any]) -> None:
        (tmp_path / f"{name}.json").write_text(json.dumps(found))

    base = {"tasks": {"t": [1.0, 0.0]}, "seconds": 3.2, "peak": 2e9, "bytes": 1_500_000}
    write("plain", base | {"losses": {"a": [1.0, 2.0]}})
    write("one-gptq-w4a16", base | {"losses": {"a": [1.2, 2.4]}})
    write("two-cured+gptq-w4a16", base | {"losses": {"a": [1.1, 2.1]}, "bytes": None})
    write("three-rtn-w4a16", {"failed": "it stopped"})
    lines = tables(tmp_path).splitlines()
    assert lines[0].endswith("a 1.5000")
    assert (
        "two | cured, gptq | +0.1000 ± 0.0000 | 0.500 (+0.000 ± 0.000) | 3 | 2.00 | –" in lines[6]
    )
    assert "one | gptq | +0.3000 ± 0.1000" in lines[7]
    assert "three | rtn | not measured: it stopped" in lines[8]
    assert not any(line.startswith("### nvfp4") for line in lines)


def test_groups_divide_every_layer() -> None:
    assert [group_of(each) for each in ({256, 512}, {576, 1536}, {96, 64})] == [128, 64, 32]
    assert all(each.weights or each.cache or each.block or each.bits for each in FORMATS.values())
