"""Difference of two models' predictions on a text."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wakeful.probes.running import logits_of
from wakeful.surgery import prepend_tokens


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Difference of two models' logits and next-token distributions on a text."""

    largest: float
    """Largest difference of a logit."""
    relative: float
    """Root mean square of the differences, over the logits' own deviation."""
    kl: float
    """KL(first ‖ second) of the next-token distributions, in nats per token."""

    def describe(self, prefix: Sequence[int]) -> str:
        """Return the difference of a cured model from the original as words for a report.

        `prefix` are the token ids that the original read before the text, () for none.
        """
        after_prefix = f", which reads ids {list(prefix)} before the text" if prefix else ""
        return (
            f"at most {self.largest:.1e} from the original's{after_prefix}; root mean square "
            f"{self.relative:.1e} of their deviation; KL {self.kl:.1e} nats per token"
        )


@torch.inference_mode()
def measure_difference(
    original: nn.Module, cured: nn.Module, text: Tensor, prefix: Sequence[int] = ()
) -> Difference:
    """Return how far a cured model's logits are from the original's on a text (B, L).

    The original reads the token ids `prefix` before each sequence. The cured model does not: it has
    stored them, or has sinks in their place.
    """
    figures: list[list[float]] = []  # for each sequence
    for sequence in text:
        tokens = sequence[None]
        # Logits after the prefix's own tokens have no counterpart.
        expected = logits_of(original, prepend_tokens(prefix, tokens))[:, len(prefix) :].float()
        output = logits_of(cured, tokens).float()
        error = output - expected
        p, q = expected.log_softmax(-1), output.log_softmax(-1)
        kl = (p.exp() * (p - q)).sum(-1).mean()
        figures.append(
            torch.stack([error.abs().max(), error.square().mean(), expected.var(), kl]).tolist()
        )
    largest, squares, variances, kls = torch.tensor(figures, dtype=torch.float64).unbind(1)
    relative = (float(squares.mean()) / float(variances.mean())) ** 0.5
    return Difference(largest=float(largest.max()), relative=relative, kl=float(kls.mean()))
