"""softmax-1 forward and backward against SDPA, a zero key/value row and the explicit matrix."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.timing import Ratio, compare
from wakeful.model.attend import attend, causal_mask, explicit_attention

BATCH, HEADS, LENGTH, WIDTH = 4, 12, 1024, 64


def ratios() -> Iterator[Ratio]:
    """Yield time ratios at B4 H12 L1024 d64, float32, forward and backward."""
    shape = (BATCH, LENGTH, HEADS, WIDTH)
    torch.manual_seed(0)
    heads = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    grad = torch.randn(shape)
    sink = torch.zeros(HEADS)
    learned = torch.zeros(HEADS, requires_grad=True)
    scale = WIDTH**-0.5
    keep = causal_mask(LENGTH, LENGTH, 0, torch.device("cpu"))

    def both(forward: Callable[..., Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(forward(*heads), heads, grad)

    def zero_row(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        row = torch.zeros(BATCH, 1, HEADS, WIDTH)
        k, v = torch.cat([row, k], 1), torch.cat([row, v], 1)
        mask = F.pad(keep, (1, 0), value=True)
        out = F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask
        )
        return out.transpose(1, 2)

    plain = both(lambda q, k, v: attend(q, k, v, scale=scale))
    peer = "plain SDPA"
    ours = both(lambda q, k, v: attend(q, k, v, scale=scale, sink=sink))
    yield compare("softmax-1", ours, peer, plain, target="<= 1.10")
    with_sink = both(lambda q, k, v: attend(q, k, v, scale=scale, sink=learned))
    yield compare("learned sink", with_sink, peer, plain)
    yield compare("softmax-1 as a zero key/value row", both(zero_row), peer, plain)
    explicit = both(
        lambda q, k, v: explicit_attention(q, k, v, scale=scale, sink=sink, keep=keep)[0]
    )
    yield compare("softmax-1 as an explicit matrix", explicit, peer, plain, rounds=3, warmup=1)
