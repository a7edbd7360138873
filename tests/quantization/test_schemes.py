"""Schemes: their names, their expressions, and what a layer under each computes."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from wakeful.errors import WakefulError
from wakeful.quantization import SCHEMES, Absmax, Scheme, Zeropoint, parse_scheme
from wakeful.quantization.arithmetic import _float_matmul, integer_matmul, reference_product
from wakeful.quantization.linear import quantize_layer
from wakeful.variants import Variant, build, variants_by_name


def absmax(x: Tensor, dim: int | None = None) -> Tensor:
    """8-bit absmax by the formula, in float64."""
    x = x.double()
    top = x.abs().max() if dim is None else x.abs().amax(dim, keepdim=True)
    s = (top.float() / 127).double()
    return torch.clip(torch.round(x.float() / s.float()).double(), -127, 127) * s


def zeropoint(w: Tensor) -> Tensor:
    low, high = w.amin(1, keepdim=True), w.amax(1, keepdim=True)
    s = (high - low) / 15
    z = -8 - torch.round(low / s)
    return (torch.clip(torch.round(w / s) + z, -8, 7) - z) * s


def expected(name: str, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Return a layer's output written out for each scheme; x is (tokens, channels)."""
    match name:
        case "fine":
            return absmax(x, 1) @ absmax(w, 1).T + b
        case "moderate":
            return absmax(x) @ absmax(w).T + b
        case "coarse":
            return absmax((absmax(x) @ absmax(w).T + b).float())
        case _:
            return x.double() @ zeropoint(w).double().T + b


def tensors(n: int = 11, k: int = 13) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(7, k)
    x[0, 3] = 90.0  # an outlier
    return x, torch.randn(n, k), torch.randn(n)


def linear_of(w: Tensor, b: Tensor | None) -> nn.Linear:
    layer = nn.Linear(w.shape[1], w.shape[0], bias=b is not None)
    layer.weight = nn.Parameter(w)
    if b is not None:
        layer.bias = nn.Parameter(b)
    return layer


@pytest.mark.parametrize("name", SCHEMES)
def test_a_layer_is_its_formula(name: str) -> None:
    x, w, b = tensors()
    layer = quantize_layer(linear_of(w, b), SCHEMES[name])
    y = layer(x)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double(), expected(name, x, w, b), rtol=1e-5, atol=1e-5)
    assert (y - F.linear(x, w, b)).abs().max() > 1e-3


@pytest.mark.parametrize("name", SCHEMES)
def test_conv1d_is_the_transposed_linear(name: str) -> None:
    x, w, b = tensors()
    conv = Conv1D(11, 13)
    conv.weight = nn.Parameter(w.T.contiguous())
    conv.bias = nn.Parameter(b)
    torch.testing.assert_close(conv(x), F.linear(x, w, b))
    layers = [quantize_layer(one, SCHEMES[name]) for one in (conv, linear_of(w, b))]
    assert torch.equal(layers[0](x), layers[1](x))


OTHERS = [
    "scheme(weights=absmax(bits=4, per='channel'), inputs=absmax(bits=8, per='token'))",
    "scheme(weights=zeropoint(bits=8, per='channel'), inputs=absmax(bits=8, per='tensor'))",
    "scheme(weights=zeropoint(bits=3, per='tensor'), inputs=absmax(bits=6, per='token'), "
    "outputs=absmax(bits=8, per='token'))",
    "scheme(weights=absmax(bits=6, per='tensor'))",
    "fine",
]


@pytest.mark.parametrize("text", [*SCHEMES, *OTHERS])
@pytest.mark.parametrize("k", [1, 8, 13])
def test_integers_agree_with_the_reference(
    text: str, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit; where weights alone are quantized the product is scaled, so to rounding."""
    w = 5 + torch.randn(11, k)  # far from zero: the zero point matters
    layer = linear_of(w, torch.randn(11))
    x = torch.randn(2, 5, k) * torch.logspace(-2, 2, 5).reshape(5, 1)
    scheme = parse_scheme(text)
    quantized = quantize_layer(layer, scheme)
    y = quantized(x)
    monkeypatch.setattr("wakeful.quantization.linear.integer_product", reference_product)
    expected = quantized(x)
    scale = torch.zeros(())
    if scheme.inputs is None:
        scale = x.abs().sum(-1, keepdim=True) * w.abs().max()
    assert ((y - expected).abs() <= 4e-7 * scale).all()
    assert y.shape == (2, 5, 11)


@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (1, 1, 3), (5, 1, 3), (1, 64, 3), (5, 7, 3), (33, 1536, 24)]
)
def test_integer_products_are_exact_at_their_largest(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    a = torch.full((m, k), 127, dtype=torch.int8)
    b = torch.full((n, k), -127, dtype=torch.int8)
    assert (integer_matmul(a, b) == -127 * 127 * k).all()
    a, b = (torch.randint(-127, 128, s, dtype=torch.int8) for s in ((m, k), (n, k)))
    assert torch.equal(integer_matmul(a, b).long(), a.long() @ b.long().T)


@pytest.mark.parametrize("k", [1, 1024, 4099])
def test_float_kernels_add_up_integers_without_rounding(k: int) -> None:
    a = torch.full((3, k), -128, dtype=torch.int8)
    assert (_float_matmul(a, a) == 128 * 128 * k).all()
    a, b = (torch.randint(-128, 128, (rows, k), dtype=torch.int8) for rows in (3, 5))
    assert torch.equal(_float_matmul(a, b).long(), a.long() @ b.long().T)


def test_4_bits_are_packed() -> None:
    _, w, b = tensors()
    small, large = (quantize_layer(linear_of(w, b), SCHEMES[name]) for name in ("w4", "fine"))
    assert small.integers.shape == (11, 7)
    assert large.integers.shape == (11, 13)
    assert small.integers.element_size() == large.integers.element_size() == 1


def test_a_16_bit_layer_keeps_float32_scales() -> None:
    x, w, b = tensors()
    layer = quantize_layer(linear_of(w, b), SCHEMES["fine"])
    scale, before = layer.scale.clone(), layer(x)
    assert layer.to(torch.bfloat16) is layer
    assert torch.equal(layer.scale, scale)
    assert layer.bias is not None
    assert layer.bias.dtype == torch.bfloat16
    y = layer(x.bfloat16())
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), before, rtol=0.03, atol=0.3)


def test_names_and_expressions_are_read_back() -> None:
    for text in (*SCHEMES, *OTHERS):
        scheme = parse_scheme(text)
        assert str(scheme) == scheme.expression == text
        assert parse_scheme(scheme.definition) == scheme
        assert parse_scheme(scheme) is scheme
    for text in OTHERS:
        assert str(parse_scheme(text)) == text
    fine = "scheme(inputs=absmax(bits=8, per='token'), weights=absmax(bits=8, per='channel'))"
    assert str(parse_scheme(fine)) == "fine"
    static = parse_scheme("coarse", "static")
    assert str(static) == "coarse static"
    assert parse_scheme(static.definition, "static") == static
    assert parse_scheme(static.expression) == parse_scheme("coarse(scales='static')") == static
    assert static != parse_scheme("coarse")


def test_every_variant_of_schemes_builds_what_it_says() -> None:
    for kind in variants_by_name("quantization.schemes").values():
        for example in kind.examples:
            made = build("quantization.schemes", example)
            assert type(made) is kind
            assert Variant.__str__(made) == example


def test_objects_are_as_good_as_expressions() -> None:
    mine = Scheme(weights=Absmax(bits=6, per="channel"), inputs=Absmax(bits=8, per="token"))
    text = 'scheme(weights=absmax(bits=6, per="channel"), inputs=absmax(bits=8, per="token"))'
    assert parse_scheme(text) == mine
    assert hash(parse_scheme(text)) == hash(mine)
    assert parse_scheme("fine(weights=absmax(bits=6, per='channel'))") == mine
    assert str(Scheme(weights=Zeropoint(bits=4, per="channel"))) == "w4"


OWN = """
from dataclasses import dataclass

from wakeful.quantization import Absmax, Scheme


class Fives(Absmax):
    symmetric = False  # so that it is for weights alone

    @property
    def high(self):
        return 5


class Mine(Scheme):
    def __init__(self, *, bits: int = 5, fives: bool = False) -> None:
        kind = Fives if fives else Absmax
        super().__init__(weights=kind(bits=bits, per="tensor"))
        self.bits = bits
        self.fives = fives
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module outside the package, importable and not imported."""
    (tmp_path / "own_schemes.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("own_schemes", None)


@pytest.mark.usefixtures("own")
def test_a_scheme_and_a_grid_of_ones_own() -> None:
    with pytest.raises(WakefulError, match="import own_schemes first"):
        parse_scheme("own_schemes:Mine")
    mine = parse_scheme("own_schemes:Mine(bits=3)", imports=True)
    assert str(mine) == mine.expression == "own_schemes:Mine(bits=3)"
    assert mine == parse_scheme("scheme(weights=absmax(bits=3, per='tensor'))")
    assert mine.definition == "scheme(weights=absmax(bits=3, per='tensor'))"
    given = parse_scheme("own_schemes:Mine(fives=True, bits=4)")
    assert given.definition == "scheme(weights=own_schemes:Fives(bits=4, per='tensor'))"
    assert parse_scheme(given.definition) == given
    _, w, b = tensors()
    assert quantize_layer(linear_of(w, b), given).operands.integers.abs().max() == 5
    with pytest.raises(WakefulError, match="pathlib:Path is not part of wakeful"):
        parse_scheme("pathlib:Path")
    with pytest.raises(WakefulError, match="Path must be a subclass of Scheme or Grid or Method"):
        parse_scheme("pathlib:Path", imports=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fien", r"unknown scheme 'fien' \(did you mean 'fine'\?\); there are fine, [^;]*kv4$"),
        (
            "scheme(inputs=absmax(bits=8, per='token'))",
            "a scheme has weights, or a cache and nothing else",
        ),
        ("scheme(weights=absmax(bits=8, per='token'))", "per channel or tensor, not per token"),
        ("scheme(weights=absmax(bits=9, per='channel'))", "2 to 8 bits, got 9"),
        (
            "scheme(weights=absmax(bits=8, per='channel'), inputs=zeropoint(bits=8, per='token'))",
            "without a zero point, not zeropoint",
        ),
        (
            "scheme(weights=absmax(bits=8, per='channel'), weights=absmax(bits=8, per='tensor'))",
            "weights is given twice",
        ),
        ("scheme(weights=int8)", "unknown grid or method 'int8'; there are .*absmax, .*smooth$"),
        (
            "scheme(weights=absmax(bits=8, per='group'))",
            "per must be 'channel' or 'token' or 'head' or 'tensor', got 'group'",
        ),
        ("absmax(bits=8, per='tensor')", "a scheme says of which tensor"),
        ("scheme(weights=fine)", "scheme: weights must be .*Grid"),
        ("fine(scales='often')", "scales must be 'dynamic' or 'static', got 'often'"),
    ],
)
def test_what_is_no_scheme_is_refused(text: str, message: str) -> None:
    with pytest.raises(WakefulError, match=message):
        parse_scheme(text)


@pytest.mark.parametrize("name", ["fine", "w4"])
def test_nothing_to_calibrate_is_refused(name: str) -> None:
    with pytest.raises(WakefulError, match="nothing to calibrate"):
        parse_scheme(name, "static")


@pytest.mark.parametrize("name", ["fine", "moderate", "coarse", "w4"])
def test_a_constant_matrix_has_a_grid(name: str) -> None:
    layer = quantize_layer(linear_of(torch.full((4, 3), -2.5), None), SCHEMES[name])
    torch.testing.assert_close(layer.dequantize(), torch.full((4, 3), -2.5))


def test_a_dead_output_channel_is_exact() -> None:
    w = torch.randn(3, 8)
    w[1] = 0.0
    w[2] = -0.5
    x = torch.randn(4, 8)
    for name in ("fine", "w4"):
        layer = quantize_layer(linear_of(w, None), SCHEMES[name])
        torch.testing.assert_close(layer.dequantize()[1:], w[1:])
        assert (layer(x)[:, 1] == 0).all()
