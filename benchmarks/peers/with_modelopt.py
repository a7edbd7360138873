"""NVIDIA's Model-Optimizer, emulated: its presets' layers, with groups as the table has them."""

# The tool lives in an environment of its own.
# pyright: reportMissingImports=false, reportArgumentType=false, reportAttributeAccessIssue=false

import copy
from typing import Any

import modelopt.torch.quantization as mtq
import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.peers.formats import Format

ALGORITHMS = {"rtn": "max", "awq": {"method": "awq_lite"}, "smoothquant": "smoothquant"}
BLOCKS = {"nvfp4": mtq.NVFP4_DEFAULT_CFG, "mxfp4": mtq.MXFP4_DEFAULT_CFG}


def quantized(
    model: PreTrainedModel, method: str, form: Format, calibration: list[Tensor], group: int,
    job: dict[str, Any],
) -> PreTrainedModel:  # fmt: skip
    """Return the model with Model-Optimizer's quantizers in its layers."""
    config = copy.deepcopy(BLOCKS.get(form.block, mtq.INT8_DEFAULT_CFG))
    if not form.block:
        weights: dict[str, Any] = {"num_bits": form.weights, "axis": 0}
        if form.grouped:
            weights = {"num_bits": form.weights, "block_sizes": {-1: group, "type": "static"}}
        inputs: dict[str, Any] = {"num_bits": form.inputs, "axis": None}
        if form.per == "token":
            inputs = {"num_bits": form.inputs, "type": "dynamic", "block_sizes": {-1: None}}
        wanted = {"*weight_quantizer": weights, "*input_quantizer": inputs}
        for entry in config["quant_cfg"]:
            if entry["quantizer_name"] in wanted:
                found = wanted[entry["quantizer_name"]]
                entry.pop("cfg", None)
                entry.update({"cfg": found} if found["num_bits"] else {"enable": False})
    if form.cache:
        config["quant_cfg"].append(
            {"quantizer_name": "*[kv]_bmm_quantizer", "cfg": {"num_bits": form.cache, "axis": None}}
        )
    config["algorithm"] = ALGORITHMS[method]

    @torch.no_grad()
    def read(model: PreTrainedModel) -> None:
        for window in calibration:
            model(window)

    return mtq.quantize(model, config, forward_loop=read)
