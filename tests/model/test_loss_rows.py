"""The cross-entropy a few rows at a time, against PyTorch's."""

import pytest
import torch
import torch.nn.functional as F

from helpers import some_tokens, tiny_decoder
from wakeful.model.chunked import cross_entropy_of_rows
from wakeful.model.decoder import cross_entropy


@pytest.mark.parametrize("rows", [0, 1, 4, 15, 64])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_it_is_the_cross_entropy(rows: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(15, 13, generator=generator, dtype=torch.float64).mul(4).to(dtype)
    logits.requires_grad_()
    targets = torch.randint(13, (15,), generator=generator)
    targets[3:7] = -100
    wide = logits if dtype == torch.float64 else logits.float()
    wanted = F.cross_entropy(wide, targets)
    found = cross_entropy_of_rows(logits, targets, targets != -100, rows=rows)
    torch.testing.assert_close(found, wanted)
    slopes = [torch.autograd.grad(2.5 * loss, logits)[0] for loss in (found, wanted)]
    assert slopes[0].dtype == dtype
    torch.testing.assert_close(*slopes)


@pytest.mark.slow
def test_its_gradient_is_its_slope() -> None:
    logits = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 3, -100, 6, 3])
    assert torch.autograd.gradcheck(
        lambda x: cross_entropy_of_rows(x, targets, targets != -100, rows=2), logits
    )


def test_a_decoders_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wakeful.model.decoder.MANY", 1)
    decoder = tiny_decoder().double()
    tokens, targets = (some_tokens(2, 9)[:, part] for part in (slice(-1), slice(1, None)))
    targets = targets.clone()
    targets[0, 5:] = -100
    wanted = cross_entropy(decoder(tokens), targets)
    found = decoder.loss(tokens, targets)
    slopes = [torch.autograd.grad(loss, decoder.head.weight)[0] for loss in (found, wanted)]
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(*slopes)


def test_gradients_add_up_and_belong_to_whoever_asked() -> None:
    logits = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 3, 1, 6, 3])
    loss = cross_entropy_of_rows(logits, targets, targets != -100)
    once = torch.autograd.grad(loss, logits, retain_graph=True)[0]
    kept = once.clone()
    loss.backward(retain_graph=True)
    loss.backward()
    torch.testing.assert_close(logits.grad, 2 * kept)
    torch.testing.assert_close(once, kept, rtol=0, atol=0)
