"""How much the loss hears of each token's error in a layer's output: the weights of GPTQ's XᵀX.

An error δ_t of a layer's output y_t moves the loss ℓ of a text by Σ_t g_tᵀ δ_t, g_t = ∂ℓ/∂y_t. The
mean square of that over texts, half of which a well-fitted model's loss rises by in second order,
is Σ_t w_t ‖δ_t‖² with w_t = mean over channels of g_t², where channels and tokens err apart from
each other (GuidedQuant, 2505.07004, whose channels are here one group). Rounding then minimizes
Σ_t w_t ‖(Ŵ − W) x_t‖²: XᵀX becomes Xᵀ diag(w) X. What every later token reads, such as the key and
value of a sink, is what many gradients meet in.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from wakeful.errors import WakefulError
from wakeful.model.attention import Heads
from wakeful.model.hooks import hooked
from wakeful.probes.huggingface import stream_of
from wakeful.probes.running import first_target, logits_of
from wakeful.quantization.linear import matrix

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
    found: dict[str, list[dict[int, Tensor]]] = {name: [] for name in layers}

    def hear(name: str, turn: int, weights: Tensor) -> None:
        found[name][-1][turn] = weights

    with listening(model, layers, hear) as read:
        for tokens in text:
            for calls in found.values():
                calls.append({})
            read(tokens)
            _together([calls[-1] for calls in found.values()])
    return found


@contextmanager
def listening(
    model: nn.Module, layers: Mapping[str, nn.Module], hear: Callable[[str, int, Tensor], None]
) -> Iterator[Callable[[Int[Tensor, "B L"]], None]]:
    """Yield what reads a sequence forward and back.

    `hear` is told of a layer, of the number of its call, and of the (M,) weights of its tokens,
    the last layer first; of no call that the loss hears nothing of.

    Raises:
        WakefulError: the model has no embedding.
    """
    starts: list[Tensor] = []
    calls = Counter[str]()

    def begin(_name: str, _args: tuple[Any, ...], rows: Tensor) -> Tensor:
        starts.append(rows.detach().requires_grad_())
        return starts[-1].clone()  # which a model may change in place, as CTRL scales it

    def listen(name: str, y: Tensor, width: int) -> None:
        turn = calls[name]
        calls[name] += 1
        if y.requires_grad:
            y.register_hook(
                lambda each: hear(name, turn, each.reshape(-1, width).float().square().mean(1))
            )

    def read(tokens: Tensor) -> None:
        starts.clear()
        calls.clear()
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

    tables = {name: each for name, each in model.named_modules() if isinstance(each, nn.Embedding)}
    # Heads normalize and turn what their matrix gave.
    norms = {name: each.norm for name, each in layers.items() if isinstance(each, Heads)}
    wide = {name: matrix(layers[name])[0].shape[0] for name in norms}
    others = {name: each for name, each in layers.items() if name not in norms}
    first = first_target(model)
    with (
        hooked(tables, after=begin),
        hooked(norms, before=lambda name, args: listen(name, args[0], wide[name])),
        hooked(others, after=lambda name, _, y: listen(name, stream_of(y), stream_of(y).shape[-1])),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        yield read


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
