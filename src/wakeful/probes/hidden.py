"""Hidden states: outliers, over-smoothing, the first token's peak, and what a block changes.

Every metric is of block outputs, before the final norm; layer −1 is the embedding.
"""

import torch
from torch import Tensor

from wakeful.probes import exact
from wakeful.probes.base import Frame, HiddenEvent, MeanProbe, Probe, exact_rows, first_and_rest


def put_kurtosis_and_norm_ratio(
    probe: MeanProbe, layer: int, h: Tensor, variant: str = "paper"
) -> None:
    """Add to a probe a sequence's kurtosis and norm ratio over channels: those of the first token,
    and the mean over the other tokens. `h` (L, D) are its hidden states.
    """
    measures = {"kurtosis": exact.kurtosis(h), "norm_ratio": exact.norm_ratio(h)}
    for metric, values in measures.items():
        for position, part in first_and_rest(values):
            probe.put(layer, metric, part.mean(), variant=variant, position=position)


class Outliers(MeanProbe):
    """`kurtosis`, `norm_ratio` ‖x‖∞²/‖x‖₂² and `max_activation`, of the first token and of the rest
    (From Attention to Activation, sections 2.2, 4 and 5): the two have different causes.

    `max_activation` of the rest is the mean over tokens of each one's max |x| in variant `paper`
    (table 2: "mean max absolute activation value of all other tokens") and the largest of them
    all in variant `largest`. For the first token they are one number.
    """

    def see_hidden(self, event: HiddenEvent) -> None:
        """Add kurtosis, norm ratio and largest |x| of the first token and the rest."""
        for h in event.sequences:
            put_kurtosis_and_norm_ratio(self, event.layer, h)
            for position, part in first_and_rest(h):
                largest = exact.token_max_activation(part)
                for variant, value in (("paper", largest.mean()), ("largest", largest.max())):
                    where = {"variant": variant, "position": position}
                    self.put(event.layer, "max_activation", value, **where)


class Smoothing(MeanProbe):
    """`token_similarity`, the mean cosine of two tokens (Value Residual Learning, eq. 13), and
    `residual_peak`, ‖h_0‖ over the mean of the others (fig. 10).
    """

    def see_hidden(self, event: HiddenEvent) -> None:
        """Add the mean cosine of token pairs and the first token's residual peak."""
        for h in event.sequences:
            length = len(h)
            if length < 2:  # no pairs, and no other tokens
                continue
            total = torch.nn.functional.normalize(h, dim=-1).sum(0, dtype=torch.float64)
            # Σ_ij ĥ_i·ĥ_j = ‖Σ ĥ‖²: the mean of L (L − 1) cosines in O(L D).
            similarity = (total.square().sum() - length) / (length * (length - 1))
            self.put(event.layer, "token_similarity", similarity)
            self.put(event.layer, "residual_peak", exact.residual_peak(h), position="first")


class BlockInfluence(MeanProbe):
    """`block_influence`, 1 − mean cos(x_in, x_out) (ShortGPT), and `angular_distance`,
    arccos(cos(x_in, x_out)) / π: variant `paper` at the last token, `all_tokens` their mean.

    The row of layer n is about block n: from its input to its output.
    """

    def see_hidden(self, event: HiddenEvent) -> None:
        """Add 1 − cos and the angle, in units of π, between a block's input and its output."""
        if event.before is None:  # the embedding, which has no input
            return
        # `sequences` are the block's outputs.
        for x_in, x_out in zip(event.inputs, event.sequences, strict=True):
            cosine = torch.nn.functional.cosine_similarity(x_in, x_out, dim=-1)
            angle = cosine.clamp(-1, 1).arccos() / torch.pi
            self.put(event.layer, "block_influence", 1 - cosine.mean())
            self.put(event.layer, "angular_distance", angle[-1], position="last")
            self.put(event.layer, "angular_distance", angle.mean(), variant="all_tokens")


class OutlierChannels(Probe):
    """`outlier_channel`: the channels with the largest |x| of each layer over everything seen.

    `variant` names the channel, `position` the token in its sequence, `value` is max |x|.
    """

    def __init__(self, *, top: int = 5) -> None:
        self.top = top
        self.peaks: dict[int, tuple[Tensor, Tensor]] = {}
        """For each layer: every channel's largest |x|, and its token's position in its sequence."""

    def see_hidden(self, event: HiddenEvent) -> None:
        """Update every channel's largest |x| and its position; of equal ones the first stays."""
        for h in event.sequences:
            size, position = (part.cpu() for part in h.abs().max(0))
            previous, previous_position = self.peaks.get(event.layer, (size, position))
            positions = torch.where(size > previous, position, previous_position)
            self.peaks[event.layer] = torch.maximum(size, previous), positions

    def rows(self) -> Frame:
        """Return the `top` channels of each layer, largest |x| first, with its position."""
        rows = []
        for layer, (peaks, positions) in sorted(self.peaks.items()):
            largest, channels = peaks.topk(min(self.top, len(peaks)))
            for value, channel in zip(largest.tolist(), channels.tolist(), strict=True):
                position = str(int(positions[channel]))
                rows.append((layer, None, position, "outlier_channel", f"channel {channel}", value))
        return exact_rows(rows)
