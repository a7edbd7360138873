"""Gradients of the loss in linear layers' outputs, by one pass forward and back."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from wakeful.errors import WakefulError
from wakeful.model.attention import Heads
from wakeful.model.finite import widened
from wakeful.model.hooks import hooked
from wakeful.probes.huggingface import stream_of
from wakeful.probes.running import first_target, logits_of
from wakeful.quantization.linear import matrix


@contextmanager
def output_gradients(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    on_gradient: Callable[[str, int, Float[Tensor, "M N"]], None],
    *,
    on_rows: Callable[[str, Int[Tensor, "B L"], Float[Tensor, "B L D"]], None] | None = None,
    labels: torch.Generator | None = None,
) -> Iterator[Callable[[Int[Tensor, "B L"]], None]]:
    """Yield what reads sequences forward and back; no parameter gets a gradient.

    `on_gradient` is called with a layer's name, the number of the call, and ∂ℓ/∂y of the matrix's
    output for each of M tokens in at least float32, the last layer first; not with calls that ℓ
    does not depend on. `on_rows` is called with an embedding's name, its tokens and the gradient of
    their rows. ℓ is the sum of all predicted tokens' losses: of the text's tokens or, with
    `labels`, of tokens that the model's own predictions draw.

    Raises:
        WakefulError: the model has no embedding.
    """
    starts: list[Tensor] = []
    tables_read: list[tuple[str, Tensor]] = []
    calls = Counter[str]()

    def begin(name: str, args: tuple[Any, ...], rows: Tensor) -> Tensor:
        tables_read.append((name, args[0]))
        starts.append(rows.detach().requires_grad_())
        return starts[-1].clone()  # which a model may change in place, as CTRL scales it

    def follow(name: str, y: Tensor, width: int) -> None:
        call = calls[name]
        calls[name] += 1
        if y.requires_grad:
            y.register_hook(
                lambda gradient: on_gradient(name, call, widened(gradient.reshape(-1, width)))
            )

    def read(tokens: Tensor) -> None:
        for notes in (starts, tables_read, calls):
            notes.clear()
        logits = widened(logits_of(model, tokens.clone())[:, first - 1 : -1].flatten(0, 1))
        if not starts:
            raise WakefulError(
                f"{type(model).__name__} has no embedding to follow the loss back to: use "
                "gptq(weighting='none')"
            )
        targets = tokens[:, first:].flatten()
        if labels is not None:
            targets = logits.detach().softmax(-1).multinomial(1, generator=labels).squeeze(1)
        loss = nn.functional.cross_entropy(logits, targets, reduction="sum")
        gradients = torch.autograd.grad(loss, starts, allow_unused=True)
        for (name, ids), gradient in zip(tables_read, gradients, strict=True):
            if on_rows is not None and gradient is not None:
                on_rows(name, ids, widened(gradient))

    tables = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Embedding)
    }
    # Heads normalize and turn what their matrix gave.
    norms = {name: module.norm for name, module in layers.items() if isinstance(module, Heads)}
    widths = {name: matrix(layers[name])[0].shape[0] for name in norms}
    plain_layers = {name: module for name, module in layers.items() if name not in norms}
    first = first_target(model)
    with (
        hooked(tables, after=begin),
        hooked(norms, before=lambda name, args: follow(name, args[0], widths[name])),
        hooked(
            plain_layers,
            after=lambda name, _, y: follow(name, stream_of(y), stream_of(y).shape[-1]),
        ),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        yield read
