"""Differences of two models' predictions on a text, for each type of arithmetic."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode

from wakeful.model.decoder import Decoder
from wakeful.probes.running import logits_of
from wakeful.surgery import prepend_tokens


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Differences of two models' logits and next-token distributions on a text."""

    largest: float
    """Largest difference of a logit."""
    relative: float
    """Root mean square of the differences, over the logits' own deviation."""
    kl: float
    """KL of the second's next-token distribution from the first's, in nats per token."""

    def describe(self, prefix: Sequence[int]) -> str:
        """Format the differences from an original model that reads the ids `prefix` first."""
        read = f", which reads ids {list(prefix)} before it" if prefix else ""
        return (
            f"at most {self.largest:.1e} from the model before{read}, in root mean square "
            f"{self.relative:.1e} of their deviation; KL {self.kl:.1e} nats per token"
        )


@torch.inference_mode()
def measure_differences(
    original: nn.Module, plain: Decoder, cured: Decoder, text: Tensor, prefix: Sequence[int]
) -> dict[str, Difference]:
    """Return how far the cured model is from the one before, which reads the prefix as text.

    In the model's own arithmetic, and in bfloat16 both the cured model and the one before as our
    `plain` decoder, from the one before in its own.
    """
    rows = [prepend_tokens(prefix, row[None]) for row in text]
    expected = [logits_of(original, row)[:, len(prefix) :] for row in rows]
    dtype = plain.embed.weight.dtype
    dtype_name = str(dtype).removeprefix("torch.")
    by_dtype = {dtype_name: logit_difference(expected, (cured(row[None]) for row in text))}
    if dtype != torch.bfloat16:
        rounded = _bfloat16(cured)
        rounded_logits = (rounded(row[None]) for row in text)
        by_dtype["bfloat16, cured"] = logit_difference(expected, rounded_logits)
        rounded = _bfloat16(plain)
        plain_logits = (rounded(row)[:, len(prefix) :] for row in rows)
        by_dtype["bfloat16, not cured"] = logit_difference(expected, plain_logits)
    return by_dtype


def _bfloat16(decoder: Decoder) -> Callable[[Tensor], Tensor]:
    """Return the decoder's forward in bfloat16, without a second copy in its own arithmetic."""
    tensors = itertools.chain(decoder.named_parameters(), decoder.named_buffers())
    rounded = {
        name: tensor.bfloat16() for name, tensor in tensors if tensor.is_floating_point()
    }  # fmt: skip

    def run(ids: Tensor) -> Tensor:
        with Float32Products():
            return functional_call(decoder, rounded, (ids,))

    return run


class Float32Products(TorchFunctionMode):
    """Matrix products of bfloat16 by float32's, rounded once: the same arithmetic, since bfloat16
    products add up in float32 anyway, and several times faster on processors that lack bfloat16."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is linear and args[0].dtype == torch.bfloat16 and args[0].device.type == "cpu":
            x, weight, *bias = args
            wide_bias = (tensor.float() for tensor in bias if tensor is not None)
            return linear(x.float(), weight.float(), *wide_bias).bfloat16()
        return func(*args, **(kwargs or {}))


def logit_difference(expected: Sequence[Tensor], logits: Iterable[Tensor]) -> Difference:
    """Return how far logits are apart, given those of each row."""
    figures = torch.zeros(len(expected), 4, dtype=torch.float64)
    for row, reference, output in zip(figures, expected, logits, strict=True):
        error = output.float() - reference.float()
        p, q = reference.float().log_softmax(-1), output.float().log_softmax(-1)
        kl = (p.exp() * (p - q)).sum(-1).mean()
        row[:] = torch.stack(
            [error.abs().max(), error.square().mean(), reference.float().var(), kl]
        )
    _, square, variance, kl = figures.mean(0).tolist()
    largest = float(figures[:, 0].max())
    return Difference(largest=largest, relative=(square / variance) ** 0.5, kl=kl)
