"""How much the loss hears of each token's error in a layer's output: the weights of GPTQ's XᵀX.

An error δ_t of a layer's output y_t moves the loss ℓ of a text by Σ_t g_tᵀ δ_t, g_t = ∂ℓ/∂y_t. The
mean square of that over texts, half of which a well-fitted model's loss rises by in second order,
is Σ_t w_t ‖δ_t‖² with w_t = mean over channels of g_t², where channels and tokens err apart from
each other (GuidedQuant, 2505.07004, whose channels are here one group). Rounding then minimizes
Σ_t w_t ‖(Ŵ − W) x_t‖²: XᵀX becomes Xᵀ diag(w) X. What every later token reads, such as the key and
value of a sink, is what many gradients meet in.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from wakeful.errors import WakefulError
from wakeful.model.attention import Heads
from wakeful.model.evaluating import evaluating
from wakeful.probes.running import first_target, logits_of
from wakeful.quant.linear import matrix

TokenWeights = Mapping[str, Sequence[Sequence[Tensor | None]]]
"""Of each layer, of each sequence, of each call: (M,) weights of its tokens; None is zeros."""


def token_weights(
    model: nn.Module, layers: Mapping[str, nn.Module], text: Sequence[Int[Tensor, "B L"]]
) -> TokenWeights:
    """Return the weights of a text's tokens in each layer, by one pass forward and back.

    No parameter gets a gradient.

    Raises:
        WakefulError: the model has no embedding.
    """
    found: dict[str, list[list[Tensor | None]]] = {name: [] for name in layers}
    starts: list[Tensor] = []

    def begin(_table: nn.Module, _args: tuple, rows: Tensor) -> Tensor:
        starts.append(rows.detach().requires_grad_())
        return starts[-1]

    def listen(name: str, y: Tensor) -> None:
        width, calls = matrix(layers[name])[0].shape[0], found[name][-1]
        turn = len(calls)
        calls.append(None)

        def hear(gradient: Tensor) -> None:
            calls[turn] = gradient.reshape(-1, width).float().square().mean(1)

        if y.requires_grad:
            y.register_hook(hear)

    def watch(name: str, layer: nn.Module) -> RemovableHandle:
        if isinstance(layer, Heads):  # they normalize and turn what the matrix gave
            return layer.norm.register_forward_pre_hook(lambda _norm, args: listen(name, args[0]))

        def hear_of(_layer: nn.Module, _args: tuple, y: Tensor) -> None:
            listen(name, y)

        return layer.register_forward_hook(hear_of)

    first = first_target(model)
    with ExitStack() as hooks:
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                hooks.callback(module.register_forward_hook(begin).remove)
        for name, layer in layers.items():
            hooks.callback(watch(name, layer).remove)
        hooks.enter_context(evaluating(model))
        hooks.enter_context(torch.inference_mode(False))
        hooks.enter_context(torch.enable_grad())
        for tokens in text:
            starts.clear()
            for calls in found.values():
                calls.append([])
            logits = logits_of(model, tokens.clone())[:, first - 1 : -1]
            if not starts:
                raise WakefulError(
                    f"{type(model).__name__} has no embedding to follow the loss back to: use "
                    "gptq(weighting='none')"
                )
            loss = nn.functional.cross_entropy(
                logits.flatten(0, 1).float(), tokens[:, first:].flatten(), reduction="sum"
            )
            torch.autograd.grad(loss, starts, allow_unused=True)
    return found
