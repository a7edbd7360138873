"""What a run is measured by besides its loss: quantization damage, and the bytes it trains in."""

from typing import Any

import torch

from wakeful.config.schema import Config
from wakeful.data.order import ValidationWindows
from wakeful.errors import WakefulError
from wakeful.model.decoder import Decoder
from wakeful.quant.convert import quantize
from wakeful.quant.measure import measure
from wakeful.quant.schemes import parse_scheme
from wakeful.training.watched import whole_windows


def check_schemes(config: Config, *, imports: bool = False) -> None:
    """Raise `WakefulError` if `train.quantize.schemes` has one that cannot be."""
    for expression in config.train.quantize.schemes:
        if parse_scheme(expression, imports=imports).scales == "static":
            raise WakefulError(
                f"train.quantize.schemes has {expression!r}: training calibrates no static scales; "
                "use wakeful quantize on the finished run"
            )


def quantization_damage(
    config: Config, decoder: Decoder, windows: ValidationWindows
) -> dict[str, dict[str, float]]:
    """Return each scheme's `perplexity`, `increase` over full precision and `divergence` (KL, nats
    a token), on the first whole validation windows, every one alone.
    """
    settings = config.train.quantize
    if not settings.schemes:
        return {}
    device = decoder.head.weight.device
    training = decoder.training
    decoder.eval()
    sequences = [row.to(device) for row in whole_windows(windows, settings.num_sequences)]
    forms = {scheme: quantize(decoder, scheme) for scheme in settings.schemes}
    found = measure(config.name, decoder, forms, sequences)
    decoder.train(training)
    return {
        scheme: {
            "perplexity": found.perplexity(scheme)[0],
            "increase": found.increase(scheme)[0],
            "divergence": found.divergence(scheme)[0],
        }
        for scheme in settings.schemes
    }


def forget_peak(device: torch.device) -> None:
    """Begin to measure a GPU's peak anew, so that it is one run's and not that of those before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def training_bytes(decoder: Decoder, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the bytes of the weights and of the optimizer's state, and on a GPU the peak of all.

    Gradients take as many bytes as the weights; activations depend on the batch and are in the
    peak alone.
    """
    weights = {id(p): p.numel() * p.element_size() for p in decoder.parameters()}
    state = sum(
        value.numel() * value.element_size()
        for entry in optimizer.state.values()
        for value in entry.values()
        if isinstance(value, torch.Tensor)
    )
    found: dict[str, Any] = {"weights": sum(weights.values()), "optimizer": state}
    device = decoder.head.weight.device
    if device.type == "cuda":
        found["peak"] = torch.cuda.max_memory_allocated(device)
    return found
