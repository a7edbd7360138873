"""How far the predictions of two models are apart on a text, in each kind of arithmetic."""

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
    """How far two models' predictions are apart on a text."""

    largest: float
    """Largest difference of a logit."""
    relative: float
    """Root mean square of the differences, over the logits' own deviation."""
    kl: float
    """KL of the second's next-token distribution from the first's, in nats a token."""

    def said(self, prefix: Sequence[int]) -> str:
        """Return it in words, of a model before that reads these ids first."""
        read = f", which reads ids {list(prefix)} before it" if prefix else ""
        return (
            f"at most {self.largest:.1e} from the model before{read}, in root mean square "
            f"{self.relative:.1e} of their deviation; KL {self.kl:.1e} nats a token"
        )


@torch.inference_mode()
def differences(
    before: nn.Module, plain: Decoder, cured: Decoder, text: Tensor, prefix: Sequence[int]
) -> dict[str, Difference]:
    """Return how far the cured model is from the one before, which reads the prefix as text.

    In the model's own arithmetic, and in bfloat16 both the cured model and the one before as our
    `plain` decoder, from the one before in its own.
    """
    after = [prepend_tokens(prefix, row[None]) for row in text]
    expected = [logits_of(before, row)[:, len(prefix) :] for row in after]
    own = plain.embed.weight.dtype
    kind = str(own).removeprefix("torch.")
    found = {kind: difference(expected, (cured(row[None]) for row in text))}
    if own != torch.bfloat16:
        rounded = _bfloat16(cured)
        short = (rounded(row[None]) for row in text)
        found["bfloat16, cured"] = difference(expected, short)
        rounded = _bfloat16(plain)
        long = (rounded(row)[:, len(prefix) :] for row in after)
        found["bfloat16, not cured"] = difference(expected, long)
    return found


def _bfloat16(decoder: Decoder) -> Callable[[Tensor], Tensor]:
    """Return the decoder's forward in bfloat16, without a second copy in its own arithmetic."""
    tensors = itertools.chain(decoder.named_parameters(), decoder.named_buffers())
    rounded = {
        name: tensor.bfloat16() for name, tensor in tensors if tensor.is_floating_point()
    }  # fmt: skip

    def run(ids: Tensor) -> Tensor:
        with Widened():
            return functional_call(decoder, rounded, (ids,))

    return run


class Widened(TorchFunctionMode):
    """Matrix products of bfloat16 by float32's, rounded once: the same arithmetic, since bfloat16
    products add up in float32 anyway, and several times faster on processors that lack bfloat16."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func is linear and args[0].dtype == torch.bfloat16 and args[0].device.type == "cpu":
            x, weight, *bias = args
            wide = (each.float() for each in bias if each is not None)
            return linear(x.float(), weight.float(), *wide).bfloat16()
        return func(*args, **(kwargs or {}))


def difference(expected: Sequence[Tensor], found: Iterable[Tensor]) -> Difference:
    """Return how far logits are apart, given those of each row."""
    figures = torch.zeros(len(expected), 4, dtype=torch.float64)
    for each, one, other in zip(figures, expected, found, strict=True):
        apart = other.float() - one.float()
        p, q = one.float().log_softmax(-1), other.float().log_softmax(-1)
        kl = (p.exp() * (p - q)).sum(-1).mean()
        each[:] = torch.stack([apart.abs().max(), apart.square().mean(), one.float().var(), kl])
    _, square, variance, kl = figures.mean(0).tolist()
    largest = float(figures[:, 0].max())
    return Difference(largest=largest, relative=(square / variance) ** 0.5, kl=kl)
