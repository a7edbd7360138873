"""Experts that Transformers keeps in one tensor for each projection, as linear layers.

Transformers' fused classes say by attributes how their tensors lie, so that one module serves them
all. Linear layers are what every scheme and method quantizes.

Shapes: T tokens, k experts a token, E experts, D the stream's width.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


class Experts(nn.Module):
    """A fused module of experts as linear layers, one for each expert, which share its weights."""

    gate_up_proj: nn.ModuleList
    up_proj: nn.ModuleList
    down_proj: nn.ModuleList

    def __init__(self, fused: Any) -> None:
        """Split a fused module's weights into one linear layer for each expert; the layers share
        its memory.
        """
        super().__init__()
        self.inner: Any = copy.copy(fused)
        """The fused module's gate, activation and norm, without its projections."""
        self.inner._parameters = {}
        self.has_gate, self.has_norm = bool(fused.has_gate), bool(fused.has_post_expert_norm)
        for name in ("gate_up_proj" if self.has_gate else "up_proj", "down_proj"):
            weights = fused._parameters[name].detach().unbind()
            bias = fused._parameters.get(f"{name}_bias")
            biases = [None] * len(weights) if bias is None else bias.detach().unbind()
            # A linear layer has (outputs, inputs); some classes keep them the other way round.
            layers = [
                _linear(weight.T if fused.is_transposed else weight, bias)
                for weight, bias in zip(weights, biases, strict=True)
            ]
            self.add_module(name, nn.ModuleList(layers))

    def forward(
        self, x: Float[Tensor, "T D"], chosen: Int[Tensor, "T k"], weights: Float[Tensor, "T k"]
    ) -> Float[Tensor, "T D"]:
        """Return for each token the weighted sum of its k experts' outputs. `chosen` has the
        experts' indices, `weights` their weights.
        """
        up = self.gate_up_proj if self.has_gate else self.up_proj
        activate = self.inner._apply_gate if self.has_gate else self.inner.act_fn
        y = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            # The tokens that chose this expert, and its place among their k experts.
            token, slot = torch.where(chosen == expert)
            output = self.down_proj[expert](activate(up[expert](x[token])))
            if self.has_norm:
                output = self.inner.post_expert_norm(output)
            y.index_add_(0, token, (output * weights[token, slot, None]).to(y.dtype))
        return y


def is_fused(module: nn.Module) -> bool:
    """Return True for a module of experts whose projections are one tensor each, of 3 axes."""
    down = module._parameters.get("down_proj")
    return down is not None and down.ndim == 3 and hasattr(module, "is_transposed")


def unfuse_experts(model: nn.Module, is_needed: Callable[[str], bool]) -> nn.Module:
    """Return a copy of a model in which fused experts are linear layers: those modules of experts
    for whose name `is_needed` returns True.

    The copy shares all weights with `model`, which is unchanged. If there are no such modules,
    return `model` itself.
    """
    fused = {
        id(module): Experts(module)
        for name, module in model.named_modules()
        if is_fused(module) and is_needed(name)
    }
    return with_modules(model, fused) if fused else model


def with_modules(model: nn.Module, replaced: Mapping[int, nn.Module]) -> nn.Module:
    """Return a copy of a model, in evaluation mode, in which some modules are replaced: `replaced`
    maps the `id()` of an old module to the new one. Parameters and buffers are shared with `model`.
    """
    shared: dict[int, object] = {id(tensor): tensor for tensor in model.parameters()}
    shared |= {id(tensor): tensor for tensor in model.buffers()}
    # deepcopy takes from its memo, by id, what it would otherwise copy.
    return copy.deepcopy(model, shared | dict(replaced)).eval()


def put(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Put layers into a model, in place, by their names."""
    for name, layer in layers.items():
        model.set_submodule(name, layer)


def routers_of(model: nn.Module) -> set[int]:
    """Return the ids (`id()`) of the model's routers, which choose experts. A router is known by
    its parent, which also has the experts, and by a weight matrix with a row for each expert.
    """
    routers: set[int] = set()
    for parent in model.modules():
        siblings: list[Any] = [*parent.children()]
        experts = [part for part in siblings if isinstance(part, Experts) or is_fused(part)]
        expert_counts = {len(part.down_proj) for part in experts}
        for sibling in siblings:
            weight = sibling._parameters.get("weight")
            if weight is not None and weight.ndim == 2 and len(weight) in expert_counts:
                routers.add(id(sibling))
    return routers


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return a linear layer that shares these tensors, without gradients."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer
