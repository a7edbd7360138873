"""Experts that Transformers keeps in one tensor a projection, as linear layers of their own.

Its fused classes say by attributes how their tensors lie, so that one module serves them all. What
has linear layers is quantized by every scheme and method.

Shapes: T tokens, k experts a token, E experts, D the stream's width.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


class Experts(nn.Module):
    """The same function as a fused module's, whose weights its layers share."""

    gate_up_proj: nn.ModuleList
    up_proj: nn.ModuleList
    down_proj: nn.ModuleList

    def __init__(self, fused: Any) -> None:
        """Split a fused module's weights into one linear layer for each expert."""
        super().__init__()
        self.inner: Any = copy.copy(fused)
        """Its gate, activation and norm, without its projections."""
        self.inner._parameters = {}
        self.has_gate, self.has_norm = bool(fused.has_gate), bool(fused.has_post_expert_norm)
        for name in ("gate_up_proj" if self.has_gate else "up_proj", "down_proj"):
            weights = fused._parameters[name].detach().unbind()
            bias = fused._parameters.get(f"{name}_bias")
            biases = [None] * len(weights) if bias is None else bias.detach().unbind()
            layers = [
                _linear(weight.T if fused.is_transposed else weight, bias)
                for weight, bias in zip(weights, biases, strict=True)
            ]
            self.add_module(name, nn.ModuleList(layers))

    def forward(
        self, x: Float[Tensor, "T D"], chosen: Int[Tensor, "T k"], weights: Float[Tensor, "T k"]
    ) -> Float[Tensor, "T D"]:
        """Return the sum of the chosen experts' outputs, times their weights."""
        up = self.gate_up_proj if self.has_gate else self.up_proj
        activate = self.inner._apply_gate if self.has_gate else self.inner.act_fn
        y = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            token, slot = torch.where(chosen == expert)
            output = self.down_proj[expert](activate(up[expert](x[token])))
            if self.has_norm:
                output = self.inner.post_expert_norm(output)
            y.index_add_(0, token, (output * weights[token, slot, None]).to(y.dtype))
        return y


def is_fused(module: nn.Module) -> bool:
    """Return True for a module of experts that Transformers keeps in one tensor a projection."""
    down = module._parameters.get("down_proj")
    return down is not None and down.ndim == 3 and hasattr(module, "is_transposed")


def unfuse_experts(model: nn.Module, is_needed: Callable[[str], bool]) -> nn.Module:
    """Return a model whose fused experts are linear layers, by names that `is_needed`.

    It shares all weights with `model`, which is unchanged, and is `model` if it has no such
    experts.
    """
    fused = {
        id(module): Experts(module)
        for name, module in model.named_modules()
        if is_fused(module) and is_needed(name)
    }
    return with_modules(model, fused) if fused else model


def with_modules(model: nn.Module, replaced: Mapping[int, nn.Module]) -> nn.Module:
    """Return a copy with modules exchanged by identity; parameters and buffers are shared."""
    shared: dict[int, object] = {id(tensor): tensor for tensor in model.parameters()}
    shared |= {id(tensor): tensor for tensor in model.buffers()}
    # The copy must not see the exchanged modules' tensors, so it is told what they become.
    return copy.deepcopy(model, shared | dict(replaced)).eval()


def put(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Put layers into a model, in place, by their names."""
    for name, layer in layers.items():
        model.set_submodule(name, layer)


def routers_of(model: nn.Module) -> set[int]:
    """Return the ids of the routers: modules next to experts, with a weight row for each."""
    routers: set[int] = set()
    for parent in model.modules():
        siblings: list[Any] = [*parent.children()]
        experts = [part for part in siblings if isinstance(part, Experts) or is_fused(part)]
        counts = {len(part.down_proj) for part in experts}
        for sibling in siblings if counts else ():
            weight = sibling._parameters.get("weight")
            if weight is not None and weight.ndim == 2 and len(weight) in counts:
                routers.add(id(sibling))
    return routers


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer
