"""`rotate_experts`: what `rotate` does, on the modules of a Transformers mixture of experts.

Our decoder holds no experts, so the parameters themselves are turned, by the names that the
Llama-like families share (Mixtral, Qwen3-MoE, gpt-oss). A name that is not known is refused, and so
is a result with other logits: nothing rests on the names being right.
"""

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from wakeful.errors import WakefulError
from wakeful.model.evaluating import evaluating
from wakeful.optim.rotations.base import LearnedRotation, Rotation, rotation_of
from wakeful.paged import store_like
from wakeful.surgery.rotate import Turning, check_same, make_turn

_MLP = r"mlp\.(?:shared_expert\.)?"
_READS = {
    "input_layernorm.weight": r"self_attn\.[qkv]_proj\.weight",
    "post_attention_layernorm.weight": rf"{_MLP}(?:gate|up)_proj\.weight"
    r"|mlp\.(?:gate|router|shared_expert_gate)\.weight|mlp\.experts\.gate_up_proj",
    "norm.weight": r"lm_head\.weight",
}
"""Parameters that read the stream after each norm, by their names inside of a block."""
_TABLE = "embed_tokens.weight"
_WRITES = (
    r"self_attn\.o_proj\.(?:weight|bias)|mlp\.experts\.down_proj(?:_bias)?"
    rf"|{_MLP}down_proj\.(?:weight|bias)"
)
_STAYS = (
    r"self_attn\.(?:[qkv]_proj\.bias|[qk]_norm\.weight|sinks)|mlp\.router\.bias"
    rf"|{_MLP}(?:gate|up)_proj\.bias|mlp\.experts\.gate_up_proj_bias"
)
_BLOCK = re.compile(r"model\.(?:layers\.\d+\.)?")
_Step = tuple[int, Turning]
"""An axis of a parameter, and the operation on it as the last axis."""


@torch.no_grad()
def rotate_experts(
    model: PreTrainedModel,
    rotation: Rotation | str = "hadamard",
    *,
    stream: bool = True,
    seed: int = 0,
) -> PreTrainedModel:
    """Return a model with the same logits whose residual stream and heads' values are rotated;
    without `stream` only the values.

    If the stream is rotated, the head is no longer tied. Parameters that are not changed are shared
    with `model`, which stays as it is.

    Raises:
        WakefulError: the rotation is learned, a parameter is not known, or the logits change.
    """
    kind = rotation_of(rotation)
    if isinstance(kind, LearnedRotation):
        raise WakefulError(f"{kind} is learned from gradients: use another, such as hadamard")
    turned: Any = copy.deepcopy(model, {id(p): p for p in model.parameters()}).eval()
    head, table = turned.get_output_embeddings(), turned.get_input_embeddings()
    if stream and head.weight is table.weight:
        head.weight = nn.Parameter(head.weight.detach(), requires_grad=False)
        turned.config.tie_word_embeddings = False
    named = dict(turned.named_parameters())
    suffixes = {name: _BLOCK.sub("", name, count=1) for name in named}
    if stream:
        _check_names(suffixes, type(model).__name__)
    config = turned.config
    head_width = (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    turns = {
        part: make_turn(kind, part, width, table.weight.device, seed=seed)
        for part, width in (("stream", config.hidden_size), ("values", head_width))
    }
    for name, parameter in named.items():
        suffix, block = suffixes[name], name.removesuffix(suffixes[name])
        # The norm whose output the parameter reads, by the name of its scale in the block.
        norm = next(
            (n for n in _READS if stream and re.fullmatch(_READS[n], suffix)),
            None,
        )
        reads = norm is not None or (stream and suffix == _TABLE)
        steps: list[_Step] = []
        if norm is not None:  # multiply the norm's scale into the parameter
            scale = named["model.norm.weight" if norm == "norm.weight" else block + norm]
            steps.append((_stream_axis(turned, name, reads=True), scale.double().mul))
        if reads or (stream and re.fullmatch(_WRITES, suffix)):
            steps.append((_stream_axis(turned, name, reads=reads), turns["stream"]))
        if re.fullmatch(r"self_attn\.(?:v_proj\.(?:weight|bias)|o_proj\.weight)", suffix):
            steps.append((0 if "v_proj" in suffix else 1, turns["values"]))
        if stream and suffix in _READS:  # a norm's scale, which is in its readers now, becomes 1
            steps.append((0, torch.ones_like))
        if steps:
            _transform_parameter(turned, name, parameter, steps)
    with evaluating(model):
        check_same(
            lambda tokens: model(tokens).logits, lambda tokens: turned(tokens).logits,
            table.weight, model.dtype, f"the logits of this {type(model).__name__}",
            f"under {kind}: it does more with them than the names of its parameters say",
        )  # fmt: skip
    return turned


def _check_names(suffixes: Mapping[str, str], kind: str) -> None:
    """Raise `WakefulError` if it is not known whether a parameter reads the residual stream or
    writes to it.

    `suffixes` maps each parameter's full name to its name inside its block. `kind` names the model
    in the message.
    """
    # The keys of `_READS` are norms' scales, its values the patterns of what reads each norm.
    pattern = re.compile("|".join([_WRITES, _STAYS, *_READS.values()]))
    for name, suffix in suffixes.items():
        if suffix not in _READS and suffix != _TABLE and not pattern.fullmatch(suffix):
            raise WakefulError(
                f"{kind} has a parameter {name}, of which it is not known whether it reads the "
                "residual stream, so that it cannot be rotated"
            )


def _stream_axis(model: nn.Module, name: str, *, reads: bool) -> int:
    """Return which axis of a parameter lies in the residual stream: −1 or −2.

    It is the axis of the inputs for a matrix that `reads` the stream, and that of the outputs for
    one that writes to it. Matrices are (outputs, inputs), or (inputs, outputs) in modules with the
    attribute `is_transposed`. Before these axes there may be one of experts.
    """
    if name.endswith("bias"):  # its only axis, or the one after the experts'
        return -1
    owner = model.get_submodule(name.rpartition(".")[0])
    is_transposed = bool(getattr(owner, "is_transposed", False))  # (inputs, outputs)
    return -1 if reads != is_transposed else -2


def _transform_parameter(
    model: nn.Module, name: str, source: Tensor, steps: Sequence[_Step]
) -> None:
    """Replace the parameter `name` of a model by its values `source` after some steps.

    A step is (axis, operation): the operation is applied with that axis as the last. All steps are
    computed in float64 and rounded once, one expert after the other to save memory.
    """
    has_experts = source.ndim == 3  # a matrix for each expert
    matrices = source.unbind() if has_experts else [source]
    transformed = []
    for matrix in matrices:
        result = matrix.double()
        for axis, operation in steps:
            result = operation(result.movedim(axis, -1)).movedim(-1, axis)
        transformed.append(result.to(source.dtype))
    stacked = torch.stack(transformed) if has_experts else transformed[0].contiguous()
    owner, _, leaf = name.rpartition(".")
    parameter = nn.Parameter(store_like(source, stacked), requires_grad=False)
    model.get_submodule(owner)._parameters[leaf] = parameter
