"""softmax-1 forward and backward against SDPA, a zero key/value row and the explicit matrix."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.models import CPU
from benchmarks.timing import Ratio, compare
from wakeful.model.attend import attend, causal_mask, explicit_attention

BATCH, HEADS, LENGTH, WIDTH = 4, 12, 1024, 64


def ratios() -> Iterator[Ratio]:
    """Yield time ratios at B4 H12 L1024 d64, float32, forward and backward."""
    device = CPU
    shape = (BATCH, LENGTH, HEADS, WIDTH)
    torch.manual_seed(0)
    heads = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    grad = torch.randn(shape)
    sink = torch.zeros(HEADS)
    learned = torch.zeros(HEADS, requires_grad=True)
    scale = WIDTH**-0.5
    keep = causal_mask(LENGTH, LENGTH, torch.device("cpu"))

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
    yield compare("learned sink", with_sink, peer, plain, target="<= 1.03")
    yield compare("softmax-1 as a zero key/value row", both(zero_row), peer, plain)
    explicit = both(
        lambda q, k, v: explicit_attention(q, k, v, scale=scale, sink=sink, keep=keep)[0]
    )
    yield compare("softmax-1 as an explicit matrix", explicit, peer, plain, rounds=3, warmup=1)
    yield from _against_flex(device)


def _against_flex(device: torch.device) -> Iterator[Ratio]:
    """Against FlexAttention, compiled. On a CPU that has no backward pass: forward only there."""
    torch.manual_seed(0)
    on_gpu = device.type == "cuda"
    shape = (BATCH, LENGTH, HEADS, WIDTH)
    heads = [torch.randn(shape, device=device, requires_grad=on_gpu) for _ in range(3)]
    grad, sink = torch.randn(shape, device=device), torch.zeros(HEADS, device=device)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, scale=WIDTH**-0.5, sink=sink)

    def timed(forward: Callable[..., Tensor]) -> Callable[[], object]:
        if on_gpu:
            return lambda: torch.autograd.grad(forward(*heads), heads, grad)
        return lambda: forward(*heads)

    theirs = _flex_by_lse(device) if on_gpu else _flex_by_zero_row(device)
    torch.testing.assert_close(ours(*heads), theirs(*heads), rtol=1e-3, atol=1e-4)
    what = "softmax-1" if on_gpu else "softmax-1, forward only"
    peer = "FlexAttention, compiled"
    yield compare(what, timed(ours), peer, timed(theirs), target="<= 1.00")


def _flex_by_lse(device: torch.device) -> Callable[..., Tensor]:
    """Divide by 1 + the sum of exponentials, from the log of the sum that comes with the output."""
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    mask = create_block_mask(
        lambda b, h, i, j: i >= j, None, None, LENGTH, LENGTH, device=device.type
    )
    flex = torch.compile(flex_attention)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out, aux = flex(q, k, v, block_mask=mask, return_aux=AuxRequest(lse=True))
        assert aux.lse is not None
        return (out * torch.sigmoid(aux.lse).unsqueeze(-1)).transpose(1, 2)

    return forward


def _flex_by_zero_row(device: torch.device) -> Callable[..., Tensor]:
    """Attend to one key and value more, both zero: on a CPU the log of the sum cannot be had."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(
        lambda b, h, i, j: i + 1 >= j, None, None, LENGTH, LENGTH + 1, device=device.type
    )
    flex = torch.compile(flex_attention)
    row = torch.zeros(BATCH, HEADS, 1, WIDTH, device=device)

    def forward(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        k, v = torch.cat([row, k], 2), torch.cat([row, v], 2)
        return flex(q, k, v, block_mask=mask).transpose(1, 2)

    return forward
