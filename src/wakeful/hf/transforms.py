"""Online rotations of a model's activations, as compressed-tensors' `transform_config` stores them.

A reader of the field multiplies a layer's inputs or outputs x by M / √n, where M (n, n) is stored
among the weights, once for each rotation. vLLM does. Transformers (5.23) silently ignores
the field and runs another function, so such a folder has a `quantization_status` that Transformers
refuses, and that no other reader looks at.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from wakeful.errors import WakefulError
from wakeful.parts.orthoadam import transform, transform_factors

FIELD = "transform_config"
STATUS = "needs transform_config: vLLM or wakeful"
"""Value of `quantization_status` that keeps Transformers from loading a model without its
transforms."""
_SIZE_ATTRIBUTES = {"input": "in_features", "output": "out_features"}
"""Attribute of a linear layer that gives a transform's size, by the transform's location."""
_FOLDED_LOCATIONS = ("weight_input", "weight_output")
"""Locations of transforms that are folded into the stored weights."""


def make_transform_config(
    rotations: Sequence[tuple[Tensor, Sequence[str]]], linears: Iterable[str]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return two things: the `transform_config` that makes a reader multiply inputs of layers by
    matrices, and the tensors to store for it, by name.

    `rotations` are pairs of a matrix (n, n) and the names of the layers whose inputs it multiplies,
    n at a time. `linears` are the names of all linear layers. The type is `random-hadamard` also
    for a Hadamard matrix: vLLM has no kernel of type `hadamard` on a CPU, and divides a
    `random-matrix` by √n, which compressed-tensors does not.
    """
    groups: dict[str, Any] = {}
    stored: dict[str, Tensor] = {}
    for index, (matrix, layers) in enumerate(rotations):
        # Layers are named by how their names end, such as "mlp.down_proj", others excepted.
        ends = dict.fromkeys(_name_end(name) for name in layers)
        others = [name for name in linears if name not in layers and _name_end(name) in ends]
        apply = {
            "targets": [rf"re:(.*\.)?{re.escape(end)}$" for end in ends],
            "location": "input", "inverse": False, "ignore": others,
        }  # fmt: skip
        groups[f"rotation_{index}"] = {
            "type": "random-hadamard", "apply": [apply], "randomize": False,
            "head_dim": len(matrix), "requires_grad": False, "precision": "torch.float32",
        }  # fmt: skip
        # Readers divide the stored matrix by √n, and look for it at any one of the layers.
        name = f"{layers[0]}.rotation_{index}_input.weight"
        stored[name] = matrix * math.sqrt(len(matrix))
    return {"config_groups": groups}, stored


def _name_end(layer: str) -> str:
    """Return the last two parts of a layer's name, such as "mlp.down_proj"."""
    return ".".join(layer.rsplit(".", 2)[-2:])


def transforms_of(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the groups of a configuration's `transform_config`; {} without one."""
    quantized = getattr(config, "quantization_config", None)
    field = quantized.get(FIELD) if isinstance(quantized, dict) else None
    return (field or {}).get("config_groups") or {}


def remove_transforms(config: PreTrainedConfig) -> PreTrainedConfig:
    """Remove `transform_config` from a configuration, in place, and replace our own
    `quantization_status`, which makes Transformers refuse the folder, by "compressed"; return the
    configuration.
    """
    quantized: dict[str, Any] = config.quantization_config  # pyright: ignore[reportAttributeAccessIssue]
    del quantized[FIELD]
    if quantized.get("quantization_status") == STATUS:
        quantized["quantization_status"] = "compressed"
    return config


class _Rotation(nn.Module):
    """Multiplication of each group of n channels of x by a matrix M (n, n)."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.register_buffer("matrix", matrix, persistent=False)

    matrix: Tensor

    def forward(self, x: Tensor) -> Tensor:
        groups = x.unflatten(-1, (-1, len(self.matrix))).to(self.matrix.dtype)
        return (groups @ self.matrix).flatten(-2).to(x.dtype)


def _rotate_input(layer: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return layer.get_submodule("input_rotation")(args[0]), *args[1:]


def _rotate_output(layer: nn.Module, _args: object, output: Tensor) -> Tensor:
    return layer.get_submodule("output_rotation")(output)


def attach_transforms(
    model: PreTrainedModel, groups: Mapping[str, Any], tensors: Mapping[str, Tensor], source: str
) -> None:
    """Make a model's layers, in place, apply the transforms of `groups` to their inputs or outputs,
    with matrices from `tensors`.

    `groups` are the `config_groups` of a `transform_config`; `source` names the model in errors.

    Raises:
        WakefulError: a transform is of an unsupported type or location, its matrix is missing, or
            it names no layer.
    """
    for name, group in groups.items():
        if group.get("type") not in ("hadamard", "random-hadamard") or group.get("randomize"):
            problem = f"is {group.get('type')!r}, which readers interpret differently"
            raise _transform_error(source, name, problem)
        for application in group["apply"]:
            location = application["location"]
            if location in _FOLDED_LOCATIONS:  # the stored weights are transformed already
                continue
            if location not in _SIZE_ATTRIBUTES:
                raise _transform_error(source, name, f"acts on {location}")
            _attach_transform(model, f"{name}_{location}", group, application, tensors, source)


def _attach_transform(
    model: PreTrainedModel,
    name: str,
    group: Mapping[str, Any],
    application: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    source: str,
) -> None:
    """Make layers rotate their inputs or outputs.

    `application` is an entry of the `apply` list of a transform (`group`). It names the layers
    ("targets") and says whether inputs or outputs are rotated ("location"). Tensors whose names end
    in `name` are the matrices, one for each width. A missing one of type "hadamard" is computed if
    its width is a power of two.

    Raises:
        WakefulError: no layer has a name among the targets, or the matrix of a layer is missing.
    """
    from compressed_tensors.utils import match_named_modules  # noqa: PLC0415  # Transformers has read the model by it

    location, targets = application["location"], application["targets"]
    inverse = bool(application.get("inverse"))
    matrices = [tensors[key] for key in tensors if key.endswith(f".{name}.weight")]
    rotations = {
        len(matrix): _Rotation(_normalize_matrix(matrix, inverse=inverse)) for matrix in matrices
    }
    matches = list(match_named_modules(model, targets, application.get("ignore") or []))
    if not matches:
        raise _transform_error(source, name, f"names no layer: {targets}")
    for path, layer in matches:
        # Each head is rotated alone where the transform names a head's width.
        width = group.get("head_dim") or getattr(layer, _SIZE_ATTRIBUTES[location])
        if width not in rotations:
            is_power_of_two = width & (width - 1) == 0
            if group["type"] != "hadamard" or not is_power_of_two:
                problem = f"has no matrix of {width} channels for {path}"
                raise _transform_error(source, name, problem)
            factors = transform_factors(width, torch.device("cpu"), torch.float32)
            rotations[width] = _Rotation(transform(torch.eye(width), factors))
        layer.add_module(f"{location}_rotation", rotations[width])
        if location == "input":
            layer.register_forward_pre_hook(_rotate_input, prepend=True)
        else:
            layer.register_forward_hook(_rotate_output)


def _normalize_matrix(stored: Tensor, *, inverse: bool) -> Tensor:
    """Return the orthogonal matrix of a transform, which is the stored matrix (n, n) divided by √n,
    or its inverse.
    """
    matrix = stored.float() / math.sqrt(len(stored))
    return matrix.T.contiguous() if inverse else matrix


def _transform_error(source: str, name: str, problem: str) -> WakefulError:
    return WakefulError(
        f"{source}: {name} of {FIELD} {problem}: load the model that was quantized, or serve it by "
        "vLLM"
    )
