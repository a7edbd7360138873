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
    """KL(first ‖ second) of the next-token distributions, in nats per token."""

    def describe(self, prefix: Sequence[int]) -> str:
        """Return the differences of a cured model from the original as words for a report; the
        original read the token ids `prefix` before the text.
        """
        after_prefix = f", which reads ids {list(prefix)} before it" if prefix else ""
        return (
            f"at most {self.largest:.1e} from the model before{after_prefix}, in root mean square "
            f"{self.relative:.1e} of their deviation; KL {self.kl:.1e} nats per token"
        )


@torch.inference_mode()
def measure_differences(
    original: nn.Module, plain: Decoder, cured: Decoder, text: Tensor, prefix: Sequence[int]
) -> dict[str, Difference]:
    """Measure how far a cured model's logits are from the original's on a text (B, L): return the
    differences by the dtype of the arithmetic and, in bfloat16, whether the model is cured.

    The reference is the original in its own dtype, which reads the stored `prefix` as tokens of the
    text. Compared with it are the cured model in that dtype and in bfloat16, and the uncured
    decoder `plain` in bfloat16, which shows the effect of rounding alone.
    """
    prefixed_rows = [prepend_tokens(prefix, row[None]) for row in text]
    expected = [logits_of(original, row)[:, len(prefix) :] for row in prefixed_rows]
    dtype = plain.embed.weight.dtype
    dtype_name = str(dtype).removeprefix("torch.")
    by_dtype = {dtype_name: logit_difference(expected, (cured(row[None]) for row in text))}
    if dtype != torch.bfloat16:
        run_cured = _as_bfloat16(cured)
        cured_logits = (run_cured(row[None]) for row in text)
        by_dtype["bfloat16, cured"] = logit_difference(expected, cured_logits)
        run_plain = _as_bfloat16(plain)
        plain_logits = (run_plain(row)[:, len(prefix) :] for row in prefixed_rows)
        by_dtype["bfloat16, not cured"] = logit_difference(expected, plain_logits)
    return by_dtype


def _as_bfloat16(decoder: Decoder) -> Callable[[Tensor], Tensor]:
    """Return a function from token ids (B, L) to a decoder's logits (B, L, V) in bfloat16, without
    changing the decoder.
    """
    tensors = itertools.chain(decoder.named_parameters(), decoder.named_buffers())
    rounded = {
        name: tensor.bfloat16() for name, tensor in tensors if tensor.is_floating_point()
    }  # fmt: skip

    def run(ids: Tensor) -> Tensor:
        with Float32Products():
            return functional_call(decoder, rounded, (ids,))

    return run


class Float32Products(TorchFunctionMode):
    """Context in which linear layers in bfloat16 on a CPU compute in float32 and round the result.

    The numbers are the same, since bfloat16 products are summed in float32 anyway, and processors
    without bfloat16 are several times faster.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Call a torch function: in float32 if it is a linear layer in bfloat16 on the CPU, as it
        is otherwise.
        """
        if func is linear and args[0].dtype == torch.bfloat16 and args[0].device.type == "cpu":
            x, weight, *bias = args
            wide_bias = (tensor.float() for tensor in bias if tensor is not None)
            return linear(x.float(), weight.float(), *wide_bias).bfloat16()
        return func(*args, **(kwargs or {}))


def logit_difference(expected: Sequence[Tensor], logits: Iterable[Tensor]) -> Difference:
    """Return how far a model's `logits` are from the `expected` ones of another, given for each
    sequence (1, L, V) of a text.
    """
    figures: list[list[float]] = []
    for reference, output in zip(expected, logits, strict=True):
        error = output.float() - reference.float()
        p, q = reference.float().log_softmax(-1), output.float().log_softmax(-1)
        kl = (p.exp() * (p - q)).sum(-1).mean()
        row = [error.abs().max(), error.square().mean(), reference.float().var(), kl]
        figures.append(torch.stack(row).tolist())
    largest, squares, variances, kls = torch.tensor(figures, dtype=torch.float64).unbind(1)
    relative = (float(squares.mean()) / float(variances.mean())) ** 0.5
    return Difference(largest=float(largest.max()), relative=relative, kl=float(kls.mean()))
