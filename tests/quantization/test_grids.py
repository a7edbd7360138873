"""Grids against numbers worked out by hand, and their properties."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from wakeful.errors import WakefulError
from wakeful.quantization.arithmetic import pack_int4, unpack_int4
from wakeful.quantization.schemes import Absmax, Grid, Zeropoint


def absmax(bits: int) -> Absmax:
    return Absmax(bits=bits, per="channel")


def zeropoint(bits: int) -> Zeropoint:
    return Zeropoint(bits=bits, per="channel")


GRIDS = [absmax(8), absmax(4), absmax(2), zeropoint(4), zeropoint(8), zeropoint(3)]


def fitted(grid: Grid, x: Tensor):
    return grid.compute_scales(x)


def test_absmax_by_hand() -> None:
    x = torch.tensor([[2.54, -1.0, 0.5, 0.0101, 0.0]])
    scales = fitted(absmax(8), x)
    assert scales.zero is None
    assert float(scales.scale) == pytest.approx(0.02)  # 2.54 / 127
    assert absmax(8).quantize(x, scales).tolist() == [[127, -50, 25, 1, 0]]
    back = absmax(8).dequantize(absmax(8).quantize(x, scales), scales)
    torch.testing.assert_close(back, torch.tensor([[2.54, -1.0, 0.5, 0.02, 0.0]]))
    negative = torch.tensor([[-12.7, 1.0]])  # the larger side is the negative one
    assert absmax(8).quantize(negative, fitted(absmax(8), negative)).tolist() == [[-127, 10]]
    assert (absmax(4).low, absmax(4).high) == (-7, 7)


def test_a_clip_gives_the_largest_up_for_a_finer_step() -> None:
    x = torch.tensor([[2.0, -1.0, 0.25, 0.0]])
    grid = Absmax(bits=4, per="token", clip=0.7)
    scales = fitted(grid, x)
    assert float(scales.scale) == pytest.approx(0.2)  # 0.7 · 2 / 7
    assert grid.quantize(x, scales).tolist() == [[7, -5, 1, 0]]
    assert str(grid) == "absmax(bits=4, per='token', clip=0.7)"
    for clip in (0, 1.1):
        with pytest.raises(WakefulError, match="a share of max"):
            Absmax(bits=4, per="token", clip=clip)


def test_a_clip_rounds_gaussian_numbers_better_in_four_bits() -> None:
    x = torch.randn(64, 576)
    plain, clipped = Absmax(bits=4, per="token"), Absmax(bits=4, per="token", clip=0.85)
    errors = [(g.fake_quantize(x, fitted(g, x)) - x).square().mean() for g in (plain, clipped)]
    assert errors[1] < 0.9 * errors[0]


def test_zeropoint_by_hand() -> None:
    x = torch.tensor([[-1.0, 0.0, 0.3, 1.0, 2.0]])
    grid = zeropoint(4)
    scales = fitted(grid, x)
    assert float(scales.scale) == pytest.approx(0.2)  # (2 − −1) / 15
    assert scales.zero is not None
    assert scales.zero.tolist() == [[-3]]  # −8 − round(−5)
    # round(x / s) = −5, 0, 2 (1.5 to even), 5, 10
    assert grid.quantize(x, scales).tolist() == [[-8, -3, -1, 2, 7]]
    torch.testing.assert_close(
        grid.dequantize(grid.quantize(x, scales), scales),
        torch.tensor([[-1.0, 0.0, 0.4, 1.0, 2.0]]),
    )
    assert (zeropoint(8).low, zeropoint(8).high) == (-128, 127)


def test_a_zero_point_far_from_a_narrow_range_is_no_overflow() -> None:
    for near in (1.0, -1.0, 1e7):
        x = torch.tensor([[near, near]])
        x[0, 1] = torch.nextafter(x[0, 0], torch.tensor(0.0))
        found = zeropoint(8).fake_quantize(x, fitted(zeropoint(8), x))
        torch.testing.assert_close(found, x, rtol=2e-7, atol=0)


def test_what_is_outside_a_static_range_is_clipped() -> None:
    scales = absmax(8).fit_scales(torch.tensor(-1.27), torch.tensor(1.0))
    q = absmax(8).quantize(torch.tensor([3.0, -5.0, 0.5]), scales)
    assert q.tolist() == [127, -127, 50]


ROWS = hnp.arrays(
    "float32",
    st.tuples(st.integers(1, 4), st.integers(1, 9)),
    elements=st.floats(-1e4, 1e4, width=32),
)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@settings(max_examples=60, deadline=None)
@given(array=ROWS)
def test_the_round_trip_is_within_half_a_step(grid: Grid, array) -> None:
    x = torch.from_numpy(array)
    scales = fitted(grid, x)
    q = grid.quantize(x, scales)
    assert q.min() >= grid.low
    assert q.max() <= grid.high
    back = grid.dequantize(q, scales)
    # A narrow range far from zero is limited by float32 itself: x / s and s are rounded too.
    rounding = 8 * torch.finfo(torch.float32).eps * x.abs().amax(1, keepdim=True)
    # Zero points are rounded too, so that the ends of the range may clip by half a step more.
    steps = 0.5 if scales.zero is None else 1.0
    assert ((back - x).abs() <= steps * scales.scale * 1.0001 + rounding).all()
    torch.testing.assert_close(grid.fake_quantize(x, scales), back, rtol=0, atol=0)
    again = grid.fake_quantize(back, scales)
    assert ((again - back).abs() <= rounding).all()  # idempotent


@settings(max_examples=60, deadline=None)
@given(array=ROWS)
def test_zeropoint_is_within_half_a_step_where_it_does_not_clip(array) -> None:
    grid = zeropoint(4)
    x = torch.from_numpy(array)
    scales = fitted(grid, x)
    assert scales.zero is not None
    inside = (torch.round(x / scales.scale) + scales.zero).clamp(grid.low, grid.high)
    kept = inside == torch.round(x / scales.scale) + scales.zero
    error = (grid.fake_quantize(x, scales) - x).abs()
    rounding = 8 * torch.finfo(torch.float32).eps * x.abs().amax(1, keepdim=True)
    assert (error <= 0.5001 * scales.scale + rounding)[kept].all()


@settings(max_examples=60, deadline=None)
@given(array=ROWS)
def test_zero_maps_to_zero_within_one_step(array) -> None:
    x = torch.from_numpy(array)
    x = torch.cat([x, torch.zeros(len(x), 1)], 1)  # the range then holds zero
    for grid in GRIDS:
        scales = fitted(grid, x)
        found = grid.fake_quantize(torch.zeros(len(x), 1), scales)
        if scales.zero is None:
            assert (found == 0).all()
        else:
            assert (found.abs() <= scales.scale * 1.0001).all()


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("value", [0.0, 5.0, -0.25, 1e-44])
def test_a_constant_row_is_exact_or_vanishes(grid: Grid, value: float) -> None:
    x = torch.full((1, 6), value)
    back = grid.fake_quantize(x, fitted(grid, x))
    torch.testing.assert_close(back, x, rtol=1e-6, atol=1e-40)


def test_a_nan_stays_visible() -> None:
    x = torch.tensor([[1.0, float("nan"), 2.0]])
    assert absmax(8).fake_quantize(x, absmax(8).fit_scales(x[:, :1], x[:, 2:])).isnan().any()


@settings(max_examples=40, deadline=None)
@given(array=hnp.arrays("int8", st.tuples(st.integers(1, 5), st.integers(1, 9)),
                        elements=st.integers(-8, 7)))  # fmt: skip
def test_packing_is_undone(array) -> None:
    q = torch.from_numpy(array)
    packed = pack_int4(q)
    assert packed.dtype == torch.uint8
    assert packed.shape == (q.shape[0], (q.shape[1] + 1) // 2)
    assert torch.equal(unpack_int4(packed, q.shape[1]), q)


def test_packing_by_hand() -> None:
    assert pack_int4(torch.tensor([[1, -8, 7]], dtype=torch.int8)).tolist() == [[0x81, 0x07]]


@pytest.mark.parametrize("bits", [0, 1, 9])
def test_bits_are_two_to_eight(bits: int) -> None:
    for kind in (absmax, zeropoint):
        with pytest.raises(WakefulError, match=f"2 to 8 bits, got {bits}"):
            kind(bits)
