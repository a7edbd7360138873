"""What verbs make of models that have layers of linear attention, with and without experts."""

from pathlib import Path
from typing import Any

import pytest

import wakeful
from probes.architectures import QWEN35, build
from quantization.test_experts import FEW, HYBRID, SKIP, model_of
from verbs.test_diagnose import save_tokenizer
from wakeful.errors import WakefulError

READ: dict[str, Any] = {"length": 16, "num_sequences": 2, "device": "cpu"}


@pytest.mark.parametrize("name", ["Qwen3Next", "Qwen3_5Text"])
def test_a_hybrid_is_diagnosed_and_quantized_and_not_cured(name: str, tmp_path: Path) -> None:
    folder, words = tmp_path / "hybrid", tmp_path / "words.txt"
    words.write_text("The quick brown fox jumps over the lazy dog. " * 20)
    model = model_of(name) if name in SKIP else build(name, **FEW, **QWEN35, **HYBRID)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    seen = wakeful.diagnose(folder, text=str(words), **READ).frame
    assert set(seen.filter(metric="rank")["layer"]) == {1}
    assert {0, 1} <= set(seen.filter(metric="kurtosis")["layer"])
    small = wakeful.quantize(folder, "w4a16", text=str(words), skip=["*.conv1d"], **READ)
    assert small.summary["layers"]
    refused = r"linear attention.*diagnose and quantize take it"
    with pytest.raises(WakefulError, match=refused):
        wakeful.cure(folder, rotate="hadamard", text=str(words), **READ)
    with pytest.raises(WakefulError, match=refused):
        wakeful.inherit(folder, layers=1, text=str(words))
