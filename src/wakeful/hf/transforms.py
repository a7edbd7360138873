"""Rotations that run with the model, as a `transform_config` of compressed-tensors tells of them.

Whoever reads it multiplies a layer's inputs or outputs x by M / √n, where M (n, n) lies among the
weights once for all layers of a kind. vLLM does. Transformers (5.23) drops the field without a word
and runs another function, so such a folder has a `quantization_status` that it refuses, and that
nobody else reads.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from wakeful.errors import WakefulError
from wakeful.parts.orthoadam import transform, transform_factors

FIELD = "transform_config"
STATUS = "needs transform_config: vLLM or wakeful"
"""Value of `quantization_status` where a model without its transforms would be another one."""
_GROUP = "inner"
_SIZED = {"input": "in_features", "output": "out_features"}
"""Attribute that gives a matrix's size, by where it acts while the model runs."""
_BEFORE = ("weight_input", "weight_output")
"""Places where it was applied before the weights were stored."""


def make_transform_config(
    layers: Sequence[str], matrix: Tensor
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the field and the tensors by which all `layers`, of one last name, read x `matrix`.

    The type is `random-hadamard` also for a Hadamard matrix, since vLLM has no kernel for the type
    `hadamard` on a CPU, and of `random-matrix` it divides by √n, which compressed-tensors does not.
    """
    last = ".".join(layers[0].rsplit(".", 2)[-2:]).replace(".", r"\.")
    apply = {"targets": [rf"re:.*\.{last}$"], "location": "input", "inverse": False, "ignore": []}
    group = {"type": "random-hadamard", "apply": [apply], "randomize": False, "head_dim": None,
             "requires_grad": False, "precision": "torch.float32"}  # fmt: skip
    stored = {f"{layers[0]}.{_GROUP}_input.weight": matrix * math.sqrt(len(matrix))}
    return {"config_groups": {_GROUP: group}}, stored


def transforms_of(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the groups of a configuration's field, none where it has no such field."""
    quantized = getattr(config, "quantization_config", None)
    field = quantized.get(FIELD) if isinstance(quantized, dict) else None
    return (field or {}).get("config_groups") or {}


def remove_transforms(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a configuration without its transforms, changed in place."""
    quantized: dict[str, Any] = config.quantization_config  # pyright: ignore[reportAttributeAccessIssue]
    del quantized[FIELD]
    if quantized.get("quantization_status") == STATUS:
        quantized["quantization_status"] = "compressed"
    return config


class _Turn(nn.Module):
    """x M on every run of as many channels as M has rows."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.register_buffer("matrix", matrix, persistent=False)

    matrix: Tensor

    def forward(self, x: Tensor) -> Tensor:
        parts = x.unflatten(-1, (-1, len(self.matrix))).to(self.matrix.dtype)
        return (parts @ self.matrix).flatten(-2).to(x.dtype)


def _turn_input(layer: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return layer.get_submodule("turn_input")(args[0]), *args[1:]


def _turn_output(layer: nn.Module, _args: object, output: Tensor) -> Tensor:
    return layer.get_submodule("turn_output")(output)


def attach_transforms(
    model: PreTrainedModel, groups: Mapping[str, Any], tensors: Mapping[str, Tensor], source: str
) -> None:
    """Make a model's layers apply the transforms of `groups`, with matrices from `tensors`.

    Raises:
        WakefulError: a transform is of an unsupported kind, or its matrix is missing.
    """
    for name, group in groups.items():
        if group.get("type") not in ("hadamard", "random-hadamard") or group.get("randomize"):
            raise _refusal(source, name, f"is {group.get('type')!r}, of which readers differ")
        for args in group["apply"]:
            where = args["location"]
            if where in _BEFORE:
                continue
            if where not in _SIZED:
                raise _refusal(source, name, f"acts on {where}")
            _attach(model, f"{name}_{where}", group, args, tensors, source)


def _attach(
    model: PreTrainedModel,
    name: str,
    group: Mapping[str, Any],
    args: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    source: str,
) -> None:
    from compressed_tensors.utils import match_named_modules  # noqa: PLC0415  # Transformers has read the model by it

    where = args["location"]
    stored = [tensors[matrix] for matrix in tensors if matrix.endswith(f".{name}.weight")]
    transforms = {len(matrix): _Turn(_full_matrix(matrix, args)) for matrix in stored}
    matches = list(match_named_modules(model, args["targets"], args.get("ignore") or []))
    if not matches:
        raise _refusal(source, name, f"names no layer: {args['targets']}")
    for path, layer in matches:
        width = group.get("head_dim") or getattr(layer, _SIZED[where])
        if width not in transforms:
            if group["type"] != "hadamard" or width & (width - 1):
                raise _refusal(source, name, f"has no matrix of {width} channels for {path}")
            factors = transform_factors(width, torch.device("cpu"), torch.float32)
            transforms[width] = _Turn(transform(torch.eye(width), factors))
        layer.add_module(f"turn_{where}", transforms[width])
        if where == "input":
            layer.register_forward_pre_hook(_turn_input, prepend=True)
        else:
            layer.register_forward_hook(_turn_output)


def _full_matrix(stored: Tensor, args: Mapping[str, Any]) -> Tensor:
    matrix = stored.float() / math.sqrt(len(stored))
    return matrix.T.contiguous() if args.get("inverse") else matrix


def _refusal(source: str, name: str, why: str) -> WakefulError:
    return WakefulError(
        f"{source}: {name} of {FIELD} {why}: load the model that was quantized, or serve it by vLLM"
    )
