"""One expression for every optimizer, the groups that decay, and the learning rate over a run."""

import copy
import itertools
import math
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from wakeful.config.model import ModelConfig
from wakeful.errors import WakefulError
from wakeful.model.decoder import Decoder
from wakeful.optim import OrthoAdam, build_optimizer, decay_groups
from wakeful.optim.build import BUILDERS, optimizer_of, warmup_cosine
from wakeful.variants.families import role_outside_layers
from wakeful.variants.roles import HEAD, TABLE, Role

pytestmark = pytest.mark.filterwarnings("ignore:OrthoAdam does not know")
"""The axes of these small weights are of no concern here."""

OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 1e-2},
    "orthoadam": {"lr": 1e-2, "rotation": "haar"},
    "muon": {"lr": 1e-2},
}


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 4)
        self.hidden = nn.Linear(4, 4)
        self.norm = nn.RMSNorm(4)
        self.head = nn.Linear(4, 7, bias=False)

    def loss(self) -> torch.Tensor:
        tokens = torch.arange(7)
        x = self.embed(tokens)
        logits = self.head(self.norm(x + self.hidden(x)))
        return nn.functional.cross_entropy(logits, tokens.roll(1))


def step(model: Tiny, optimizer: torch.optim.Optimizer, number: int) -> float:
    loss = model.loss()
    for _ in range(number):
        optimizer.zero_grad()
        loss = model.loss()
        loss.backward()
        optimizer.step()
    return loss.item()


def test_the_options_cover_the_names() -> None:
    assert set(OPTIONS) == set(BUILDERS)


@pytest.mark.parametrize("name", list(BUILDERS))
def test_each_learns_under_a_schedule_and_goes_on_from_a_checkpoint(name: str) -> None:
    model = Tiny()
    optimizer = build_optimizer(name, model.named_parameters(), **OPTIONS[name])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (1 + t / 50))
    before = model.loss().item()
    step(model, optimizer, 10)
    scheduler.step()
    assert model.loss().item() < before
    assert {g["lr"] for g in optimizer.param_groups} == {OPTIONS[name]["lr"] / 1.02}
    again = Tiny()
    again.load_state_dict(model.state_dict())
    optimizer2 = build_optimizer(name, again.named_parameters(), **OPTIONS[name])
    optimizer2.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert step(model, optimizer, 5) == step(again, optimizer2, 5)


def test_adamw_is_fused_and_plain_values_reach_torch() -> None:
    adamw = build_optimizer("adamw", Tiny().named_parameters(), betas=(0.9, 0.95), eps=1e-6)
    assert adamw.defaults["fused"] is True
    assert adamw.defaults["betas"] == (0.9, 0.95)
    assert isinstance(
        build_optimizer("orthoadam", Tiny().named_parameters(), **OPTIONS["orthoadam"]), OrthoAdam
    )


def test_muon_takes_hidden_matrices_only() -> None:
    model = Tiny()
    optimizer = build_optimizer("muon", model.named_parameters(), lr=1e-2)
    step(model, optimizer, 1)
    assert set(optimizer.state[model.hidden.weight]) == {"momentum_buffer"}
    for p in (model.embed.weight, model.head.weight, model.norm.weight, model.hidden.bias):
        assert "exp_avg" in optimizer.state[p]


def test_muon_steps_by_its_definition() -> None:
    """Jordan 2024: W -= lr 0.2 sqrt(max(m, n)) NS5(g + μ (b - g)), b the gradients' running mean.

    NS5 drives singular values toward 1 by x (3.4445 - 4.775 x² + 2.0315 x⁴), five times; torch
    computes it in bfloat16, hence the tolerance. The factor 0.2 sqrt(max(m, n)) is Moonlight's.
    """
    weight = nn.Parameter(torch.randn(6, 10, generator=torch.Generator().manual_seed(1)))
    table = nn.Parameter(torch.zeros(3, 3))
    optimizer = build_optimizer(
        "muon", [("hidden.weight", weight), ("embed.weight", table)], lr=1e-2, weight_decay=0.1
    )
    expected, mean = weight.detach().double(), torch.zeros(6, 10, dtype=torch.float64)
    for seed in range(4):
        gradient = torch.randn(6, 10, generator=torch.Generator().manual_seed(10 + seed))
        weight.grad, table.grad = gradient.clone(), torch.zeros(3, 3)
        optimizer.step()
        mean = 0.95 * mean + 0.05 * gradient.double()
        u, s, v = torch.linalg.svd(0.05 * gradient.double() + 0.95 * mean, full_matrices=False)
        s = s / s.norm()
        for _ in range(5):
            s = s * (3.4445 - 4.775 * s**2 + 2.0315 * s**4)
        assert ((s > 0.6) & (s < 1.3)).all()
        expected = (1 - 1e-2 * 0.1) * expected - 1e-2 * 0.2 * 10**0.5 * (u * s) @ v
    moved = expected - torch.randn(6, 10, generator=torch.Generator().manual_seed(1)).double()
    error = (weight.detach().double() - expected).norm() / moved.norm()
    assert error < 0.02


def test_muon_leaves_embeddings_and_head_a_rate_of_their_own() -> None:
    def moved(name: str, scale: float = 1.0) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = Tiny()
        before = {key: p.detach().clone() for key, p in model.named_parameters()}
        optimizer = build_optimizer(name, model.named_parameters(), lr=1e-2, weight_decay=0.0)
        assert {group["lr"] for group in optimizer.param_groups} == {1e-2, 1e-2 * scale}
        step(model, optimizer, 1)
        return {key: p.detach() - before[key] for key, p in model.named_parameters()}

    plain, scaled = moved("muon"), moved("muon(adamw_lr=2e-3)", 0.2)
    for name, change in plain.items():
        factor = 1.0 if name == "hidden.weight" else 0.2
        torch.testing.assert_close(scaled[name], factor * change, rtol=1e-3, atol=1e-6)
    for lr, rate in ((1e-2, "-1.0"), (0.0, "1e-3")):
        with pytest.raises(WakefulError, match="muon: adamw_lr must be above 0 beside an lr"):
            build_optimizer(f"muon(adamw_lr={rate})", Tiny().named_parameters(), lr=lr)


def test_refusals() -> None:
    with pytest.raises(WakefulError, match="optimizer='lion' is not one of adamw, orthoadam"):
        build_optimizer("lion", Tiny().named_parameters())
    with pytest.raises(WakefulError, match="adamw has no option 'momentum'; it takes lr"):
        build_optimizer("adamw", Tiny().named_parameters(), momentum=0.9)
    with pytest.raises(WakefulError, match=r"lr=-1\.0 must be at least 0 and finite"):
        build_optimizer("adamw", Tiny().named_parameters(), lr=-1.0)
    for name in BUILDERS:
        with pytest.raises(WakefulError, match="eps must be above 0"):
            build_optimizer(name, Tiny().named_parameters(), eps=0.0)
    with pytest.raises(WakefulError, match="no hidden matrix"):
        build_optimizer("muon", [("bias", nn.Parameter(torch.zeros(3)))])
    with pytest.raises(WakefulError, match="no parameter"):
        build_optimizer("adamw", [])


def test_expressions_set_what_no_argument_does() -> None:
    def built(expression: str, **options: Any) -> torch.optim.Optimizer:
        return build_optimizer(expression, Tiny().named_parameters(), **options)

    nesterov = built("torch.optim:SGD(nesterov=True)", momentum=0.8)
    assert nesterov.defaults["nesterov"] is True
    assert nesterov.defaults["momentum"] == 0.8
    for rotation in ("haar", "'haar'", "block_diagonal(size=2)"):
        one = built(f"orthoadam(rotation={rotation}, sides='both')", lr=1e-2)
        assert isinstance(one, OrthoAdam)
        assert {line.rotation for line in one.plan()} >= {rotation.strip("'")}
    for expression, options, said in (
        ("orthoadam(rotation='haar')", {"rotation": "hadamard"}, "leave rotation out of the expr"),
        ("orthoadam(weight_decay=0.2)", {}, "leave weight_decay out of the expression"),
        ("muon(ns_step=3)", {}, r"no option 'ns_step' \(did you mean 'ns_steps'"),
        ("muon(ns_steps='3')", {}, "muon: ns_steps must be int"),
        ("muon(ns_steps=0)", {}, "muon: ns_steps must be 1 to 99 .* got 0 and 0.95"),
        ("muon(ns_steps=200)", {}, "muon: ns_steps must be 1 to 99 .* got 200"),
        ("muon(momentum=2.0)", {}, "momentum at least 0 and below 1, got 5 and 2.0"),
        ("muon(3)", {}, "muon: name the option that is 3"),
        ("adamw(groups=1)", {}, "adamw has no option 'groups'"),
        ("adamw(eps=0.0)", {}, "eps must be above 0"),
        ("adamw +", {}, "optimizer 'adamw \\+' does not parse"),
        ("orthoadam(rotation=spin)", {}, "unknown rotation 'spin'"),
        ("haar", {}, "optimizer='haar' is not one of adamw, orthoadam"),
    ):
        with pytest.raises(WakefulError, match=said):
            built(expression, **options)


OWN = """
import torch


class Signs(torch.optim.Optimizer):
    def __init__(self, params, lr: float, *, k: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "k": k})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                seen = self.state[p].setdefault("seen", torch.zeros(3))
                p.add_(p.grad.sign(), alpha=-group["lr"] * group["k"])
                seen.add_(1)


def slow(groups, *, lr, betas, nothing=False):
    return None if nothing else torch.optim.Adam(groups, lr=lr / 10, betas=betas)


number = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module outside the package, importable and not imported."""
    (tmp_path / "own_optimizers.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("own_optimizers", None)


@pytest.mark.usefixtures("own")
def test_a_class_or_function_of_ones_own_is_an_optimizer() -> None:
    with pytest.raises(WakefulError, match="import own_optimizers first"):
        optimizer_of("own_optimizers:Signs")
    kind = optimizer_of("own_optimizers:Signs", imports=True).func
    model = Tiny()
    for one in ("own_optimizers:Signs", kind):
        assert type(build_optimizer(one, model.named_parameters(), lr=1e-2)) is kind
    signs = build_optimizer("own_optimizers:Signs(k=2.0)", model.named_parameters(), lr=1e-2)
    before = model.loss().item()
    assert step(model, signs, 5) < before
    assert signs.param_groups[0]["k"] == 2.0
    assert [group["weight_decay"] for group in signs.param_groups] == [0.1, 0.0]
    slow = build_optimizer(
        "own_optimizers:slow", model.named_parameters(), lr=1.0, betas=(0.5, 0.6)
    )
    assert (slow.defaults["lr"], slow.defaults["betas"]) == (0.1, (0.5, 0.6))
    assert "NAdam" in repr(build_optimizer("torch.optim:NAdam", model.named_parameters()))
    for expression, said in {
        "own_optimizers:Signs(j=1)": "Signs has no option 'j'; its options are lr, k",
        "own_optimizers:number": "is neither a class nor a function",
        "own_optimizers:absent": "is neither a class nor a function",
        "own_optimizers:slow(nothing=True)": "gives a NoneType, which is not an optimizer",
        "own_optimizers:slow(lr=1)": "leave lr out of the expression",
    }.items():
        with pytest.raises(WakefulError, match=said):
            build_optimizer(
                expression, model.named_parameters(), lr=1e-2,
                **({"betas": (0.9, 0.9)} if ":slow" in expression else {}),
            )  # fmt: skip


def test_groups() -> None:
    model = Tiny()
    decayed, kept = decay_groups(model.named_parameters(), weight_decay=0.1)
    assert [n for n, _ in decayed["params"]] == ["embed.weight", "hidden.weight", "head.weight"]
    assert [n for n, _ in kept["params"]] == ["hidden.bias", "norm.weight"]
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    model.hidden.weight._wakeful_role = Role()  # pyright: ignore[reportAttributeAccessIssue]
    mixing = [("route.weights", model.hidden.weight), ("w", model.head.weight)]
    assert [g["weight_decay"] for g in decay_groups(mixing, weight_decay=0.1)] == [0.1, 0.0]
    assert len(decay_groups([("w", model.head.weight)], weight_decay=0.1)) == 1
    with pytest.raises(WakefulError, match="a and b are one parameter"):
        decay_groups([("a", model.hidden.weight), ("b", model.hidden.weight)], weight_decay=0.1)


def test_our_decoders_coefficients_do_not_decay() -> None:
    config = ModelConfig(
        vocab_size=9,
        width=32,
        mlp_width=40,
        num_layers=4,
        route='resformer(mode="learnable")',
        depth="denseformer",
    )
    decayed, kept = decay_groups(Decoder(config).named_parameters(), weight_decay=0.1)
    for name, parameter in decayed["params"]:
        assert parameter.dim() == 2
        assert not name.startswith(("route.", "depth.")), name
    assert any(name.startswith("route.") for name, _ in kept["params"])
    assert any(name.startswith("depth.") for name, _ in kept["params"])


def test_names_of_embeddings_and_heads() -> None:
    for name in ("embed.weight", "model.embed_tokens.weight", "transformer.wpe.weight"):
        assert role_outside_layers(name) == TABLE
    for name in ("lm_head.weight", "decoder.head.weight"):
        assert role_outside_layers(name) == HEAD
    assert role_outside_layers("blocks.0.attention.heads.weight") is None


PAPER = {"steps": 10_000, "warmup_steps": 120, "initial": 1e-7, "peak": 6e-4, "final": 6e-5}


def test_the_schedule_of_value_residual_learning() -> None:
    assert warmup_cosine(0, **PAPER) == pytest.approx(1e-7)
    assert warmup_cosine(60, **PAPER) == pytest.approx((1e-7 + 6e-4) / 2)
    assert warmup_cosine(120, **PAPER) == pytest.approx(6e-4)
    assert warmup_cosine(9_999, **PAPER) == pytest.approx(6e-5)
    middle = 120 + (9_999 - 120) // 2
    assert warmup_cosine(middle, **PAPER) == pytest.approx(3.3e-4, rel=1e-3)
    quarter = 120 + (9_999 - 120) / 4
    expected = 6e-5 + 5.4e-4 * 0.5 * (1 + math.cos(math.pi / 4))
    assert warmup_cosine(round(quarter), **PAPER) == pytest.approx(expected, rel=1e-3)


def test_a_run_may_have_no_warmup_or_nothing_else() -> None:
    one = {"steps": 1, "initial": 0.0, "peak": 1.0, "final": 0.1}
    assert warmup_cosine(0, warmup_steps=0, **one) == 1.0
    assert warmup_cosine(0, warmup_steps=1, **one) == 0.0


@st.composite
def schedules(draw: st.DrawFn) -> dict:
    steps = draw(st.integers(1, 500))
    peak = draw(st.floats(1e-6, 1.0))
    return {
        "steps": steps,
        "warmup_steps": draw(st.integers(0, steps)),
        "initial": draw(st.floats(0.0, peak)),
        "peak": peak,
        "final": draw(st.floats(0.0, peak)),
    }


@pytest.mark.slow
@given(schedules())
def test_the_rate_rises_to_the_peak_and_falls_to_the_floor(schedule: dict) -> None:
    rates = [warmup_cosine(step, **schedule) for step in range(schedule["steps"])]
    rising, falling = rates[: schedule["warmup_steps"]], rates[schedule["warmup_steps"] :]
    tiny = 1e-12 * schedule["peak"]
    assert all(a <= b + tiny for a, b in itertools.pairwise(rising))
    assert all(a >= b - tiny for a, b in itertools.pairwise(falling))
    if rising:
        assert rising[0] == pytest.approx(schedule["initial"])
        # Each step of a straight line is as long as the next.
        rise = (schedule["peak"] - schedule["initial"]) / schedule["warmup_steps"]
        assert all(b - a == pytest.approx(rise, abs=1e-9) for a, b in itertools.pairwise(rising))
    if falling:
        assert falling[0] == pytest.approx(schedule["peak"])
    if len(falling) > 1:
        assert falling[-1] == pytest.approx(schedule["final"], abs=tiny)
        # A cosine is at half height half way down, and symmetric about it.
        ends = schedule["peak"] + schedule["final"]
        assert all(
            a + b == pytest.approx(ends, abs=1e-9)
            for a, b in zip(falling, reversed(falling), strict=True)
        )


def test_past_its_end_a_run_stays_at_the_floor() -> None:
    assert warmup_cosine(20_000, **PAPER) == pytest.approx(6e-5)


@pytest.mark.parametrize("name", list(BUILDERS))
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_a_copy_goes_on_alike(name: str, copied: Callable[[Any], Any]) -> None:
    model = Tiny()
    optimizer = build_optimizer(name, model.named_parameters(), **OPTIONS[name])
    step(model, optimizer, 3)
    model2, optimizer2 = copied((model, optimizer))
    optimizer2.load_state_dict(copy.deepcopy(optimizer2.state_dict()))
    assert step(model, optimizer, 4) == step(model2, optimizer2, 4)


def test_muon_refuses_a_further_group() -> None:
    optimizer = build_optimizer("muon", Tiny().named_parameters(), lr=1e-2)
    groups = len(optimizer.param_groups)
    with pytest.raises(WakefulError, match="muon takes no further group"):
        optimizer.add_param_group({"params": [("more.weight", nn.Parameter(torch.ones(4, 4)))]})
    assert len(optimizer.param_groups) == groups
