"""Groups and floating point formats against hand-computed numbers, tables and torch's casts."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor, nn

from wakeful.errors import WakefulError
from wakeful.quantization import NAMED, parse_scheme
from wakeful.quantization.arithmetic import Operands, pack_int4
from wakeful.quantization.linear import quantize_layer
from wakeful.quantization.schemes.grids import E4M3, Absmax, Grid, MxE2M1, NvE2M1, Zeropoint

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
ROWS = hnp.arrays(
    "float32",
    st.tuples(st.integers(1, 3), st.integers(1, 70)),
    elements=st.floats(-1e4, 1e4, width=32),
)
GRIDS: list[Grid] = [
    E4M3(per="channel"), E4M3(per="tensor"), E4M3(per="channel", group=8), MxE2M1(per="channel"),
    NvE2M1(per="tensor"), NvE2M1(per="channel"),
    Absmax(bits=4, per="channel", group=32), Zeropoint(bits=4, per="channel", group=3),
]  # fmt: skip


def e4m3_numbers() -> Tensor:
    """All finite numbers from zero up, from sign, exponent and mantissa; code by code."""
    subnormal = [mantissa / 8 * 2.0**-6 for mantissa in range(8)]
    normal = [
        (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        for exponent, mantissa in itertools.product(range(1, 16), range(8))
    ]
    return torch.tensor([*subnormal, *normal][:-1], dtype=torch.float64)  # the last is NaN


def nearest(x: Tensor, numbers: Tensor) -> Tensor:
    """The nearest of a format's numbers; of two equally near, that with the even code."""
    far = (x.abs().double()[..., None] - numbers).abs()
    even = torch.arange(len(numbers)) % 2
    at_best = far == far.min(-1, keepdim=True).values
    code = (at_best.double() - 0.1 * even).argmax(-1)
    return torch.where(x < 0, -numbers[code], numbers[code])


def test_e2m1_by_hand() -> None:
    grid = MxE2M1(per="channel")
    x = torch.tensor([0.25, 0.26, 0.75, 1.25, 1.75, 2.5, 2.51, 3.5, 5.0, 5.01, 6.0, -0.75, -5.0])
    found = [0.0, 0.5, 1.0, 1.0, 2.0, 2.0, 3.0, 4.0, 4.0, 6.0, 6.0, -1.0, -4.0]
    assert grid.round_to_format(x).tolist() == found
    codes = grid.encode(torch.tensor([*E2M1, *(-v for v in E2M1)]))
    assert codes.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 0, -7, -6, -5, -4, -3, -2, -1]
    assert grid.decode(codes, torch.float32).abs().tolist() == E2M1 * 2


def test_mxfp4_by_hand() -> None:
    grid = MxE2M1(per="channel")
    x = torch.zeros(1, 70)  # groups of 32, 32 and 6
    x[0, :4] = torch.tensor([6.5, -5.0, 0.3, 2.6])  # ⌊log₂ 6.5⌋ = 2: s = 1, and 6.5 is clipped
    x[0, 32:34] = torch.tensor([0.2, 0.1])  # ⌊log₂ 0.2⌋ = −3: s = 2⁻⁵
    x[0, 64:66] = torch.tensor([8.0, -3.1])  # s = 2
    scales = grid.compute_scales(x)
    assert scales.scale.tolist() == [[1.0, 2.0**-5, 2.0]]
    back = grid.fake_quantize(x, scales)
    assert back[0, :4].tolist() == [6.0, -4.0, 0.5, 3.0]
    assert back[0, 32:34].tolist() == [6 / 32, 3 / 32]  # 6.4 and 3.2 steps
    assert back[0, 64:66].tolist() == [8.0, -3.0]  # 1.55 steps of 2
    assert grid.encode_scale(scales.scale).tolist() == [[127, 122, 128]]
    assert torch.equal(grid.decode_scale(grid.encode_scale(scales.scale)), scales.scale)


def test_mxfp4s_exponents_follow_the_largest_number() -> None:
    largest = torch.tensor([4.0, 6.0, torch.tensor(6.0).nextafter(torch.tensor(7.0)), 7.0, 8.0])
    for power in (-40, 0, 90):
        x = torch.zeros(5, 32)
        x[:, 5] = -torch.ldexp(largest, torch.tensor(power))
        scale = MxE2M1(per="channel").compute_scales(x).scale[:, 0]
        assert (scale * 4 * 2.0**-power).tolist() == [4, 4, 4, 8, 8]


def test_the_default_exponents_are_those_of_compressed_tensors() -> None:
    theirs = pytest.importorskip("compressed_tensors.quantization.utils.mxfp_utils")
    sizes = torch.cat([torch.rand(10_000) * 2.0**power for power in (-20, 0, 9)]).clamp_(1e-12)
    codes = theirs.generate_mx_scales(sizes)
    grid = MxE2M1(per="token")
    assert torch.equal(grid.encode_scale(grid.fit_scales(-sizes, sizes).scale).int(), codes.int())


def test_nvfp4_by_hand() -> None:
    grid = NvE2M1(per="tensor")
    x = torch.zeros(2, 20)
    x[0, :3] = torch.tensor([2688.0, -1000.0, 400.0])  # t = 2688 / (6 · 448) = 1, s = 448
    x[0, 16] = 6.1 * 6  # s = e4m3(6.1) = 6
    x[1, 0] = 3e-4  # far below the least scale 2⁻⁹
    scales = grid.compute_scales(x)
    assert scales.outer is not None
    assert scales.outer.tolist() == [[1.0]]
    assert scales.scale.tolist() == [[448.0, 6.0], [2.0**-9, 2.0**-9]]
    back = grid.fake_quantize(x, scales)
    assert back[0, :3].tolist() == [2688.0, -896.0, 448.0]  # −2.23 and 0.89 steps
    assert back[0, 16] == 36.0
    assert back[1, 0] == 0.0
    assert torch.equal(grid.decode_scale(grid.encode_scale(scales.scale)), scales.scale)
    rows = NvE2M1(per="channel").compute_scales(x)
    assert rows.outer is not None
    torch.testing.assert_close(rows.outer, torch.tensor([[1.0], [3e-4 / 2688]]))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(array=ROWS)
def test_every_number_is_the_nearest_of_its_format(array) -> None:
    x = torch.from_numpy(array)
    for grid, numbers in (
        (E4M3(per="channel"), e4m3_numbers()),
        (E4M3(per="tensor"), e4m3_numbers()),
        (MxE2M1(per="channel"), torch.tensor(E2M1).double()),
        (NvE2M1(per="tensor"), torch.tensor(E2M1).double()),
    ):
        scales = grid.compute_scales(x)
        step, _ = scales.expand(x.shape[1])
        q = (x / step).clamp(grid.low, grid.high)
        assert torch.equal(grid.round_to_levels(x, scales).double(), nearest(q, numbers))
        if isinstance(grid, E4M3):
            torch.testing.assert_close(
                grid.fake_quantize(x, scales), q.to(torch.float8_e4m3fn).float() * step,
                rtol=0, atol=0,
            )  # fmt: skip


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@settings(max_examples=40, deadline=None)
@given(array=ROWS)
def test_codes_and_scales_say_it_all(grid: Grid, array) -> None:
    x = torch.from_numpy(array)
    scales = grid.compute_scales(x)
    assert (scales.scale > 0).all()
    codes = grid.quantize(x, scales)
    assert codes.dtype == torch.int8
    if grid.bits <= 4:
        assert codes.min() >= -8
        assert codes.max() <= 7
        packed = Operands(grid, pack_int4(codes), scales, x.shape[1])
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            assert torch.equal(packed.dequantize(dtype), grid.dequantize(codes, scales, dtype))
    back = grid.dequantize(codes, scales)
    assert torch.isfinite(back).all()
    torch.testing.assert_close(back, grid.fake_quantize(x, scales), rtol=0, atol=0)
    stored = grid.encode_scale(scales.scale)
    assert stored.dtype == (torch.uint8 if grid.scale_type.itemsize == 1 else grid.scale_type)
    assert torch.equal(grid.decode_scale(stored), scales.scale)


@pytest.mark.parametrize("width", [1, 31, 32, 33, 64, 70])
@pytest.mark.parametrize("kind", ["absmax", "zeropoint", "e4m3"])
def test_a_group_is_a_matrix_of_its_own(kind: str, width: int) -> None:
    more = {"group": 32} if kind == "e4m3" else {"bits": 4, "group": 32}
    make = {"absmax": Absmax, "zeropoint": Zeropoint, "e4m3": E4M3}[kind]
    grouped = make(per="channel", **more)
    alone = make(per="channel", **(more | {"group": 0}))
    x = torch.randn(5, width) * torch.logspace(-2, 2, width)
    found = grouped.fake_quantize(x, grouped.compute_scales(x))
    parts = [alone.fake_quantize(part, alone.compute_scales(part)) for part in x.split(32, 1)]
    assert torch.equal(found, torch.cat(parts, 1))
    whole = alone.fake_quantize(x, alone.compute_scales(x))
    if width >= 64:
        assert (found - x).norm() < (whole - x).norm()


def test_a_sequence_has_its_own_outer_scale() -> None:
    grid = NvE2M1(per="tensor")
    x = torch.randn(3, 4, 40) * torch.tensor([1.0, 50.0, 0.01])[:, None, None]
    together = grid.fake_quantize(x.view(12, 40), grid.compute_scales(x.view(12, 40), 3)).view_as(x)
    for alone, found in zip(x, together, strict=True):
        assert torch.equal(grid.fake_quantize(alone, grid.compute_scales(alone)), found)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_nothing_stays_nothing_and_a_nan_stays_visible(grid: Grid) -> None:
    zeros = torch.zeros(2, 40)
    assert (grid.fake_quantize(zeros, grid.compute_scales(zeros)) == 0).all()
    x = torch.randn(2, 40)
    scales = grid.compute_scales(x)
    x[0, 7] = float("nan")
    assert grid.fake_quantize(x, scales).isnan().sum() == 1


@pytest.mark.parametrize("name", ["w4g128", "fp8", "mxfp4", "nvfp4"])
def test_a_layer_multiplies_what_its_grids_give(name: str) -> None:
    layer = nn.Linear(150, 11)
    scheme = NAMED[name]
    small = quantize_layer(layer, scheme)
    x = torch.randn(2, 5, 150)
    w = layer.weight.detach()
    w_hat = scheme.weights.fake_quantize(w, scheme.weights.compute_scales(w))
    assert torch.equal(small.dequantize(), w_hat)
    rows = x.reshape(-1, 150)
    if scheme.inputs is not None:
        rows = scheme.inputs.fake_quantize(rows, scheme.inputs.compute_scales(rows, 2))
    expected = F.linear(rows, w_hat, layer.bias).view(2, 5, 11)
    torch.testing.assert_close(small(x), expected, rtol=1e-5, atol=1e-5)
    assert (small(x) - layer(x)).norm() < 0.25 * layer(x).norm()
    before = small.to(torch.bfloat16).dequantize()  # scales and codes stay as they are
    assert torch.equal(before, w_hat)


def test_names_say_what_they_are() -> None:
    for name, scheme in NAMED.items():
        assert str(scheme) == name
        assert str(parse_scheme(name)) == name
        assert parse_scheme(scheme.definition) == scheme
    assert NAMED["w8a8"] == NAMED["fine"]
    emulated = [name for name, scheme in NAMED.items() if scheme.emulated]
    assert emulated == ["w4a8", "w4a4", "fp8", "mxfp4", "nvfp4"]
    grouped = "scheme(weights=absmax(bits=4, per='channel', group=64), "
    assert parse_scheme(grouped + "inputs=absmax(bits=8, per='token'))").emulated


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("scheme(weights=absmax(bits=4, per='tensor', group=32))", "not 32 per tensor"),
        ("scheme(weights=absmax(bits=4, per='channel', group=1))", "2 or more input channels"),
        ("scheme(weights=absmax(bits=4, per='channel', group=-4))", "2 or more input channels"),
        ("scheme(weights=mx_e2m1(per='tensor'))", "not 32 per tensor"),
        ("scheme(weights=mx_e2m1(per='token'))", "per channel or tensor, not per token"),
        ("scheme(weights=mx_e2m1(per='channel', group=16))", "no option 'group'"),
        ("nvfp4(inputs=nv_e2m1(per='token'), scales='static')", "nothing to calibrate"),
    ],
)
def test_what_is_no_grid_is_refused(text: str, message: str) -> None:
    with pytest.raises(WakefulError, match=message):
        parse_scheme(text)
