"""Gradients of the loss in the outputs of linear layers, by one forward and backward pass."""

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
from wakeful.probes.running import logits_of
from wakeful.quantization.linear import weight_and_bias


@contextmanager
def capture_output_gradients(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    on_gradient: Callable[[str, int, Float[Tensor, "M N"]], None],
    *,
    on_embedding_gradient: Callable[[str, Int[Tensor, "B L"], Float[Tensor, "B L D"]], None]
    | None = None,
) -> Iterator[Callable[..., None]]:
    """Yield a function `read(tokens, targets=None)` that runs token ids (B, L) forward and back.

    Each pass reports gradients to the callbacks. The loss ℓ is the cross-entropy summed over all
    predicted tokens. Its targets are the text's own next tokens, or `targets`, (B · (L − 1),). No
    parameter gets a gradient. `read` raises `WakefulError` if the model has no embedding.

    Args:
        model: the model, with hooks within the context.
        layers: its linear layers by name.
        on_gradient: called with a layer's name, the index of the layer's call in this pass (from
            0), and ∂ℓ/∂(x Wᵀ + b) for each of M tokens, in float32 or wider. The last layer comes
            first. Calls that ℓ does not depend on are left out.
        on_embedding_gradient: called with an embedding's name, its token ids, and the gradient of
            the embedded tokens.
    """
    embedded: list[Tensor] = []
    embedding_inputs: list[tuple[str, Tensor]] = []
    calls = Counter[str]()

    def start_graph(name: str, args: tuple[Any, ...], rows: Tensor) -> Tensor:
        """Make an embedding's output a leaf of the graph, which thus starts here and includes no
        parameter.
        """
        embedding_inputs.append((name, args[0]))
        embedded.append(rows.detach().requires_grad_())
        return embedded[-1].clone()  # which a model may change in place, as CTRL scales it

    def watch_output(name: str, y: Tensor, width: int) -> None:
        """Report the gradient of a layer's output y, as rows of `width` channels, when the backward
        pass has computed it.
        """
        call = calls[name]
        calls[name] += 1
        if y.requires_grad:  # else it does not depend on any embedding
            y.register_hook(
                lambda gradient: on_gradient(name, call, widened(gradient.reshape(-1, width)))
            )

    def read(tokens: Tensor, targets: Tensor | None = None) -> None:
        """Run one forward and backward pass; see `capture_output_gradients`."""
        for records in (embedded, embedding_inputs, calls):
            records.clear()
        logits = logits_of(model, tokens.clone())[:, :-1].flatten(0, 1)
        if not embedded:
            raise WakefulError(
                f"{type(model).__name__} has no embedding, from which gradients are computed: use "
                "gptq(weighting='none')"
            )
        targets = tokens[:, 1:].flatten() if targets is None else targets
        # ∂ℓ/∂logits = softmax(logits) − one-hot(targets): autograd would store the former twice.
        logit_gradient = widened(logits.detach()).softmax(-1)
        logit_gradient[torch.arange(len(targets), device=targets.device), targets] -= 1
        gradients = torch.autograd.grad(
            logits, embedded, logit_gradient.to(logits.dtype), allow_unused=True
        )
        for (name, ids), gradient in zip(embedding_inputs, gradients, strict=True):
            if on_embedding_gradient is not None and gradient is not None:
                on_embedding_gradient(name, ids, widened(gradient))

    def watch_head_projection(name: str, args: tuple[Any, ...]) -> None:
        watch_output(name, args[0], head_widths[name])

    def watch_layer(name: str, _: tuple[Any, ...], y: object) -> None:
        watch_output(name, stream_of(y), stream_of(y).shape[-1])

    embeddings = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Embedding)
    }
    # The outputs of our projections into heads are normalized and rotated: watch what the norm
    # reads, x Wᵀ + b.
    norms = {name: module.norm for name, module in layers.items() if isinstance(module, Heads)}
    head_widths = {name: weight_and_bias(layers[name])[0].shape[0] for name in norms}
    other_layers = {name: module for name, module in layers.items() if name not in norms}
    with (
        hooked(embeddings, after=start_graph),
        hooked(norms, before=watch_head_projection),
        hooked(other_layers, after=watch_layer),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        yield read
