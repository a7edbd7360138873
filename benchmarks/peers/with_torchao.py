"""torchao: what its `quantize_` does on any device."""

# The tool lives in an environment of its own.
# pyright: reportMissingImports=false, reportArgumentType=false, reportAttributeAccessIssue=false

from typing import Any

import torch
from torch import Tensor, nn
from torchao.quantization import (
    Int8DynamicActivationInt8WeightConfig,
    Int8DynamicActivationIntxWeightConfig,
    IntxWeightOnlyConfig,
    MappingType,
    PerGroup,
    quantize_,
)
from transformers import PreTrainedModel

from benchmarks.peers.formats import Format


def quantized(
    model: PreTrainedModel, method: str, form: Format, calibration: list[Tensor], group: int,
    job: dict[str, Any],
) -> PreTrainedModel:  # fmt: skip
    """Return the model with torchao's tensors in place of its weights."""
    key = (form.weights, form.inputs, form.per if form.inputs == 8 else "", form.grouped)
    configs: dict[tuple[int, int, str, bool], Any] = {
        (8, 8, "token", False): Int8DynamicActivationInt8WeightConfig(),
        (4, 0, "", True): IntxWeightOnlyConfig(
            weight_dtype=torch.int4, granularity=PerGroup(group), mapping_type=MappingType.SYMMETRIC
        ),
        (4, 8, "token", True): Int8DynamicActivationIntxWeightConfig(
            weight_dtype=torch.int4, weight_granularity=PerGroup(group),
            weight_mapping_type=MappingType.SYMMETRIC,
        ),
    }  # fmt: skip
    if form.block or form.cache or key not in configs:
        raise NotImplementedError("torchao has no such format for this device")
    quantize_(
        model, configs[key],
        filter_fn=lambda module, name: isinstance(module, nn.Linear)
        and not name.endswith("lm_head"),
    )  # fmt: skip
    return model
