"""Every rotation of the folder: orthogonal, its own inverse's inverse, made again from its seed."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optim.problems import ROTATIONS, SEEDED
from wakeful.errors import WakefulError
from wakeful.optim import Haar, LearnedRotation, Rotation, rotation_of
from wakeful.parts import orthoadam as hadamard
from wakeful.parts.orthoadam import generator_for, haar_matrix
from wakeful.variants import variants_by_name

WIDTHS = (1, 2, 3, 5, 12, 96, 100, 127, 512, 768)
MIXING = ("hadamard", "haar")


def make(kind: str, width: int, name: str = "a", seed: int = 0) -> Rotation:
    generator = generator_for(seed, name, 1)
    return rotation_of(kind).for_width(width, generator=generator, dtype=torch.float64)


def matrix(rotation: Rotation, width: int) -> torch.Tensor:
    return rotation.into(torch.eye(width, dtype=torch.float64)).mT


def test_the_folder_holds_the_rotations_of_the_method() -> None:
    assert set(ROTATIONS) == {
        "block_diagonal",
        "eigenbasis",
        "haar",
        "hadamard",
        "identity",
    }


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", ROTATIONS)
def test_orthogonal_and_inverse(kind: str, width: int) -> None:
    rotation = make(kind, width)
    if isinstance(rotation, LearnedRotation):
        rotation.learn(torch.randn(2 * width, width, dtype=torch.float64))
    eye = torch.eye(width, dtype=torch.float64)
    q = matrix(rotation, width)
    torch.testing.assert_close(q @ q.mT, eye, rtol=0, atol=1e-12)
    torch.testing.assert_close(rotation.back(eye), q, rtol=0, atol=1e-12)
    rows = torch.randn(7, width, dtype=torch.float64)
    kept = rows.clone()
    torch.testing.assert_close(rotation.back(rotation.into(rows)), rows, rtol=0, atol=1e-12)
    assert torch.equal(rows, kept), "into and back leave their argument as it was"


@given(width=st.integers(1, 200), kind=st.sampled_from(SEEDED), rows=st.integers(0, 4))
@settings(max_examples=60, deadline=None)
def test_any_width(width: int, kind: str, rows: int) -> None:
    rotation = make(kind, width)
    x = torch.randn(rows, width, dtype=torch.float64)
    turned = rotation.into(x)
    assert turned.shape == x.shape
    torch.testing.assert_close(turned.norm(dim=1), x.norm(dim=1), rtol=0, atol=1e-11)
    torch.testing.assert_close(rotation.back(turned), x, rtol=0, atol=1e-11)


@pytest.mark.parametrize("kind", [k for k in SEEDED if k != "identity"])
def test_seed_name_and_axis_decide(kind: str) -> None:
    q = matrix(make(kind, 48), 48)
    assert torch.equal(q, matrix(make(kind, 48), 48))
    assert not torch.equal(q, matrix(make(kind, 48, name="b"), 48))
    assert not torch.equal(q, matrix(make(kind, 48, seed=1), 48))
    assert generator_for(0, "a", 0).initial_seed() != generator_for(0, "a", 1).initial_seed()


@pytest.mark.parametrize("width", [w for w in WIDTHS if w > 1])
@pytest.mark.parametrize("kind", MIXING)
def test_mixing_rotations_are_not_signed_permutations(kind: str, width: int) -> None:
    """Adam is equivariant to signed permutations, so a rotation that is one would be none."""
    q = matrix(make(kind, width), width).abs()
    assert q.max() < 1 - 1e-6
    assert q.min() > 0, "every coordinate mixes with every other"
    if kind == "hadamard":
        assert q.max() <= math.sqrt(2 / width) + 1e-12


def test_the_hadamard_of_a_power_of_two_is_walsh_hadamard() -> None:
    signs = matrix(make("hadamard", 64), 64) * 8
    torch.testing.assert_close(signs.abs(), torch.ones_like(signs))
    pair = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    walsh = pair
    for _ in range(5):
        walsh = torch.kron(walsh, pair)
    torch.testing.assert_close(signs * signs[0], walsh)  # row 0 of H S is the random signs


@pytest.mark.parametrize("width", [1031, 2 * 519, 16 * 515, 4096, 1792])
def test_wide_hadamards_need_no_dense_matrix(width: int) -> None:
    """Odd factors past 512 go through the FFT; the transform stays exact and small."""
    rotation = make("hadamard", width)
    x = torch.randn(3, width, dtype=torch.float64)
    y = rotation.into(x)
    torch.testing.assert_close(y @ y.mT, x @ x.mT, rtol=1e-12, atol=1e-10)
    torch.testing.assert_close(rotation.back(y), x, rtol=0, atol=1e-11)
    factors = rotation.factors  # pyright: ignore[reportAttributeAccessIssue]
    assert sum(f.numel() for f in factors if isinstance(f, torch.Tensor)) < width * 64


def test_fft_and_dense_hartley_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 16 * 129, dtype=torch.float64)
    dense = make("hadamard", 16 * 129).into(x)
    monkeypatch.setattr(hadamard, "LARGEST_DENSE", 100)
    hadamard.transform_factors.cache_clear()
    fast = make("hadamard", 16 * 129)
    hadamard.transform_factors.cache_clear()
    assert any(isinstance(f, int) for f in fast.factors)  # pyright: ignore[reportAttributeAccessIssue]
    torch.testing.assert_close(fast.into(x), dense, rtol=0, atol=1e-12)


def test_a_transform_begun_in_inference_mode_can_be_trained_through() -> None:
    """As when a model whose hidden channels turn writes a text before it is trained on."""
    hadamard.transform_factors.cache_clear()
    rows = torch.randn(2, 24)
    for begun in (torch.inference_mode(), torch.enable_grad()):
        with begun:
            factors = hadamard.transform_factors(24, rows.device, rows.dtype)
            found = hadamard.transform(rows.requires_grad_(), factors)
    found.sum().backward()
    expected = hadamard.transform(torch.ones(2, 24), factors)
    torch.testing.assert_close(rows.grad, expected)


def test_haar_has_haars_moments() -> None:
    """E tr Q = 0 and E (tr Q)² = 1 on O(n); QR without the sign fix gives a trace far below 0."""
    generator = torch.Generator().manual_seed(3)
    traces = torch.stack([haar_matrix(4, generator).trace() for _ in range(3000)])
    assert abs(traces.mean()) < 0.08
    assert abs(traces.square().mean() - 1) < 0.15


@pytest.mark.parametrize(("width", "block"), [(10, 4), (7, 3), (64, 64), (65, 64), (5, 1), (6, 2)])
def test_block_diagonal_blocks(width: int, block: int) -> None:
    q = matrix(make(f"block_diagonal(size={block})", width), width)
    count = -(-width // block)
    assert ((q != 0).sum(1) <= block).all()
    assert ((q != 0).sum(1) >= width // count).all(), "block widths differ by at most one"


def test_eigenbasis_diagonalizes_and_keeps_the_moment() -> None:
    rotation = make("eigenbasis(every=2)", 6)
    assert isinstance(rotation, LearnedRotation)
    grad = torch.randn(20, 6, dtype=torch.float64) * torch.arange(1.0, 7.0, dtype=torch.float64)
    rotation.learn(grad)
    turned = rotation.into(grad)
    covariance = turned.mT @ turned
    off = covariance - covariance.diagonal().diag()
    assert off.abs().max() < 1e-9
    moment = torch.randn(5, 6, dtype=torch.float64)
    plain = rotation.back(moment)
    change = rotation.learn(torch.randn(20, 6, dtype=torch.float64))
    assert change is not None
    torch.testing.assert_close(rotation.back(moment @ change), plain, rtol=0, atol=1e-12)
    assert rotation.learn(grad) is None


def test_eigenbasis_of_one_covariance_stays_where_it_is() -> None:
    """Eigenvectors are their own orthogonal iteration; QR without the sign fix would turn them."""
    rotation = make("eigenbasis(every=1)", 7)
    assert isinstance(rotation, LearnedRotation)
    grad = torch.randn(15, 7, dtype=torch.float64)
    rotation.learn(grad)
    q = matrix(rotation, 7)
    for _ in range(3):
        change = rotation.learn(grad)
        torch.testing.assert_close(change, torch.eye(7, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(matrix(rotation, 7), q, rtol=0, atol=1e-12)


def test_eigenbasis_survives_zero_gradients() -> None:
    rotation = make("eigenbasis(every=1)", 3)
    assert isinstance(rotation, LearnedRotation)
    for _ in range(3):
        rotation.learn(torch.zeros(4, 3, dtype=torch.float64))
    q = matrix(rotation, 3)
    torch.testing.assert_close(q @ q.mT, torch.eye(3, dtype=torch.float64), rtol=0, atol=1e-12)


def test_refusals() -> None:
    with pytest.raises(WakefulError, match="base"):
        rotation_of("base")
    with pytest.raises(WakefulError, match=r"size of the block_diagonal rotation .* got 0"):
        rotation_of("block_diagonal(size=0)")
    with pytest.raises(WakefulError, match=r"beta of the eigenbasis rotation .* got 1\.0"):
        rotation_of("eigenbasis(beta=1.0)")
    with pytest.raises(WakefulError, match=r"every of the eigenbasis rotation .* got 0"):
        rotation_of("eigenbasis(every=0)")


@pytest.mark.parametrize(
    "example", [e for kind in variants_by_name("optim.rotations").values() for e in kind.examples]
)
def test_an_expression_and_an_object_are_the_same(example: str) -> None:
    assert str(rotation_of(example)) == example
    rotation = Haar()
    assert rotation_of(rotation) is rotation
