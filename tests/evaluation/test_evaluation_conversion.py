"""A model of Transformers as our decoder: taken where both give the same logits, else refused."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from evaluation.models import loaded_llama
from evaluation.test_evaluation_costs import Doubled
from wakeful.errors import WakefulError
from wakeful.evaluation import conversion
from wakeful.probes.running import logits_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_both_are_compared_in_float32_and_have_their_own_weights_again(
    tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded_llama(tmp_path / "llama", dtype=dtype)
    compared: list[torch.dtype] = []

    def seen(module: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        compared.extend(p.dtype for p in module.parameters())
        return logits_of(module, tokens)

    monkeypatch.setattr(conversion, "logits_of", seen)
    weights = {name: p.data_ptr() for name, p in model.module.named_parameters()}
    decoder = conversion.decoder_alike(model)
    assert set(compared) == {torch.float32 if dtype == torch.bfloat16 else dtype}
    assert decoder.embed.weight.dtype == dtype
    assert weights == {name: p.data_ptr() for name, p in model.module.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_class_that_computes_something_else_is_refused(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    model = loaded_llama(tmp_path / "llama", dtype=dtype)
    other = Doubled.from_pretrained(tmp_path / "llama", dtype=dtype).eval()
    with pytest.raises(WakefulError, match="of this Doubled gives other logits"):
        conversion.decoder_alike(dataclasses.replace(model, module=other))
    assert next(other.parameters()).dtype == dtype
