"""OrthoAdam against what it must equal, and what it must refuse."""

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from wakeful.errors import WakefulError
from wakeful.optim.groups import decay_groups
from wakeful.optim.orthoadam import OrthoAdam
from wakeful.optim.rotations import find_rotation, rotation_names
from wakeful.optim.rotations.base import generator_for
from wakeful.optim.sides import Rule

RULES = (Rule("rows", 1), Rule("columns", 0), Rule("free", None, optional=True))
SEEDED = [name for name in rotation_names() if not find_rotation(name).learns]
KERNELS = ("chunked", "foreach")
WIDTH = 12
OPTIONS: dict[str, Any] = {"lr": 3e-2, "betas": (0.8, 0.95), "eps": 1e-7, "weight_decay": 0.3}


def weights(dtype: torch.dtype = torch.float64, width: int = WIDTH) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"rows": (7, width), "columns": (width, 5), "free": (3, 4), "bias": (5,), "scale": ()}
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        for name, shape in shapes.items()
    }


def loss_of(w: dict[str, Any], step: int) -> Tensor:
    """A loss that is no sum over coordinates, another at every step."""
    width = w["rows"].shape[1]
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(6, width, generator=generator, dtype=torch.float64).to(w["rows"].dtype)
    hidden = torch.tanh(x @ w["rows"].mT)
    skip = x @ w["columns"] * w["scale"] + w["bias"]
    return (hidden.square().mean() + (skip - 1).square().mean() + w["free"].sin().sum() / 9) * 2


def train(
    w: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    steps: int,
    start: int = 0,
    loss: Callable[[dict[str, Any], int], Tensor] = loss_of,
) -> None:
    for step in range(start, start + steps):
        optimizer.zero_grad()
        loss(w, step).backward()
        optimizer.step()


def ortho(w: dict[str, nn.Parameter], rotation: str, **more: Any) -> OrthoAdam:
    rules = more.pop("rules", RULES)
    return OrthoAdam(w.items(), rotation=rotation, rules=rules, **{**OPTIONS, **more})


def assert_same(a: dict[str, nn.Parameter], b: dict[str, Any], tolerance: float) -> None:
    for name, value in a.items():
        torch.testing.assert_close(value.data, b[name].data, rtol=0, atol=tolerance)


def dense(rotation: str, name: str, axis: int, width: int, seed: int = 0) -> Tensor:
    made = find_rotation(rotation)(  # pyright: ignore[reportCallIssue]
        width, generator=generator_for(seed, name, axis), dtype=torch.float64
    )
    return made.into(torch.eye(width, dtype=torch.float64)).mT


# Known answers (METHODS section 3)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("rotation", ["identity", "signed_permutation"])
def test_identity_and_signed_permutation_are_adamw(rotation: str, kernel: str) -> None:
    ours, theirs = weights(), weights()
    mine = ortho(ours, rotation, kernel=kernel)
    adamw = torch.optim.AdamW(theirs.values(), **OPTIONS)
    for step in range(100):
        train(ours, mine, 1, start=step)
        train(theirs, adamw, 1, start=step)
        assert_same(ours, theirs, 1e-10)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("rotation", SEEDED)
def test_a_rotation_is_adamw_on_the_reparametrised_problem(rotation: str, kernel: str) -> None:
    """θ = Qᵀ φ: OrthoAdam on θ must be AdamW on φ."""
    ours, phi = weights(), weights()
    q = dense(rotation, "rows", 1, WIDTH)
    r = dense(rotation, "columns", 0, WIDTH)
    phi["rows"].data = phi["rows"].data @ q.mT
    phi["columns"].data = r @ phi["columns"].data

    def theta(w: dict[str, Any]) -> dict[str, Any]:
        return {**w, "rows": w["rows"] @ q, "columns": r.mT @ w["columns"]}

    mine = ortho(ours, rotation, kernel=kernel)
    adamw = torch.optim.AdamW(phi.values(), **OPTIONS)
    for step in range(100):
        train(ours, mine, 1, start=step)
        train(phi, adamw, 1, start=step, loss=lambda w, s: loss_of(theta(w), s))
        assert_same(ours, theta(phi), 1e-10)


@pytest.mark.parametrize("rotation", ["hadamard", "haar", "block_diagonal"])
def test_a_rotation_changes_the_path(rotation: str) -> None:
    ours, theirs = weights(), weights()
    options = {"block": 3} if rotation == "block_diagonal" else {}
    train(ours, ortho(ours, rotation, rotation_options=options), 5)
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
        rules=[Rule("w", axis)],
        sides="both" if both else "residual",
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
    monkeypatch.setattr("wakeful.optim.kernels.CHUNK", 13)
    train(b, ortho(b, "hadamard", kernel="chunked"), 4)
    assert_same(a, b, 1e-14)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_the_compiled_kernel_agrees() -> None:
    a, b = weights(), weights()
    train(a, ortho(a, "hadamard", kernel="chunked"), 20)
    train(b, ortho(b, "hadamard", kernel="compiled"), 20)
    assert_same(a, b, 1e-10)


def test_eigenbasis_lowers_a_loss() -> None:
    w = weights()
    before = loss_of(w, 0).item()
    train(w, ortho(w, "eigenbasis", rotation_options={"every": 3}, sides="both"), 40)
    assert loss_of(w, 0).item() < before / 2


def test_eigenbasis_first_step_is_adam_in_the_eigenbasis() -> None:
    weight = nn.Parameter(torch.randn(9, 4, dtype=torch.float64))
    start, grad = weight.detach().clone(), torch.randn(9, 4, dtype=torch.float64)
    optimizer = OrthoAdam([("w", weight)], rotation="eigenbasis", rules=[Rule("w", 1)], **OPTIONS)
    weight.grad = grad.clone()
    optimizer.step()
    q = torch.linalg.eigh(grad.mT @ grad).eigenvectors.mT
    eye = torch.eye(9, dtype=torch.float64)
    torch.testing.assert_close(weight.data, definition(start, [grad], q, eye), rtol=0, atol=1e-10)


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
    rules = [Rule("rows", 1)]
    grad = torch.randn(6, WIDTH).bfloat16()
    for w in (narrow, wide):
        w["rows"].grad = grad.to(w["rows"].dtype)
        ortho(w, "hadamard", rules=rules).step()
    assert torch.equal(narrow["rows"].data, wide["rows"].data.bfloat16())


def test_scheduler_groups_and_closure() -> None:
    w = weights()
    groups = decay_groups(w.items(), weight_decay=0.5)
    assert [g["weight_decay"] for g in groups] == [0.5, 0.0]
    optimizer = OrthoAdam(groups, lr=1e-2, rotation="hadamard", rules=RULES)
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
    optimizer = OrthoAdam(
        decay_groups(w.items(), weight_decay=0.5), lr=1e-2, rotation="hadamard", rules=RULES
    )
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


def test_share_takes_one_rotation_a_width() -> None:
    w = weights()
    optimizer = ortho(w, "haar", share=True)
    train(w, optimizer, 2)
    assert len(list(optimizer.rotations())) == 1
    written = [r for g in optimizer.param_groups for some in g["rotations"] for r in some]
    assert {r["name"] for r in written} == {"*"}
    other = weights()
    loose = ortho(other, "haar")
    train(other, loose, 2)
    assert len(list(loose.rotations())) == 2


def test_a_deep_copy_goes_on_alike() -> None:
    w = weights()
    optimizer = ortho(w, "hadamard")
    train(w, optimizer, 3)
    w2, optimizer2 = copy.deepcopy((w, optimizer))
    train(w, optimizer, 3, start=3)
    train(w2, optimizer2, 3, start=3)
    assert_same(w, w2, 0)


def test_autocast_does_not_reach_the_rotations() -> None:
    a, b = weights(torch.float32), weights(torch.float32)
    one, two = ortho(a, "haar"), ortho(b, "haar")
    for w in (a, b):
        loss_of(w, 0).backward()
    one.step()
    with torch.autocast("cpu", torch.bfloat16):
        two.step()
    assert_same(a, b, 0)


@pytest.mark.parametrize("rotation", ["hadamard", "identity"])
def test_it_holds_little_more_than_adam(rotation: str) -> None:
    w = {f"rows.{i}": nn.Parameter(torch.ones(300, 256)) for i in range(4)}
    optimizer = OrthoAdam(w.items(), rotation=rotation, rules=[Rule(r"rows\.\d", 1)])
    for p in w.values():
        p.grad = torch.ones_like(p)
    optimizer.step()
    moments = sum(2 * 4 * p.numel() for p in w.values())
    tensors = [t for s in optimizer.state.values() for t in s.values()]
    for made in optimizer.rotations():
        tensors += [t for v in vars(made).values() for t in (v if isinstance(v, tuple) else (v,))]
    stores = {t.data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    assert sum(stores.values()) <= 1.05 * moments


# state_dict


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rotation", rotation_names())
def test_a_checkpoint_goes_on_bit_for_bit(rotation: str, dtype: torch.dtype) -> None:
    w = weights(dtype)
    optimizer = ortho(w, rotation)
    train(w, optimizer, 13)
    saved = through_a_file(optimizer.state_dict())
    w2 = {name: nn.Parameter(p.detach().clone()) for name, p in w.items()}
    optimizer2 = ortho(w2, rotation)
    optimizer2.load_state_dict(saved)
    train(w, optimizer, 12, start=13)
    train(w2, optimizer2, 12, start=13)
    assert_same(w, w2, 0)
    optimizer2.load_state_dict(saved)  # into an optimiser that has a state already
    assert float(optimizer2.state[w2["rows"]]["step"]) == 13
    for a, b in zip(optimizer.param_groups, optimizer2.param_groups, strict=True):
        assert a["rotations"] == b["rotations"]


def test_a_checkpoint_of_no_step_starts_afresh() -> None:
    w = weights()
    fresh = ortho(w, "eigenbasis").state_dict()
    used, plain = ortho(w, "eigenbasis"), weights()
    train(w, used, 3)
    used.load_state_dict(fresh)
    with torch.no_grad():
        for name, p in w.items():
            p.copy_(plain[name])
    train(w, used, 3)
    train(plain, ortho(plain, "eigenbasis"), 3)
    assert_same(w, plain, 0)


def test_a_checkpoint_holds_the_seed_and_never_the_matrix() -> None:
    w = weights(width=64)
    optimizer = ortho(w, "haar", seed=7)
    train(w, optimizer, 1)
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["rotations"][0] == [
        {"kind": "haar", "seed": 7, "name": "rows", "axis": 1, "width": 64}
    ]
    for state in saved["state"].values():
        assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
    assert all(t.shape != (64, 64) for s in saved["state"].values() for t in s.values())


def wrong_states() -> dict[str, tuple[Callable[[], dict[str, Any]], str]]:
    def of(**more: Any) -> Callable[[], dict[str, Any]]:
        def make() -> dict[str, Any]:
            w = weights(width=more.pop("width", WIDTH))
            if more.pop("renamed", False):
                w["rows"], w["columns"] = w["columns"], w["rows"]
                more["rules"] = (Rule("rows", 0), Rule("columns", 1), Rule("free", None))
            optimizer = ortho(w, more.pop("rotation", "hadamard"), **more)
            for p in w.values():
                p.grad = torch.ones_like(p)
            optimizer.step()
            return optimizer.state_dict()

        return make

    def adamw() -> dict[str, Any]:
        w = weights()
        return torch.optim.AdamW(w.items()).state_dict()

    def two_groups() -> dict[str, Any]:
        groups = decay_groups(weights().items(), weight_decay=0.1)
        return OrthoAdam(groups, rules=RULES).state_dict()

    def other_shape() -> dict[str, Any]:
        saved = of()()
        saved["state"][3]["exp_avg"] = torch.zeros(6)
        return saved

    def no_moment() -> dict[str, Any]:
        saved = of()()
        del saved["state"][0]["exp_avg_sq"]
        return saved

    return {
        "seed": (of(seed=1), "rows is of another rotation: hadamard.*seed=1.*saved.*seed=0"),
        "rotation": (of(rotation="haar"), "rows is of another rotation: haar"),
        "identity": (of(rotation="identity"), "rows is of another rotation: identity saved"),
        "width": (of(width=24), "width=24"),
        "sides": (of(sides="both"), "another rotation"),
        "share": (of(share=True), "another rotation"),
        "order": (of(renamed=True), "another rotation"),
        "adamw": (adamw, "names no rotations"),
        "groups": (two_groups, "other parameter groups"),
        "shape": (other_shape, r"bias has shape \(6,\), the parameter \(5,\)"),
        "moment": (no_moment, "rows holds no exp_avg_sq"),
    }


@pytest.mark.parametrize("case", list(wrong_states()))
def test_a_state_of_another_is_refused_and_nothing_changes(case: str) -> None:
    make, message = wrong_states()[case]
    saved = make()
    w = weights()
    optimizer = ortho(w, "hadamard")
    train(w, optimizer, 3)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(WakefulError, match=message):
        optimizer.load_state_dict(saved)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for key, state in before["state"].items():
        assert all(torch.equal(value, after["state"][key][name]) for name, value in state.items())


# Bad input


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_bad_gradient_refuses_the_step(kernel: str, bad: float) -> None:
    w = weights(torch.float32)
    optimizer = ortho(w, "hadamard", kernel=kernel)
    train(w, optimizer, 2)
    before = {name: p.detach().clone() for name, p in w.items()}
    moments = copy.deepcopy(optimizer.state_dict()["state"])
    grad = w["columns"].grad
    assert grad is not None
    grad[2, 3] = bad
    with pytest.raises(WakefulError, match=r"gradient of columns holds .*nothing changed"):
        optimizer.step()
    assert_same(w, before, 0)
    for key, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, moments[key][name]) for name, value in state.items())
    grad[2, 3] = 0.0
    optimizer.step()
    assert not torch.equal(w["rows"], before["rows"])


def test_a_huge_finite_gradient_is_no_bad_gradient() -> None:
    w = {"rows": nn.Parameter(torch.randn(3, 4))}
    w["rows"].grad = torch.full((3, 4), 1e18)
    w["rows"].grad[0, 0] = 3e38  # its square overflows, and so does the norm
    ortho(w, "identity")._refuse_bad_gradients([w["rows"]])


def test_a_sparse_gradient_is_refused() -> None:
    embedding = nn.Embedding(5, 4, sparse=True)
    optimizer = OrthoAdam([("embed.weight", embedding.weight)], rules=[Rule(r"embed\.weight", 1)])
    embedding(torch.tensor([1, 2])).sum().backward()
    before = embedding.weight.detach().clone()
    with pytest.raises(WakefulError, match=r"embed.weight is sparse"):
        optimizer.step()
    assert torch.equal(before, embedding.weight)


def test_refusals_at_the_start() -> None:
    w = weights()
    with pytest.raises(WakefulError, match="needs parameter names"):
        OrthoAdam(w.values(), rules=RULES)
    OrthoAdam(w.values(), rotation="identity")
    with pytest.raises(WakefulError, match="no table of rotation rules"):
        OrthoAdam(w.items())
    with pytest.raises(WakefulError, match="match no parameter: 'none'"):
        OrthoAdam(w.items(), rules=[*RULES, Rule("none", 1)])
    with pytest.raises(WakefulError, match="w is complex"):
        OrthoAdam([("w", nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64)))], rules=RULES)
    with pytest.raises(WakefulError, match="rotation='spin' is not one of"):
        ortho(w, "spin")
    with pytest.raises(WakefulError, match="'size'; block_diagonal takes block"):
        ortho(w, "block_diagonal", rotation_options={"size": 3})
    with pytest.raises(WakefulError, match="share=True cannot go with eigenbasis"):
        ortho(w, "eigenbasis", share=True)
    with pytest.raises(WakefulError, match="kernel='fast'"):
        ortho(w, "haar", kernel="fast")
    with pytest.raises(WakefulError, match="rules='t5'"):
        ortho(w, "haar", rules="t5")
    with pytest.raises(WakefulError, match="sides='one'"):
        ortho(w, "haar", sides="one")
    with pytest.raises(WakefulError, match="two parameters have the same name"):
        OrthoAdam([("rows", w["rows"]), ("rows", w["columns"])], rules=[Rule("rows", 1)])


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("lr", -1.0),
        ("lr", math.nan),
        ("betas", (1.0, 0.9)),
        ("betas", (0.9, -0.1)),
        ("eps", 0.0),
        ("eps", math.inf),
        ("weight_decay", -0.1),
    ],
)
def test_values_out_of_range(option: str, value: Any) -> None:
    with pytest.raises(WakefulError, match="must be"):
        ortho(weights(), "hadamard", **{option: value})


def test_a_rotation_wider_than_memory_is_refused() -> None:
    wide = nn.Parameter(torch.zeros(1, 1).expand(1, 3_000_000))
    with pytest.raises(WakefulError, match=r"haar rotations, up to 3000000 wide, need .* GB"):
        OrthoAdam([("w", wide)], rotation="haar", rules=[Rule("w", 1)])
    OrthoAdam([("w", wide)], rotation="hadamard", rules=[Rule("w", 1)])


def test_a_group_that_does_not_fit_is_not_added() -> None:
    w = weights()
    optimizer = ortho(w, "hadamard")
    late = nn.Parameter(torch.zeros(3, 3))
    with pytest.raises(WakefulError, match="no rotation rule matches late"):
        optimizer.add_param_group({"params": [("late", late)]})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [("x.rows", nn.Parameter(torch.zeros(2, WIDTH)))]})
    assert len(optimizer.param_groups) == 2
    train(w, optimizer, 1)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_the_hugging_face_trainer_takes_it(tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            num_hidden_layers=1,
            hidden_size=8,
            intermediate_size=16,
            num_attention_heads=2,
            vocab_size=11,
        )
    )
    data = [{"input_ids": torch.arange(6) + i, "labels": torch.arange(6) + i} for i in range(5)]
    optimizer = OrthoAdam(model.named_parameters(), lr=1e-2, rotation="hadamard")
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=4, report_to=[], use_cpu=True, save_steps=2
    )
    trainer = transformers.Trainer(
        model=model, args=arguments, train_dataset=data, optimizers=(optimizer, None)
    )
    before = model.lm_head.weight.detach().clone()
    trainer.train()
    assert not torch.equal(before, model.lm_head.weight)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert float(optimizer.state[model.lm_head.weight]["step"]) == 4
