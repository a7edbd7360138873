"""GatedNorm and PreAffine against their equations, and where they do not fit."""

import pytest
import torch

from helpers import some_tokens, tiny_decoder
from wakeful.errors import WakefulError
from wakeful.hf.weights_out import stock_architecture
from wakeful.norms import Norm, NormSpec
from wakeful.quantization import quantize_module, quantized_layers
from wakeful.surgery import rotate
from wakeful_papers.norms import GatedNorm, PreAffine

HERE = NormSpec(part="mlp", layer=2, num_layers=4, width=7, eps=1e-3, bias=False)


NORMS = ["wakeful_papers.norms:GatedNorm", "wakeful_papers.norms:PreAffine"]


def made(norm: Norm) -> Norm:
    norm.attach(HERE)
    norm.double()
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    return norm


def rms(x: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-3)


def test_gated_norm_by_hand() -> None:
    norm = made(GatedNorm(rank=3))
    assert isinstance(norm, GatedNorm)
    x = torch.randn(2, 5, 7, dtype=torch.float64)
    y = rms(x) * norm.scale
    inner = y @ norm.down.T
    inner = inner / (1 + torch.exp(-inner))
    expected = y / (1 + torch.exp(-inner @ norm.up.T))
    torch.testing.assert_close(norm(x), expected, rtol=0, atol=1e-13)


def test_pre_affine_by_hand() -> None:
    norm = made(PreAffine())
    assert isinstance(norm, PreAffine)
    x = torch.randn(2, 5, 7, dtype=torch.float64)
    torch.testing.assert_close(norm(x), rms(norm.before * x) * norm.weight, rtol=0, atol=1e-13)


def test_gates_start_near_a_half() -> None:
    decoder = tiny_decoder(norm="wakeful_papers.norms:GatedNorm", noise=0, init_std=0.02)
    for norm in decoder.modules():
        if isinstance(norm, GatedNorm):
            assert (norm.scale == 1).all()
            assert 0.01 < norm.down.std() < 0.03
            x = torch.randn(3, 16, dtype=torch.float64)
            torch.testing.assert_close(norm(x), rms(x) / 2, rtol=0.05, atol=0.01)


@pytest.mark.parametrize("norm", NORMS)
def test_no_rotation_turns_them(norm: str) -> None:
    with pytest.raises(WakefulError, match=rf"model\.norm = {norm}"):
        rotate(tiny_decoder(norm=norm))


@pytest.mark.parametrize("norm", NORMS)
def test_they_go_out_as_our_own_class(norm: str) -> None:
    assert stock_architecture(tiny_decoder(norm=norm).config)[0] == "wakeful"


@torch.no_grad()
@pytest.mark.parametrize("scheme", ["fine", "coarse", "smoothquant"])
@pytest.mark.parametrize("norm", NORMS)
def test_their_matrices_stay_where_linear_layers_are_quantized(norm: str, scheme: str) -> None:
    decoder = tiny_decoder(dtype=torch.float32, norm=norm, noise=0.02, init_std=0.1).eval()
    tokens = some_tokens(2, 9)
    calibration = [tokens] if scheme == "smoothquant" else []
    small = quantize_module(decoder, scheme, calibration=calibration)
    assert not any("norm" in name for name in quantized_layers(small))
    kept = dict(small.named_parameters())
    for name, parameter in decoder.named_parameters():
        if "norm" in name:
            assert torch.equal(kept[name], parameter)
    wanted = decoder(tokens)
    assert (small(tokens) - wanted).norm() / wanted.norm() < 0.2
