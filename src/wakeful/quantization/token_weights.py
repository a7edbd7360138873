"""Per-token loss sensitivity of a layer's output (squared gradients): the weights of GPTQ's XᵀX.

An error δ_t of a layer's output y_t changes the loss ℓ of a text by Σ_t g_tᵀ δ_t, g_t = ∂ℓ/∂y_t. If
errors of channels and tokens are independent, the mean square of that change is Σ_t w_t ‖δ_t‖² with
w_t = mean over channels of g_t² (GuidedQuant, 2505.07004, here with one group of channels); half of
it is the second-order loss increase of a well-fitted model. Rounding then minimizes
Σ_t w_t ‖(Ŵ − W) x_t‖²: XᵀX becomes Xᵀ diag(w) X. Tokens that every later token reads, such as an
attention sink, get large weights.
"""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from wakeful.quantization.gradients import capture_output_gradients

TokenWeights = Mapping[str, Sequence[Mapping[int, Tensor]]]
"""Weights (M,) of tokens by the layer's name, the batch's index and the layer's call in
that batch, counted from 0; calls that the loss does not depend on are missing."""


def compute_token_weights(
    model: nn.Module, layers: Mapping[str, nn.Module], text: Sequence[Int[Tensor, "B L"]]
) -> TokenWeights:
    """Return the loss sensitivity of every token in each layer, by one forward and one backward
    pass over each batch of `text`. No parameter gets a gradient.

    Raises:
        WakefulError: the model has no embedding.
    """
    weights: dict[str, list[dict[int, Tensor]]] = {name: [] for name in layers}

    def store_weights(name: str, call: int, gradient: Tensor) -> None:
        weights[name][-1][call] = mean_square_per_token(gradient)

    with capture_output_gradients(model, layers, store_weights) as read:
        for tokens in text:
            for weights_by_batch in weights.values():
                weights_by_batch.append({})  # which `read` fills, by the layer's call
            read(tokens)
            _share_storage([weights_by_batch[-1] for weights_by_batch in weights.values()])
    return weights


def mean_square_per_token(gradient: Float[Tensor, "M N"]) -> Float[Tensor, "M"]:
    """Return the weight of each token: the mean over output channels of its squared gradient."""
    return gradient.square().mean(1)


def _share_storage(weights_of_layers: Sequence[dict[int, Tensor]]) -> None:
    """Copy the token weights of one batch into one tensor per device, and put slices of it in their
    place.

    `weights_of_layers` holds, for each layer, the weights by the number of the layer's call; these
    dictionaries are changed in place. Many small tensors, allocated between large ones, would keep
    the allocator from releasing memory.
    """
    entries_by_device: dict[torch.device, list[tuple[dict[int, Tensor], int]]] = {}
    for weights_by_call in weights_of_layers:
        for call, weights in weights_by_call.items():
            entries_by_device.setdefault(weights.device, []).append((weights_by_call, call))
    for entries in entries_by_device.values():
        tensors = [weights_by_call[call] for weights_by_call, call in entries]
        copies = torch.cat(tensors).split([*map(len, tensors)])
        for (weights_by_call, call), copied in zip(entries, copies, strict=True):
            weights_by_call[call] = copied
