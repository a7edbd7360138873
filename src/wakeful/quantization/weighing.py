"""Per-token loss sensitivity of a layer's output (squared gradients): the weights of GPTQ's XᵀX.

An error δ_t of a layer's output y_t moves the loss ℓ of a text by Σ_t g_tᵀ δ_t, g_t = ∂ℓ/∂y_t. The
mean square of that over texts, half of which a well-fitted model's loss rises by in second order,
is Σ_t w_t ‖δ_t‖² with w_t = mean over channels of g_t², where channels and tokens err apart from
each other (GuidedQuant, 2505.07004, whose channels are here one group). Rounding then minimizes
Σ_t w_t ‖(Ŵ − W) x_t‖²: XᵀX becomes Xᵀ diag(w) X. What every later token reads, such as the key and
value of a sink, is what many gradients meet in.
"""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from wakeful.quantization.gradients import output_gradients

TokenWeights = Mapping[str, Sequence[Mapping[int, Tensor]]]
"""Of each layer, of each sequence, by the number of the call: (M,) weights of its tokens; zeros
where there are none.
"""


def token_weights(
    model: nn.Module, layers: Mapping[str, nn.Module], text: Sequence[Int[Tensor, "B L"]]
) -> TokenWeights:
    """Return the weights of a text's tokens in each layer, by one pass forward and back.

    No parameter gets a gradient.

    Raises:
        WakefulError: the model has no embedding.
    """
    weights: dict[str, list[dict[int, Tensor]]] = {name: [] for name in layers}

    def keep(name: str, call: int, gradient: Tensor) -> None:
        weights[name][-1][call] = mean_square(gradient)

    with output_gradients(model, layers, keep) as read:
        for tokens in text:
            for calls in weights.values():
                calls.append({})
            read(tokens)
            _together([calls[-1] for calls in weights.values()])
    return weights


def mean_square(gradient: Float[Tensor, "M N"]) -> Float[Tensor, "M"]:
    """Return the weights of tokens with these gradients."""
    return gradient.square().mean(1)


def _together(heard: Sequence[dict[int, Tensor]]) -> None:
    """Copy the weights of one sequence into one tensor a device, now that what the pass held is
    free: where they came up, amid it, they would keep the allocator from giving anything back.
    """
    places: dict[torch.device, list[tuple[dict[int, Tensor], int]]] = {}
    for calls in heard:
        for turn, weights in calls.items():
            places.setdefault(weights.device, []).append((calls, turn))
    for there in places.values():
        parts = [calls[turn] for calls, turn in there]
        for (calls, turn), part in zip(
            there, torch.cat(parts).split([*map(len, parts)]), strict=True
        ):
            calls[turn] = part
