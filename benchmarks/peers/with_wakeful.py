"""wakeful: its methods, alone and after the cure that it chooses for the format."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from benchmarks.peers.formats import Format
from wakeful.curing.search import SEARCH_LENGTH, SearchTexts, choose_cure
from wakeful.hf.weights_in import convert_hf_model
from wakeful.quantization import quantize_module
from wakeful.quantization.compressed import save_compressed, state_bytes
from wakeful.quantization.convert import linear_layers
from wakeful.quantization.format_search import Budget, FormatSearch, split_text
from wakeful.quantization.schemes import Absmax, Scheme, parse_scheme
from wakeful.quantization.schemes.gptq import Gptq
from wakeful.quantization.schemes.methods import Method, Smooth

HEADS = ("*head",)


def quantized(
    model: PreTrainedModel, method: str, form: Format, calibration: list[Tensor], group: int,
    job: dict[str, Any],
) -> nn.Module:  # fmt: skip
    """Return the quantized model: Transformers' own modules, or our decoder where it is cured."""
    if form.bits:
        return _chosen(model, form, calibration, job["steps"] if method.endswith("tuned") else 0)
    scheme = _scheme(form, group)
    methods: dict[str, Method] = {"gptq": Gptq(), "smoothquant": Smooth(norms=True)}
    by = methods.get(method.rpartition(", ")[2])
    if by is not None:
        if scheme.weights is None:
            raise NotImplementedError(f"{method} rounds weights, and the format has none")
        scheme = replace(scheme, method=by)
    asked: nn.Module = model
    if method.startswith(("cured", "stock")):
        asked = plain = convert_hf_model(model).eval()
        text, stock = torch.cat(calibration).flatten(), method.startswith("stock")
        texts = SearchTexts.spread(text, min(SEARCH_LENGTH, len(text) // SearchTexts.num_rows))
        choice = choose_cure(plain, [scheme], texts, token=job["first"], stock=stock)
        asked = choice.best.apply(plain, texts.calibration, job["first"])
        (scheme,) = choice.schemes
        print("chosen:", choice.best, scheme)
    return quantize_module(
        asked, scheme, calibration=calibration if scheme.calibrated else (),
        skip=() if form.cache else HEADS,
    )  # fmt: skip


def _chosen(
    model: PreTrainedModel, form: Format, calibration: list[Tensor], steps: int
) -> nn.Module:
    """Return the model with a format chosen for each layer, and scales trained for `steps`."""
    search = FormatSearch(
        model, linear_layers(model, HEADS), Budget(bits=form.bits), *split_text(calibration),
        model_bytes=state_bytes(model), stored_dtype=model.dtype, tuning_steps=steps,
    )  # fmt: skip
    return search.find_formats().module


def _scheme(form: Format, group: int) -> Scheme:
    scales = "static" if form.per == "tensor" else "dynamic"
    if form.block:
        return replace(parse_scheme(form.block), scales=scales)
    if form.cache:
        return Scheme(cache=Absmax(bits=form.cache, per="token"))
    inputs = Absmax(bits=form.inputs, per=form.per) if form.inputs else None
    weights = Absmax(bits=form.weights, per="channel", group=group if form.grouped else 0)
    return Scheme(weights=weights, inputs=inputs, scales=scales)


def save(model: nn.Module, folder: Path) -> None:
    """Write what vLLM reads."""
    save_compressed(model, folder, lambda _: None)
