"""OrthoAdam against what it must equal."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from optim.problems import (
    AXES,
    KERNELS,
    OPTIONS,
    ROTATIONS,
    SEEDED,
    WIDTH,
    SignedPermutation,
    assert_same,
    dense,
    loss_of,
    ortho,
    train,
    weights,
)
from wakeful.optim import Hadamard, OrthoAdam, Rotation, decay_groups
from wakeful.parts.orthoadam import transform_factors

pytestmark = pytest.mark.filterwarnings("ignore:OrthoAdam does not know")
"""The axes of these small weights are of no concern here."""

# Known answers


@pytest.mark.slow
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("rotation", ["identity", SignedPermutation()])
def test_identity_and_signed_permutation_are_adamw(
    rotation: str | Rotation, kernel: str, named: bool
) -> None:
    ours, theirs = weights(), weights()
    mine = ortho(ours, rotation, kernel=kernel, named=named)
    adamw = torch.optim.AdamW(theirs.values(), **OPTIONS)
    for step in range(40):
        train(ours, mine, 1, start=step)
        train(theirs, adamw, 1, start=step)
        assert_same(ours, theirs, 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("rotation", "named"), [*((name, True) for name in SEEDED), (SEEDED[0], False)]
)
def test_a_rotation_is_adamw_on_the_reparametrized_problem(
    rotation: str, kernel: str, named: bool
) -> None:
    """θ = Qᵀ φ: OrthoAdam on θ must be AdamW on φ."""
    ours, phi = weights(), weights()
    q = dense(rotation, "rows" if named else "parameter 0", 1, WIDTH)
    r = dense(rotation, "columns" if named else "parameter 1", 0, WIDTH)
    phi["rows"].data = phi["rows"].data @ q.mT
    phi["columns"].data = r @ phi["columns"].data

    def theta(w: dict[str, Any]) -> dict[str, Any]:
        return {**w, "rows": w["rows"] @ q, "columns": r.mT @ w["columns"]}

    mine = ortho(ours, rotation, kernel=kernel, named=named)
    adamw = torch.optim.AdamW(phi.values(), **OPTIONS)
    for step in range(40):
        train(ours, mine, 1, start=step)
        train(phi, adamw, 1, start=step, loss=lambda w, s: loss_of(theta(w), s))
        assert_same(ours, theta(phi), 1e-10)


@pytest.mark.parametrize("rotation", ["hadamard", "haar", "block_diagonal(size=3)"])
def test_a_rotation_changes_the_path(rotation: str) -> None:
    ours, theirs = weights(), weights()
    train(ours, ortho(ours, rotation), 5)
    train(theirs, ortho(theirs, "identity"), 5)
    assert (ours["rows"] - theirs["rows"]).abs().max() > 1e-3
    assert (ours["columns"] - theirs["columns"]).abs().max() > 1e-3
    assert_same({"free": ours["free"]}, theirs, 0)


def definition(weight: Tensor, grads: list[Tensor], q: Tensor, r: Tensor) -> Tensor:
    """Algorithm 1 on a matrix, rotated by r on the left and by q on the right, word for word."""
    (beta1, beta2), theta = OPTIONS["betas"], weight.clone()
    m = v = torch.zeros_like(weight)
    for t, g in enumerate(grads, start=1):
        turned = r @ g @ q.mT
        m = beta1 * m + (1 - beta1) * turned
        v = beta2 * v + (1 - beta2) * turned**2
        s = (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + OPTIONS["eps"])
        decayed = theta * (1 - OPTIONS["lr"] * OPTIONS["weight_decay"])
        theta = decayed - OPTIONS["lr"] * r.mT @ s @ q
    return theta


@pytest.mark.slow
@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 33),
    axis=st.sampled_from((0, 1)),
    both=st.booleans(),
    rotation=st.sampled_from(SEEDED),
    kernel=st.sampled_from(KERNELS),
    kind=st.sampled_from(("dense", "zero", "sparse rows", "one zero step")),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=80, deadline=None)
def test_any_shape(
    rows: int, columns: int, axis: int, both: bool, rotation: str, kernel: str, kind: str, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    grads = [torch.randn(rows, columns, generator=generator, dtype=torch.float64) for _ in "abc"]
    if kind == "zero":
        grads = [torch.zeros_like(g) for g in grads]
    if kind == "sparse rows":
        grads = [g * (torch.arange(rows) % 2)[:, None] for g in grads]
    if kind == "one zero step":
        grads[0] = torch.zeros_like(grads[0])
    weight = nn.Parameter(start.clone())
    optimizer = OrthoAdam(
        [("w", weight)],
        rotation=rotation,
        axes={"w": (axis, 1 - axis) if both else axis},
        seed=seed,
        kernel=kernel,  # pyright: ignore[reportArgumentType]
        **OPTIONS,
    )
    for grad in grads:
        weight.grad = grad.clone()
        optimizer.step()
        assert torch.equal(weight.grad, grad), "a step leaves the gradient alone"
    eye = [torch.eye(n, dtype=torch.float64) for n in (rows, columns)]
    turned = [
        dense(rotation, "w", side, start.shape[side], seed) if both or side == axis else eye[side]
        for side in (0, 1)
    ]
    wanted = definition(start, grads, turned[1], turned[0])
    torch.testing.assert_close(weight.data, wanted, rtol=0, atol=1e-8)


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = weights(), weights()
    train(a, ortho(a, "hadamard", kernel="chunked"), 4)
    monkeypatch.setattr("wakeful.optim.step.CHUNK", 13)
    train(b, ortho(b, "hadamard", kernel="chunked"), 4)
    assert_same(a, b, 1e-14)


def test_eigenbasis_lowers_a_loss() -> None:
    w = weights()
    before = loss_of(w, 0).item()
    train(w, ortho(w, "eigenbasis(every=3)", axes={"rows": (1, 0), "columns": (0, 1)}), 40)
    assert loss_of(w, 0).item() < before / 2


def test_eigenbasis_first_step_is_adam_in_the_eigenbasis() -> None:
    weight = nn.Parameter(torch.randn(9, 4, dtype=torch.float64))
    start, grad = weight.detach().clone(), torch.randn(9, 4, dtype=torch.float64)
    optimizer = OrthoAdam([("w", weight)], rotation="eigenbasis", **OPTIONS)
    weight.grad = grad.clone()
    optimizer.step()
    q = torch.linalg.eigh(grad.mT @ grad).eigenvectors.mT
    eye = torch.eye(9, dtype=torch.float64)
    torch.testing.assert_close(weight.data, definition(start, [grad], q, eye), rtol=0, atol=1e-10)


def in_eigenbases(
    weight: Tensor,
    grads: list[Tensor],
    sides: tuple[int, ...],
    *,
    beta: float,
    every: int,
    eps: float,
) -> Tensor:
    """SOAP's steps by eigenbasis' docstring; the first moment stays in the weight's own basis.

    There, to be carried to a new basis exactly is to stay as it is.
    """
    (beta1, beta2), theta = OPTIONS["betas"], weight.clone()
    eye = [torch.eye(n, dtype=torch.float64) for n in weight.shape]
    q, c = list(eye), [torch.zeros_like(each) for each in eye]
    m = v = torch.zeros_like(weight)
    for t, g in enumerate(grads, start=1):
        for side in sides:
            new = g @ g.T if side == 0 else g.T @ g
            c[side] = new if t == 1 else beta * c[side] + (1 - beta) * new
            if t == 1:
                q[side] = torch.linalg.eigh(c[side]).eigenvectors.flip(1).T
            elif t % every == 0:
                vectors, r = torch.linalg.qr(c[side] @ q[side].T)
                q[side] = (vectors @ torch.diag(r.diagonal().sign())).T
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * (q[0] @ g @ q[1].T) ** 2
        turned = q[0] @ m @ q[1].T / (1 - beta1**t)
        s = turned / ((v / (1 - beta2**t)).sqrt() + eps)
        decayed = theta * (1 - OPTIONS["lr"] * OPTIONS["weight_decay"])
        theta = decayed - OPTIONS["lr"] * q[0].T @ s @ q[1]
    return theta


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("axes", "shape"), [((1,), (9, 5)), ((0,), (5, 9)), ((1, 0), (7, 7)), ((0, 1), (7, 7))]
)
def test_eigenbasis_is_its_definition(
    axes: tuple[int, ...], shape: tuple[int, int], kernel: str
) -> None:
    # Covariances have full rank, for no basis of a null space is better than another; and both
    # eigenbases make the first gradient diagonal, whose rounded zeros an eps of 1e-7 would show.
    start, *grads = torch.randn(8, *shape, dtype=torch.float64)
    weight = nn.Parameter(start.clone())
    optimizer = OrthoAdam(
        [("w", weight)],
        rotation="eigenbasis(beta=0.8, every=2)",
        axes={"w": axes},
        kernel=kernel,  # pyright: ignore[reportArgumentType]
        **{**OPTIONS, "eps": 1e-4},
    )
    for taken, grad in enumerate(grads, start=1):
        weight.grad = grad.clone()
        optimizer.step()
        expected = in_eigenbases(start, grads[:taken], axes, beta=0.8, every=2, eps=1e-4)
        torch.testing.assert_close(weight.data, expected, rtol=0, atol=1e-10)


# Dtypes and loops


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_moments_are_float32(dtype: torch.dtype, kernel: str) -> None:
    w = weights(dtype)
    optimizer = ortho(w, "hadamard", kernel=kernel)
    train(w, optimizer, 2)
    for name, p in w.items():
        assert p.dtype == dtype
        assert optimizer.state[p]["exp_avg"].dtype == torch.float32
        assert optimizer.state[p]["exp_avg_sq"].shape == p.shape, name
        assert p.isfinite().all()


def test_bfloat16_is_rounded_once_a_step() -> None:
    narrow = {"rows": nn.Parameter(torch.randn(6, WIDTH).bfloat16())}
    wide = {"rows": nn.Parameter(narrow["rows"].detach().float())}
    grad = torch.randn(6, WIDTH).bfloat16()
    for w in (narrow, wide):
        w["rows"].grad = grad.to(w["rows"].dtype)
        ortho(w, "hadamard").step()
    assert torch.equal(narrow["rows"].data, wide["rows"].data.bfloat16())


def test_scheduler_groups_and_closure() -> None:
    w = weights()
    groups = decay_groups(w.items(), weight_decay=0.5)
    assert [g["weight_decay"] for g in groups] == [0.5, 0.0]
    optimizer = OrthoAdam(groups, lr=1e-2, rotation=Hadamard(), axes=AXES)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(w, 0)
        loss.backward()
        return loss

    first = optimizer.step(closure)
    for _ in range(10):
        scheduler.step()
        last = optimizer.step(closure)
    assert last.item() < first.item()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 / 11)


def test_no_decay_without_weight_decay() -> None:
    w = weights()
    optimizer = OrthoAdam(decay_groups(w.items(), weight_decay=0.5), lr=1e-2, axes=AXES)
    before = {name: p.detach().clone() for name, p in w.items()}
    for p in w.values():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in w.items():
        factor = 1 - 1e-2 * 0.5 if p.dim() >= 2 else 1.0
        torch.testing.assert_close(p.data, before[name] * factor)


def test_parameters_without_a_gradient_stay() -> None:
    w = weights()
    optimizer = ortho(w, "haar")
    before = w["rows"].detach().clone()
    w["columns"].grad = torch.ones_like(w["columns"])
    optimizer.step()
    assert torch.equal(before, w["rows"])
    assert w["rows"] not in optimizer.state


def test_rotations_are_counted_in_bytes() -> None:
    w = weights()
    held = {}
    for name in ("identity", "hadamard", "haar", "eigenbasis"):
        optimizer = ortho(w, name)
        train(w, optimizer, 1)
        held[name] = optimizer.rotation_bytes()
        widths = [line.shape[axis] for line in optimizer.plan() for axis in line.axes]
        if name == "haar":
            assert held[name] == sum(8 * n * n for n in widths)  # float64
    assert held["identity"] == held["eigenbasis"] == 0  # a learned basis is in the state
    assert 0 < held["hadamard"] < held["haar"]


def test_a_deep_copy_goes_on_alike() -> None:
    w = weights()
    optimizer = ortho(w, "hadamard")
    train(w, optimizer, 3)
    w2, optimizer2 = copy.deepcopy((w, optimizer))
    train(w, optimizer, 3, start=3)
    train(w2, optimizer2, 3, start=3)
    assert_same(w, w2, 0)


@pytest.mark.parametrize("rotation", ROTATIONS)
def test_autocast_does_not_reach_the_rotations(rotation: str) -> None:
    a, b = weights(torch.float32), weights(torch.float32)
    one, two = ortho(a, rotation), ortho(b, rotation)
    for w in (a, b):
        loss_of(w, 0).backward()
    one.step()
    with torch.autocast("cpu", torch.bfloat16):
        two.step()
    assert_same(a, b, 0)


@pytest.mark.parametrize("rotation", ROTATIONS)
def test_a_default_device_changes_nothing(rotation: str) -> None:
    """Users set it to their accelerator, whose generator draws other numbers."""
    transform_factors.cache_clear()
    a, b = weights(), weights()
    one, two = ortho(a, rotation), ortho(b, rotation)
    for w in (a, b):
        loss_of(w, 0).backward()
    with torch.device("meta"):
        two.step()
    one.step()
    assert_same(a, b, 0)


@pytest.mark.parametrize("rotation", ["hadamard", "identity"])
def test_it_holds_little_more_than_adam(rotation: str) -> None:
    w = {f"rows.{i}": nn.Parameter(torch.ones(300, 256)) for i in range(4)}
    optimizer = OrthoAdam(w.items(), rotation=rotation)
    for p in w.values():
        p.grad = torch.ones_like(p)
    optimizer.step()
    moments = sum(2 * 4 * p.numel() for p in w.values())
    tensors = [t for s in optimizer.state.values() for t in s.values()]
    for made in optimizer.rotations():
        tensors += [t for v in vars(made).values() for t in (v if isinstance(v, tuple) else (v,))]
    stores = {t.data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    assert sum(stores.values()) <= 1.05 * moments
