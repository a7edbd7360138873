"""Approximations of attention to an earlier layer: eqs. 3 and 6 against eq. 2.

Shapes: H query heads, G key/value heads, L tokens, d head width.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from wakeful.errors import WakefulError
from wakeful.model.finite import widened
from wakeful.probes import exact
from wakeful.probes.base import AttentionEvent, MeanProbe
from wakeful.probes.streaming import AttentionInputs, check_whole_length

Outputs = dict[str, Float[Tensor, "L Hd"]]


class Mappings(MeanProbe):
    """`mapping_cosine`: similarity of two mappings of the previous layer's values to attention to
    it (Value Residual Learning, section 3.2 and fig. 3), the mean over tokens of cos(U, U_2).

    With n the layer and m = n − 1, U_2 = softmax(Q_n [K_n; K_m]ᵀ / √d) [V_n; V_m] (eq. 2). Variant
    `current_attention` is of softmax(Q_n [K_n; K_n]ᵀ / √d) [V_n; V_m] (eq. 3), and `identity` of
    A_n V_n + V_m (eq. 6). Heads are joined; the first layer has no row.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last: AttentionEvent | None = None

    def see_attention(self, event: AttentionEvent) -> None:
        """Add the cosine between each mapping's output and the cross-layer one."""
        previous, self._last = self._last, event
        if event.layer == 0:
            return
        if previous is None or previous.layer != event.layer - 1:
            raise WakefulError("the probe Mappings looks at every layer of a model, in order")
        for attended, previous_attended in zip(event.sequences, previous.sequences, strict=True):
            outputs = mapping_outputs(attended, previous_attended)
            gold = outputs.pop("cross_layer")
            for variant, output in outputs.items():
                cosine = torch.nn.functional.cosine_similarity(output, gold, dim=-1).mean()
                self.put(event.layer, "mapping_cosine", cosine, variant=variant)


def mapping_outputs(attended: AttentionInputs, previous: AttentionInputs) -> Outputs:
    """Return U of eqs. 2 (`cross_layer`), 3 (`current_attention`) and 6 (`identity`), heads joined.

    `previous` is the attention of the layer before.

    Raises:
        WakefulError: weights are no softmax of the sequence's own keys, heads differ between the
            layers, or the sequence is too long for whole weights.
    """
    if attended.weigh is not None or attended.prefix_k is not None:
        raise WakefulError("the probe Mappings is of softmax attention to a sequence's own tokens")
    if attended.k.shape != previous.k.shape or attended.v.shape != previous.v.shape:
        raise WakefulError("the probe Mappings needs layers with equally many heads of one width")
    check_whole_length(attended.length)
    keep = attended.keep
    if keep is None:
        keep = exact.causal(attended.length, attended.window, attended.q.device)
    both_keep = torch.cat([keep, keep], 1)
    repeats = attended.num_heads // attended.k.shape[0]
    parts: dict[str, list[Tensor]] = {"cross_layer": [], "current_attention": [], "identity": []}

    def weights(head: slice, k: Tensor, keep: Tensor) -> Tensor:
        sink = None if attended.sink is None else attended.sink[..., head].to(k)
        return exact.attention_weights(
            attended.q[head].to(k), k.unsqueeze(0), scale=attended.scale,
            softcap=attended.softcap, sink=sink, keep=keep,
        )  # fmt: skip

    for group in range(attended.k.shape[0]):
        head = slice(group * repeats, (group + 1) * repeats)
        k, v, k_m, v_m = (
            widened(x[group]) for x in (attended.k, attended.v, previous.k, previous.v)
        )
        values = torch.cat([v, v_m])
        parts["cross_layer"] += weights(head, torch.cat([k, k_m]), both_keep) @ values
        parts["current_attention"] += weights(head, torch.cat([k, k]), both_keep) @ values
        parts["identity"] += weights(head, k, keep) @ v + v_m
    return {name: torch.cat(heads, -1) for name, heads in parts.items()}
