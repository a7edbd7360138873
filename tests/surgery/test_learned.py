"""A learned rotation is orthogonal, exact, and lower in its loss than the one it began with."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from helpers import exact_loss, some_tokens, tiny_decoder
from wakeful.errors import WakefulError
from wakeful.model.decoder import Decoder
from wakeful.model.hooks import hooked
from wakeful.quant.schemes import Grid
from wakeful.quant.schemes.grids import E4M3, Absmax, MxE2M1, NvE2M1, Zeropoint
from wakeful.surgery import rotate, store_prefix
from wakeful.surgery.learning import Learned, learned_of
from wakeful.surgery.learning.learned import minimized, quantized_loss
from wakeful.surgery.learning.losses import Kurtosis, NextToken, Rounding, Whip, straight
from wakeful.variants import build, variants

TEXT = some_tokens(4, 20)
SHAPES = {
    "llama": {},
    "gpt2": {"norm": "layernorm", "mlp": "gelu", "bias": True, "tied": True},
    "resformer": {"route": 'resformer(mode="learnable")'},
}  # fmt: skip
GRIDS: list[Grid] = [
    Absmax(bits=4, per="token"), Absmax(bits=3, per="token", clip=0.7), E4M3(per="channel"),
    Absmax(bits=4, per="channel", group=5), Absmax(bits=4, per="tensor"), MxE2M1(per="token"),
    Zeropoint(bits=3, per="channel", group=16), NvE2M1(per="tensor"),
    NvE2M1(per="tensor", adaptive=True),
]  # fmt: skip


def learned(expression: str) -> Learned:
    made = learned_of(expression)
    assert made is not None
    return made


def is_orthogonal(matrices: Tensor) -> bool:
    one = torch.eye(matrices.shape[-1], dtype=torch.float64)
    return bool(((matrices @ matrices.mT - one).abs() < 1e-10).all())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("loss", ["whip", "kurtosis", "rounding"])
def test_the_function_stays_and_the_loss_falls(shape: str, loss: str) -> None:
    plain = tiny_decoder(**SHAPES[shape])
    plain = store_prefix(plain, [3]) if loss == "whip" else plain
    bases = learned(f"learned(loss={loss}, steps=8)").learn(plain, TEXT)
    assert is_orthogonal(bases.stream)
    assert is_orthogonal(bases.values)
    assert bases.fell[1] < 0.99 * bases.fell[0]
    with torch.no_grad():
        torch.testing.assert_close(rotate(plain, bases)(TEXT), plain(TEXT), rtol=1e-9, atol=1e-9)
    alike = torch.equal(bases.values[0], bases.values[1])
    assert alike == (shape == "resformer")  # whose layers read each other's values
    kept = bases.stream.sum(1) - 1
    assert (float(kept.abs().max()) < 1e-10) == (shape == "gpt2")  # whose norms take the mean out


def test_it_begins_with_the_rotation_that_is_drawn() -> None:
    for shape in SHAPES.values():
        plain = tiny_decoder(**shape)
        begun = rotate(plain, learned("learned(steps=0)").learn(plain, TEXT, seed=5))
        drawn = dict(rotate(plain, seed=5).named_parameters())
        for name, found in begun.named_parameters():
            torch.testing.assert_close(found, drawn[name], rtol=1e-5, atol=1e-5)


def test_eigenvectors_give_all_channels_one_variance() -> None:
    """16 channels: all entries of H are ±¼."""
    plain, spread = tiny_decoder(), {}
    for start in ("hadamard", "pca"):
        bases = learned(f"learned(start='{start}', steps=0)").learn(plain, TEXT)
        seen: list[Tensor] = []
        turned = rotate(plain, bases)
        norms = dict(
            enumerate(turned.get_submodule(f"blocks.{n}.attention_norm") for n in range(4))
        )
        with torch.no_grad(), hooked(norms, after=lambda _, __, output: seen.append(output)):  # noqa: B023
            turned(TEXT)
        spread[start] = torch.cat(seen).flatten(0, 1).square().mean(0).std()
    assert spread["pca"] < 0.5 * spread["hadamard"]  # of other tokens than those drawn
    for shape in SHAPES.values():
        made = tiny_decoder(**shape)
        bases = learned("learned(start='pca', steps=1)").learn(made, TEXT)
        assert is_orthogonal(bases.stream)
        with torch.no_grad():
            torch.testing.assert_close(rotate(made, bases)(TEXT), made(TEXT), rtol=1e-9, atol=1e-9)


def test_a_seed_gives_one_rotation() -> None:
    plain = tiny_decoder()
    for expression in ("learned(steps=2)", "learned(loss=loss, steps=1)"):
        one, same, other = (
            learned(expression).learn(plain, TEXT, seed=seed).stream for seed in (0, 0, 1)
        )
        assert torch.equal(one, same)
        assert not torch.allclose(one, other)


def test_steps_reach_the_known_minimum_and_stay_in_the_group() -> None:
    """The orthogonal Q with the largest tr(Mᵀ Q) is U Vᵀ of M = U S Vᵀ."""
    generator = torch.Generator().manual_seed(0)
    m = torch.randn(2, 6, 6, generator=generator, dtype=torch.float64)
    u, _, v = torch.linalg.svd(m)
    best = u @ v
    angles = 0.3 * torch.randn(2, 6, 6, generator=generator, dtype=torch.float64)
    start = best @ torch.matrix_exp(angles - angles.mT)
    told: list[int] = []
    (found,) = minimized(
        lambda each: -(m * each[0]).sum(), [start], steps=300, lr=0.1,
        told=lambda done, _: told.append(done),
    )  # fmt: skip
    assert is_orthogonal(found)
    torch.testing.assert_close(found, best, rtol=0, atol=1e-3)
    assert told == [*range(301)]


def test_local_losses_are_those_of_their_equations() -> None:
    rows = torch.randn(2, 3, 10, generator=torch.Generator().manual_seed(1)).double()
    rows.requires_grad_()
    whip = kurtosis = 0.0
    for row in rows.detach().flatten(0, 1).tolist():
        mean = sum(row) / 10
        second, fourth = (sum((x - mean) ** power for x in row) / 10 for power in (2, 4))
        kurtosis += abs(fourth / second**2 - 1.8) / 6
        whip += sum(2.718281828459045 ** -abs(x) for x in row) / 6
    for loss, expected in ((Whip(), whip), (Kurtosis(), kurtosis)):
        assert float(loss.of("inputs", rows.detach())) == pytest.approx(expected, rel=1e-9)
        assert torch.autograd.gradcheck(lambda x, loss=loss: loss.of("inputs", x), rows)
    both = Rounding(scheme="nvfp4")
    assert both.parts == ("inputs", "weights")
    flat = rows.detach().flatten(0, 1).float()
    grid = NvE2M1(per="tensor")
    near = torch.cat([grid.fake_quantize(e, grid.scales_of(e)) for e in flat.split(3)])
    expected = ((flat - near).square().sum(1) / flat.square().sum(1)).mean()
    torch.testing.assert_close(both.of("inputs", rows.detach().float()), expected)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_rounding_lets_gradients_through(grid: Grid) -> None:
    """s (clip(x/s + z) + r − z) with r held, s in proportion to the range of its numbers."""
    x = torch.randn(4, 40, generator=torch.Generator().manual_seed(2))
    x[0, 3] = 6.0
    scales = grid.scales_of(x)
    step, zero = (None if e is None else e.double() for e in scales.over(40))
    assert step is not None
    z = torch.zeros(()) if zero is None else zero
    held = (x.double() / step + z).clamp(grid.low, grid.high)
    r = grid.levels(x, scales).double() - held

    def range_of(x: Tensor) -> Tensor:
        size = 40 if grid.per != "tensor" or grid.group else x.numel()
        parts = x.reshape(-1, size).split(grid.group or size, dim=1)
        low, high = (
            torch.stack([f(part, 1) for part in parts], 1) for f in (torch.amin, torch.amax)
        )
        found = torch.maximum(low.abs(), high.abs()) if grid.symmetric else high - low
        spread = found.repeat_interleave(grid.group or size, 1)[:, :size]
        return spread.reshape(-1, 40)

    def definition(x: Tensor) -> Tensor:
        s = step * range_of(x) / range_of(first)
        return s * ((x / s + z).clamp(grid.low, grid.high) + r - z)

    first = x.double()
    torch.testing.assert_close(straight(x, grid), grid.fake_quantize(x, scales))
    along = torch.randn(4, 40, generator=torch.Generator().manual_seed(3)).double()
    weight = torch.randn(4, 40, generator=torch.Generator().manual_seed(4)).double()
    small = 1e-7
    ends = [(definition(first + sign * small * along) * weight).sum() for sign in (1, -1)]
    given = x.clone().requires_grad_()
    (straight(given, grid) * weight).sum().backward()
    assert given.grad is not None
    slope = float((given.grad.double() * along).sum())
    assert slope == pytest.approx(float(ends[0] - ends[1]) / (2 * small), rel=1e-3, abs=1e-3)


def rounded(plain: Decoder, weights: dict[str, Tensor], grid: Grid) -> Tensor:
    """Return the loss of a decoder with other weights whose blocks' linear layers round inputs."""
    linears = {each: each for each in plain.blocks.modules() if isinstance(each, nn.Linear)}

    def near(_: nn.Module, args: tuple) -> tuple:
        rows = straight(args[0].flatten(0, -2).float(), grid).to(args[0].dtype)
        return rows.view(args[0].shape), *args[1:]

    with hooked(linears, before=near):
        logits = functional_call(plain, weights, (TEXT[:, :-1],))
    return nn.functional.cross_entropy(logits.flatten(0, 1), TEXT[:, 1:].flatten())


def test_the_models_own_loss_is_that_of_the_rotated_model_with_its_gradient() -> None:
    plain = tiny_decoder(noise=0.0, num_layers=2, dtype=torch.float32)
    grid = NextToken(scheme="w4a4").grid
    bases = learned("learned(steps=0)").learn(plain, TEXT)
    matrices = [bases.stream[None], bases.values]
    q, r = given = [each.requires_grad_() for each in matrices]

    def turned(matrices: Sequence[Tensor]) -> dict[str, Tensor]:
        q, made = matrices[0][0].float(), {}
        for name, weight in plain.named_parameters():
            if weight.ndim == 2:
                writes = name.endswith(("out.weight", "down.weight"))
                made[name] = q @ weight if writes else weight @ q.mT
            if name.endswith(("out.weight", "value.weight")):
                of_layer = matrices[1][int(name.split(".")[1])].float()
                heads = torch.block_diag(*[of_layer] * (weight.numel() // 16 // 8))
                made[name] = made[name] @ heads.mT if "out" in name else heads @ made[name]
        return made

    expected = rounded(plain, turned(given), grid)
    found = quantized_loss(plain, TEXT, given, NextToken(scheme="w4a4"))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (found - exact_loss(plain, TEXT)).abs().detach() > 1e-4
    along = []
    for loss in (found, expected):
        products = [
            g @ each.mT for g, each in zip(torch.autograd.grad(loss, given), (q, r), strict=True)
        ]
        along.append([each - each.mT for each in products])
    for one, other in zip(*along, strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=2e-4)


def test_the_models_own_loss_falls() -> None:
    """On what the model says itself, whose loss any rounding raises."""
    plain = tiny_decoder(dtype=torch.float32).eval()
    with torch.no_grad():
        rows = TEXT[:, :1].repeat(4, 1)
        for _ in range(19):
            odds = plain(rows)[:, -1].softmax(-1)
            rows = torch.cat([rows, odds.multinomial(1)], 1)
    bases = learned("learned(loss=loss, steps=8, lr=0.03)").learn(plain, rows)
    assert bases.fell[1] < bases.fell[0]


def test_every_example_is_read_and_written() -> None:
    for kind in variants("surgery.learning").values():
        for example in kind.examples:
            assert str(build("surgery.learning", example)) == example
    assert learned_of("hadamard") is None


@pytest.mark.parametrize(
    ("expression", "word"),
    [
        (
            "learned(loss=wip)",
            r"unknown loss 'wip' \(did you mean 'whip'\?\); there are whip, kurtosis, ro",
        ),
        ("learned(loss=3)", "loss must be Loss"),
        ("learned(start='haar')", "start must be 'hadamard' or 'pca'"),
        ("learned(steps=-1)", "steps must be at least 0"),
        ("learned(lr=0.0)", "lr above 0"),
        ("learned(loss=rounding(scheme='kv4'))", "rounds neither inputs nor weights"),
        ("learned(loss=loss(scheme='w4'))", "does not round inputs"),
    ],
)
def test_what_cannot_be_learned(expression: str, word: str) -> None:
    with pytest.raises(WakefulError, match=word):
        learned_of(expression)


def test_models_and_losses_that_do_not_allow_it() -> None:
    with pytest.raises(WakefulError, match=r"model\.placement"):
        learned("learned").learn(tiny_decoder(placement="peri"), TEXT)
    with pytest.raises(WakefulError, match="the loss is nan in step 0"):
        minimized(lambda each: each[0].sum() * torch.nan, [torch.eye(3)[None]], steps=2, lr=0.1)
