"""llm-compressor: its modifiers, in full calibration on the same windows."""

# The tool lives in an environment of its own.
# pyright: reportMissingImports=false, reportArgumentType=false, reportAttributeAccessIssue=false

from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationScheme,
    preset_name_to_scheme,
)
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.entrypoints.higgs import get_higgs_config
from llmcompressor.modifiers.autoround import AutoRoundModifier
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.qad import QADModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from llmcompressor.modifiers.transform.spinquant import SpinQuantModifier
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.peers.formats import Format


def _rotated(model: PreTrainedModel) -> SpinQuantModifier:
    """QuaRot's rotations R1 and R2, without online ones.

    By Hadamard matrices of the largest power of two that divides the widths: whole ones fit few
    widths, and what the tool calls a random matrix is not orthogonal.
    """
    config = model.config
    heads = getattr(config, "head_dim", 0) or config.hidden_size // config.num_attention_heads
    size = min(width & -width for width in (config.hidden_size, heads))
    return SpinQuantModifier(
        rotations=["R1", "R2"], transform_type="random-hadamard", transform_block_size=size
    )


PREPARED = {
    "rtn": [], "gptq": [], "autoround": [],
    "awq": [lambda _: AWQModifier()],
    "smoothquant": [lambda _: SmoothQuantModifier(smoothing_strength=0.5)],
    "smoothquant, gptq": [lambda _: SmoothQuantModifier(smoothing_strength=0.5)],
    "rotated": [_rotated],
    "rotated, gptq": [_rotated],
    "chosen, gptq": [], "chosen, gptq, distilled": [],
}  # fmt: skip
"""What each method does before it rounds."""
if not torch.accelerator.is_available():  # AWQ pins memory, which torch refuses without one
    torch.Tensor.pin_memory = lambda tensor, *_: tensor


def quantized(
    model: PreTrainedModel, method: str, form: Format, calibration: list[Tensor], group: int,
    job: dict[str, Any],
) -> PreTrainedModel:  # fmt: skip
    """Return the model as `oneshot` leaves it: its layers compute as the format rounds."""
    options: dict[str, Any] = {"ignore": ["lm_head"]}
    if form.cache:
        options["kv_cache_scheme"] = QuantizationArgs(
            num_bits=form.cache, type="int", strategy="tensor", symmetric=True, dynamic=False
        )
        options["config_groups"] = {}
    elif form.bits:
        options["config_groups"] = _chosen_groups(job["model"], form.bits, group)
    else:
        options["config_groups"] = {"all": _scheme(form, group)}
    last: Any = QuantizationModifier
    if "gptq" in method:
        last = GPTQModifier
    elif method == "autoround":
        last = AutoRoundModifier
        options |= {"iters": job["steps"], "enable_torch_compile": False}
        model = model.to(torch.bfloat16)  # what it computes in on a processor
    distilled = [QADModifier()] if method.endswith("distilled") else []
    rows = {"input_ids": [window[0].tolist() for window in calibration]}
    rows["attention_mask"] = [[1] * len(row) for row in rows["input_ids"]]
    oneshot(
        model=model, dataset=Dataset.from_dict(rows),
        recipe=[*(make(model) for make in PREPARED[method]), last(**options), *distilled],
        pipeline="sequential" if distilled else "independent",
        num_calibration_samples=len(calibration), max_seq_length=calibration[0].shape[1],
    )  # fmt: skip
    return model.float()


def _chosen_groups(model: str, bits: float, group: int) -> dict[str, QuantizationScheme]:
    """Return the groups of layers in 4 and in 8 bits that HIGGS chooses for so many bits a weight.

    HIGGS counts no scales, of which 4 bits in groups have one of 16 bits per group.
    """
    bits_of_scales = 16 / group
    share_in_8_bits = (bits - 4 - bits_of_scales) / (4 - bits_of_scales)
    config = get_higgs_config(
        model,
        [
            _scheme(Format("", weights=4, grouped=True), group),
            _scheme(Format("", weights=8), group),
        ],
        ignore=["lm_head", "re:.*embed_tokens"],
        target_avg_bitwidth=4 + 4 * share_in_8_bits,
    )
    return config.config_groups


def _scheme(form: Format, group: int) -> QuantizationScheme:
    if form.block:
        return preset_name_to_scheme(form.block.upper(), ["Linear"])
    weights = QuantizationArgs(
        num_bits=form.weights, type="int", symmetric=True, dynamic=False,
        strategy="group" if form.grouped else "channel",
        group_size=group if form.grouped else None,
    )  # fmt: skip
    inputs = None
    if form.inputs:
        inputs = QuantizationArgs(
            num_bits=form.inputs, type="int", symmetric=True, strategy=form.per,
            dynamic=form.per == "token",
        )  # fmt: skip
    return QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs)


def save(model: PreTrainedModel, folder: Path) -> None:
    """Write what vLLM reads."""
    model.save_pretrained(folder, save_compressed=True)
