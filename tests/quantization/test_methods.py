"""GPTQ and SmoothQuant against their definitions, and quantized keys and values."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_convert import gpt2, llama, logits
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PhiConfig,
    PhiForCausalLM,
)  # fmt: skip

from helpers import some_tokens, tiny_decoder
from wakeful.errors import WakefulError
from wakeful.probes.experts import put
from wakeful.probes.running import blocks_of
from wakeful.quantization import parse_scheme, quantize_module, quantized_layers
from wakeful.quantization.calibration import collect_statistics, linear_product
from wakeful.quantization.convert import linear_layers
from wakeful.quantization.linear import quantize_layer_with_schemes, weight_and_bias
from wakeful.quantization.norm_readers import readers_of_norms
from wakeful.quantization.schemes.gptq import Gptq, shrink_range
from wakeful.quantization.schemes.grids import (
    E4M3,
    MOST_SCALES,
    Absmax,
    Ggml,
    Grid,
    MxE2M1,
    NvE2M1,
    Scales,
    Zeropoint,
)  # fmt: skip
from wakeful.quantization.schemes.methods import InputStatistics, Smooth

GRIDS: list[Grid] = [
    Zeropoint(bits=4, per="channel"), Absmax(bits=3, per="tensor"),
    Zeropoint(bits=4, per="channel", group=5), Absmax(bits=4, per="channel", group=64),
    E4M3(per="channel"), MxE2M1(per="channel"), NvE2M1(per="tensor"),
]  # fmt: skip


def inputs(width: int, rows: int = 200) -> Tensor:
    """Rows whose channels go together."""
    generator = torch.Generator().manual_seed(width)
    mixing = torch.randn(width, width, generator=generator)
    return torch.randn(rows, width, generator=generator) @ (mixing + torch.eye(width))


def by_definition(
    weight: Tensor,
    products: Tensor,
    grid: Grid,
    damping: float,
    groups: list[list[int]],
    *,
    clip: bool,
) -> Tensor:
    """Round one column at a time; the rest takes its best answer, of an inverse computed anew.

    With `clip` each group is rounded under every scale to try, and each row keeps the best.
    """
    hessian = products.double() + damping * products.double().diagonal().mean() * torch.eye(
        len(products), dtype=torch.float64
    )
    whole, rest = grid.compute_scales(weight), [column for group in groups for column in group]
    w, rounded = weight.double().clone(), torch.zeros_like(weight, dtype=torch.float64)
    for group in groups:
        candidates = [whole]
        if grid.group:
            candidates = grid.scales_to_try(w[:, group], whole.outer)
            now = grid.compute_scales(w[:, group], outer=whole.outer)
            assert torch.equal(candidates[0].scale, now.scale)
        least = torch.full((len(weight),), torch.inf, dtype=torch.float64)
        outcomes = [
            round_group(w, rounded, grid, scales, hessian, group, rest)
            for scales in (candidates if clip else candidates[:1])
        ]
        for loss, left, found in outcomes:
            better = (loss < least).unsqueeze(1)
            least = torch.minimum(loss, least)
            w, rounded = torch.where(better, left, w), torch.where(better, found, rounded)
        rest = rest[len(group) :]
    return rounded


def round_group(
    w: Tensor, rounded: Tensor, grid: Grid, scales: Scales, hessian: Tensor, group: list[int],
    rest: list[int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return what a group's columns cost each row, the weights afterwards and the rounded ones."""
    w, rounded, loss = w.clone(), rounded.clone(), torch.zeros(len(w), dtype=torch.float64)
    for column in group:
        inverse = torch.linalg.inv(hessian[rest][:, rest])
        rounded[:, [column]] = grid.fake_quantize(w[:, [column]], scales).double()
        difference = w[:, [column]] - rounded[:, [column]]
        loss += (difference.square() / inverse[0, 0]).squeeze(1)
        w[:, rest] -= difference / inverse[0, 0] * inverse[:1]
        rest = rest[1:]
    return loss, w, rounded


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (7, 13), (5, 131), (3, 193)])
def test_gptq_is_its_definition(grid: Grid, rows: int, width: int) -> None:
    torch.manual_seed(0)
    x = inputs(width)
    weight = torch.randn(rows, width)
    products = x.T @ x
    method = Gptq(damping=0.01, act_order=False, clip=False)
    found = grid.dequantize(*method.round_weight(weight, grid, products))
    groups = [list(each) for each in torch.arange(width).split(grid.group or width)]
    groups = [[int(column) for column in group] for group in groups]
    expected = by_definition(weight, products, grid, 0.01, groups, clip=False).float()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


SEARCHED: list[Grid] = [
    Zeropoint(bits=3, per="channel", group=5), Absmax(bits=4, per="channel", group=32),
    Ggml(bits=4), MxE2M1(per="channel"), NvE2M1(per="tensor"), NvE2M1(per="channel"),
]  # fmt: skip


@pytest.mark.parametrize("grid", SEARCHED, ids=str)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (7, 13), (3, 67)])
def test_gptq_rounds_important_groups_first_under_the_best_scale(
    grid: Grid, rows: int, width: int
) -> None:
    torch.manual_seed(0)
    x = inputs(width) * torch.rand(width).exp()
    weight, products = torch.randn(rows, width), x.T @ x
    found, scales = Gptq().round_weight(weight, grid, products)
    importance = products.diagonal()
    groups = sorted(
        ([int(column) for column in each] for each in torch.arange(width).split(grid.group)),
        key=lambda group: -float(importance[group].sum()),
    )
    groups = [sorted(group, key=lambda column: -float(importance[column])) for group in groups]
    expected = by_definition(weight, products, grid, 0.1, groups, clip=True).float()
    torch.testing.assert_close(grid.dequantize(found, scales), expected, rtol=1e-6, atol=1e-7)


# Among powers of two the whole range is nearly always the best.
@pytest.mark.parametrize("grid", [g for g in SEARCHED if not isinstance(g, MxE2M1)], ids=str)
def test_a_search_of_scales_lowers_the_error_of_the_output(grid: Grid) -> None:
    torch.manual_seed(0)
    x, weight = inputs(96), torch.randn(24, 96)
    found = [
        grid.dequantize(*Gptq(clip=clip).round_weight(weight, grid, x.T @ x))
        for clip in (True, False)
    ]
    searched, whole = ((x @ (each - weight).T).norm() for each in found)
    assert searched < 0.98 * whole


@pytest.mark.parametrize("grid", SEARCHED, ids=str)
def test_scales_to_try_are_distinct_scales_that_the_format_stores(grid: Grid) -> None:
    x = torch.randn(9, grid.group)
    outer = torch.full((1, 1), 0.01) if grid.two_scales else None  # far from the ends of e4m3
    whole = grid.compute_scales(x, outer=outer)
    tried = grid.scales_to_try(x, whole.outer)
    assert torch.equal(tried[0].scale, whole.scale)
    assert 3 <= len(tried) <= MOST_SCALES
    each_row = torch.cat([scales.scale for scales in tried], dim=1)
    assert all(len(row.unique()) == len(row) for row in each_row)
    for scales in tried:
        assert torch.equal(grid.decode_scale(grid.encode_scale(scales.scale)), scales.scale)


def test_neighbors_of_a_scale_end_where_e4m3_ends() -> None:
    grid, outer = NvE2M1(per="tensor"), torch.ones(1, 1)
    x = torch.tensor([[0.0], [1e9]])
    tried = torch.cat([scales.scale for scales in grid.scales_to_try(x, outer)], dim=1)
    assert tried[0].min() == 2**-9
    assert tried[1].max() == 448
    assert bool((tried > 0).all())


@pytest.mark.parametrize("grid", [*SEARCHED, *GRIDS[:2]], ids=str)
def test_rows_are_rounded_alike_in_slices(monkeypatch: pytest.MonkeyPatch, grid: Grid) -> None:
    torch.manual_seed(0)
    x, weight = inputs(48), torch.randn(23, 48)
    whole, scales = Gptq().round_weight(weight, grid, x.T @ x)
    for num_rows in (1, 5):
        numbers_of_row = max(48, MOST_SCALES * grid.group)
        monkeypatch.setattr("wakeful.quantization.schemes.gptq.AT_ONCE", num_rows * numbers_of_row)
        sliced, sliced_scales = Gptq().round_weight(weight, grid, x.T @ x)
        assert torch.equal(whole, sliced)
        for name in ("scale", "zero", "outer"):
            expected, found = getattr(scales, name), getattr(sliced_scales, name)
            assert found is None if expected is None else torch.equal(found, expected)


def test_formats_are_rounded_alike_together_and_alone() -> None:
    torch.manual_seed(0)
    x, weight = inputs(48), torch.randn(5, 48)
    for method in (Gptq(), Gptq(act_order=False)):
        together = method.round_with_grids(weight, [*SEARCHED, *GRIDS[:2]], x.T @ x)
        for grid, (codes, scales) in zip([*SEARCHED, *GRIDS[:2]], together, strict=True):
            alone, alone_scales = method.round_weight(weight, grid, x.T @ x)
            assert torch.equal(codes, alone)
            assert torch.equal(scales.scale, alone_scales.scale)


def test_a_scale_beyond_its_dtype_is_not_taken() -> None:
    weight = torch.randn(2, 32)
    weight[0, 3] = -520_000.0  # 104% of it needs a step that float16 does not hold
    grid = Ggml(bits=4)
    found = grid.dequantize(*Gptq().round_weight(weight, grid, inputs(32).T @ inputs(32)))
    assert bool(found.isfinite().all())


def test_an_outer_scale_of_each_row_is_not_shared_by_layers() -> None:
    grids = [NvE2M1(per="tensor"), NvE2M1(per="channel")]
    schemes = [parse_scheme(f"scheme(weights={grid})") for grid in grids]
    largest = torch.full((1, 1), 9.0)
    shared, own = quantize_layer_with_schemes(nn.Linear(32, 4), schemes, max_weight=largest)
    assert shared.outer is not None
    assert own.outer is not None
    torch.testing.assert_close(shared.outer, largest / (6 * 448))
    assert own.outer.shape == (4, 1)


@pytest.mark.parametrize("grid", [g for g in GRIDS if not g.group], ids=str)
def test_gptq_in_the_order_of_activations_is_gptq_of_columns_in_that_order(grid: Grid) -> None:
    x = inputs(193) * torch.rand(193).exp()
    weight, products = torch.randn(3, 193), x.T @ x
    order = products.diagonal().argsort(descending=True)
    found = grid.dequantize(*Gptq(act_order=True).round_weight(weight, grid, products))
    sorted_products = products[order][:, order]
    ordered = Gptq(act_order=False)
    expected = grid.dequantize(*ordered.round_weight(weight[:, order], grid, sorted_products))
    torch.testing.assert_close(found[:, order], expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("grid", GRIDS[:4], ids=str)
def test_gptq_makes_the_output_better(grid: Grid) -> None:
    x, weight = inputs(96), torch.randn(24, 96)
    plain = grid.fake_quantize(weight, grid.compute_scales(weight))
    found = grid.dequantize(*Gptq(clip=False).round_weight(weight, grid, x.T @ x))
    before, after = ((x @ (each - weight).T).norm() for each in (plain, found))
    assert after < 0.8 * before
    assert (found - weight).norm() > (plain - weight).norm()  # the weights themselves pay


# With groups the gain is smaller: the ordinary columns of a group with one large column are
# rounded before the large columns of the next group. More damping makes it smaller too.
@pytest.mark.slow
@pytest.mark.parametrize(("group", "damping", "share"), [(0, 0.01, 0.85), (32, 0.1, 0.98)])
def test_gptq_keeps_what_a_rare_row_needs_where_large_inputs_go_first(
    group: int, damping: float, share: float
) -> None:
    grid, errors = Absmax(bits=4, per="channel", group=group), []
    for seed in range(6):
        torch.manual_seed(seed)
        x = torch.randn(16 * 128, 96) @ (torch.randn(96, 96) / 10 + torch.eye(96))
        first = torch.zeros(96)  # a token that begins each sequence, with outliers of its own
        first[[7, 40, 71, 90]] = torch.tensor([9.0, -7.0, 8.0, -10.0])
        x[::128] = first + torch.randn(16, 96) / 20
        weight = torch.randn(48, 96)
        found = [
            grid.dequantize(*method.round_weight(weight, grid, x.T @ x))
            for method in (Gptq(damping=damping), Gptq(damping=damping, act_order=False))
        ]
        errors.append([(x[::128] @ (each - weight).T).norm() for each in found])
    by_activations, in_order = torch.tensor(errors).mean(0)
    assert by_activations < share * in_order


def test_gptq_of_nothing_without_groups_is_plain_rounding() -> None:
    weight, grid = torch.randn(4, 9), GRIDS[0]
    found = grid.dequantize(*Gptq().round_weight(weight, grid, torch.zeros(9, 9)))
    assert torch.equal(found, grid.fake_quantize(weight, grid.compute_scales(weight)))


def test_gptq_of_too_little_text_for_so_little_damping_is_refused() -> None:
    with pytest.raises(WakefulError, match="damping = 1e-30 leaves"):
        Gptq(damping=1e-30).round_weight(torch.randn(4, 9), GRIDS[0], torch.ones(9, 9))


@pytest.mark.parametrize("make", [lambda: tiny_decoder(dtype=torch.float32).eval(), llama, gpt2])
def test_calibration_sees_what_layers_read(make) -> None:
    model = make()
    tokens = [some_tokens(1, 12, seed=n) for n in range(3)]
    layers = linear_layers(model)
    seen = collect_statistics(model, layers, tokens, gram=True)
    read: dict[str, list[Tensor]] = {name: [] for name in layers}
    for name, layer in layers.items():
        layer.register_forward_pre_hook(lambda _m, args, n=name: read[n].append(args[0][0]))
    for each in tokens:
        logits(model) if each is None else model(each)
    for name, xs in read.items():
        x = torch.cat(xs)
        torch.testing.assert_close(seen[name].gram, x.T @ x, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(seen[name].channel_max, x.abs().amax(0))
    first = next(iter(seen.values())).weight_max
    shared = [name for name in seen if seen[name].weight_max is first]
    assert len(shared) == (1 if isinstance(model, type(gpt2())) else 3)  # query, key, value


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "again"), [("w4g128_gptq", 0), (parse_scheme("coarse", "static"), 1)]
)
def test_layers_are_multiplied_again_only_where_outputs_have_a_static_grid(
    scheme: Any, again: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, asked = tiny_decoder(dtype=torch.float32).eval(), []
    real = linear_product

    def counted(layer, x):
        asked.append(layer)
        return real(layer, x)

    monkeypatch.setattr("wakeful.quantization.calibration.linear_product", counted)
    quantize_module(model, scheme, calibration=[some_tokens(1, 12)])
    assert len(asked) == again * len(linear_layers(model))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "passes"), [("plain", 1), ("resformer", 29), ("denseformer", 29), ("llama", 1)]
)
def test_gptq_in_portions_is_gptq_at_once(
    kind: str, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one pass, block by block, where no block reads more than the one before it."""
    changes = {"plain": {}, "resformer": {"route": kind}, "denseformer": {"depth": kind}}
    model = llama() if kind == "llama" else tiny_decoder(dtype=torch.float32, **changes[kind])
    given = [some_tokens(4, 20), some_tokens(2, 12), some_tokens(1, 16)]
    whole = quantize_module(model.eval(), "w4g128_gptq", calibration=given)
    monkeypatch.setattr("wakeful.quantization.layerwise.PRODUCTS", 1)
    ran: list[int] = []
    name = "model.layers.1.mlp.down_proj" if kind == "llama" else "blocks.1.mlp.down"
    model.get_submodule(name).register_forward_hook(lambda _, x, y: ran.append(len(x[0])))
    parts = quantize_module(model, "w4g128_gptq", calibration=given)
    assert torch.equal(logits(whole), logits(parts))
    # A layer's part runs its block again, and so do two passes over eight tokens.
    inside = 7 if passes == 1 else passes
    assert len(ran) == 2 + 3 * (inside + 1)
    assert not any("forward" in vars(block) for block in blocks_of(model))
    plain = quantize_module(model, "w4g128")
    full = logits(model)
    assert not torch.equal(logits(plain), logits(whole))
    assert (logits(whole) - full).norm() < 0.5 * full.norm()


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_smoothing_moves_ranges_and_not_the_function(alpha: float) -> None:
    x, w = torch.rand(11) + 0.1, torch.rand(11) + 0.1
    x[3], w[5] = 0.0, 0.0  # a dead channel stays as it is
    s = Smooth(alpha=alpha).compute_divisor(
        InputStatistics(x, 0.0, None, w), Absmax(bits=8, per="tensor")
    )
    expected = x**alpha / w ** (1 - alpha)
    expected[[3, 5]] = 1.0
    torch.testing.assert_close(s, expected)
    if alpha == 0.5:
        live = [n for n in range(11) if n not in (3, 5)]
        torch.testing.assert_close((x / s)[live], (w * s)[live])


def test_a_smoothed_layer_is_its_formula() -> None:
    torch.manual_seed(0)
    model = llama()
    model.model.embed_tokens.weight.data[:, 3] *= 100  # a channel that stands out
    model.model.layers[0].input_layernorm.weight.data[3] = 30.0
    given = [some_tokens(1, 12)]
    scheme = parse_scheme("smoothquant")
    small = quantize_module(model, scheme, calibration=given)
    attention = model.model.layers[0].self_attn
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    found: list[Tensor] = []
    attention.q_proj.register_forward_pre_hook(lambda _m, args: found.append(args[0]))
    with torch.no_grad():
        model(given[0])
    x = found[0]
    top = torch.cat([each.weight.detach() for each in projections]).abs().amax(0)
    s = (x[0].abs().amax(0) / top).sqrt()
    weight = attention.k_proj.weight.detach() * s
    grid = Absmax(bits=8, per="tensor")
    w_hat = grid.fake_quantize(weight, grid.compute_scales(weight))
    x_hat = grid.fake_quantize(x[0] / s, grid.compute_scales(x[0] / s))
    layer = quantized_layers(small)["model.layers.0.self_attn.k_proj"]
    torch.testing.assert_close(layer(x)[0], x_hat @ w_hat.T, rtol=1e-4, atol=1e-5)
    y = attention.k_proj(x)
    rough = quantized_layers(quantize_module(model, "moderate"))["model.layers.0.self_attn.k_proj"]
    assert (layer(x) - y).norm() < 0.7 * (rough(x) - y).norm()


def test_a_static_input_scale_is_of_what_was_divided() -> None:
    model, mlp = tiny_decoder(dtype=torch.float32).eval(), "blocks.1.mlp"
    given = [some_tokens(1, 11, seed=n) for n in range(3)]
    readers = {"up": ["gate", "up"], "down": ["down"]}
    read: dict[nn.Module, list[Tensor]] = {
        model.get_submodule(f"{mlp}.{name}"): [] for name in readers
    }

    def note(layer: nn.Module, args: tuple[Tensor]) -> None:
        read[layer].append(args[0][0])

    for layer in read:
        layer.register_forward_pre_hook(note)
    scheme = parse_scheme("smoothquant", "static")
    layers = quantized_layers(quantize_module(model, scheme, calibration=given))
    for (name, sharers), xs in zip(readers.items(), read.values(), strict=True):
        x = torch.cat(xs).abs()
        rows = torch.cat([model.get_parameter(f"{mlp}.{each}.weight") for each in sharers])
        divided = x / (x.amax(0) / rows.detach().abs().amax(0)).sqrt()
        found = layers[f"{mlp}.{name}"].input_scale
        assert found is not None
        assert float(found) == pytest.approx(float(divided.max()) / 127)
        assert float(found) != pytest.approx(float(x.max()) / 127, rel=0.1)


CACHED = ["own", "resformer", "svformer"]


@pytest.mark.parametrize("route", CACHED)
@pytest.mark.parametrize("scheme", ["kv8", "scheme(cache=zeropoint(bits=4, per='token'))"])
def test_attention_reads_quantized_keys_and_values(route: str, scheme: str) -> None:
    # In float64 no sum in another order puts a key on the other side of a rounding.
    model = tiny_decoder(route=route).eval()
    small = quantize_module(model, scheme)
    grid = parse_scheme(scheme).cache
    assert grid is not None
    read: list[tuple[Tensor, Tensor]] = []
    small.blocks[0].attention.dot.register_forward_pre_hook(lambda _m, args: read.append(args[1:3]))
    plain: list[tuple[Tensor, Tensor]] = []
    hook = model.blocks[0].attention.dot.register_forward_pre_hook(
        lambda _m, args: plain.append(args[1:3])
    )
    tokens = some_tokens(2, 9)
    with torch.inference_mode():
        whole, full = small(tokens), model(tokens)
        hook.remove()
        for got, exact in zip(read[0], plain[0], strict=True):
            for head, before in zip(
                got.unflatten(0, (-1,)).flatten(0, 2), exact.flatten(0, 2), strict=True
            ):
                row = before[None]
                rounded = grid.fake_quantize(row, grid.compute_scales(row)).double()
                torch.testing.assert_close(head[None], rounded)
        far = 0.05 if scheme == "kv8" else 0.4
        assert 0 < (whole - full).norm() < far * full.norm()
        cache = small.new_cache(2, 9)
        parts = [small(tokens[:, n : n + 1], cache=cache) for n in range(9)]
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-12)
    assert not any(hasattr(block.attention.quantized, "scheme") for block in model.blocks)


def test_what_methods_and_caches_refuse() -> None:
    decoder = tiny_decoder(dtype=torch.float32).eval()
    with pytest.raises(WakefulError, match="gptq needs calibration text"):
        quantize_module(decoder, "w4g128_gptq")
    with pytest.raises(WakefulError, match=r"quantized already: .* is kv4"):
        quantize_module(quantize_module(decoder, "kv4"), "fine")
    for text, message in (
        ("scheme(inputs=absmax(bits=8, per='token'))", "weights, or a cache and nothing else"),
        ("scheme(cache=mx_e2m1(per='channel'))", "per token or head or tensor, not per channel"),
        ("scheme(cache=nv_e2m1(per='tensor'))", "a cache has groups of a token's channels"),
        ("scheme(cache=absmax(bits=4, per='head', group=8))", "a group is of 2 or more"),
        ("w4(method=gptq(damping=0))", "damping must be above 0"),
        ("fine(method=smooth(alpha=2))", "alpha must be from 0 to 1"),
        ("kv8(method=gptq)", "weights, or a cache and nothing else"),
    ):
        with pytest.raises(WakefulError, match=message):
            parse_scheme(text)


def test_smoothing_counts_readers_of_one_tensor_once() -> None:
    none, w = torch.zeros(4), torch.randn(3, 4).abs().amax(0)
    seen = InputStatistics(none, 0.0, None, w)
    assert Smooth().compute_divisor(seen, Absmax(bits=8, per="tensor")).tolist() == [1] * 4


def test_all_readers_of_one_tensor_are_divided_alike() -> None:
    """Phi's queries, keys, values and hidden channels read one norm's output, not in a row."""
    torch.manual_seed(0)
    config = PhiConfig(
        vocab_size=29, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    model = PhiForCausalLM(config).eval()
    tokens = [some_tokens(1, 12, seed=n) for n in range(2)]
    layers = quantized_layers(quantize_module(model, "smoothquant", calibration=tokens))
    for number, block in enumerate(model.model.layers):
        attention = block.self_attn
        readers = [attention.q_proj, attention.k_proj, attention.v_proj, block.mlp.fc1]
        read: list[Tensor] = []
        with (
            block.mlp.fc1.register_forward_pre_hook(lambda _, args, to=read: to.append(args[0])),
            torch.no_grad(),
        ):
            for each in tokens:
                model(each)
        largest = torch.cat(read, 1)[0].abs().amax(0)
        weights = torch.stack([each.weight.abs().amax(0) for each in readers]).amax(0)
        expected = (largest / weights).sqrt()
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.fc1"):
            found = layers[f"model.layers.{number}.{name}"].divisor
            torch.testing.assert_close(found, expected)


SMOOTH_NORMS = "fine(method=smooth(norms=True))"


def scales_moved_into_norms(model: nn.Module, skip: tuple[str, ...] = ()) -> nn.Module:
    """A copy whose norms do what the quantized layers' divisions do, in full precision."""
    tokens = some_tokens(1, 12)
    layers = quantized_layers(quantize_module(model, SMOOTH_NORMS, calibration=[tokens], skip=skip))
    moved = copy.deepcopy(model)
    with torch.no_grad():
        for norm, readers in readers_of_norms(model).items():
            divisor = layers[readers[0]].divisor
            assert divisor is not None
            for name, parameter in moved.get_submodule(norm).named_parameters():
                assert name in ("weight", "bias")
                parameter.div_(divisor)
            for reader in readers:
                moved.get_parameter(f"{reader}.weight").mul_(divisor)
                layers.pop(reader)
    assert all(bool((layer.divisor == 1).all()) for layer in layers.values())
    return moved


def post_norm() -> OPTForCausalLM:
    config = OPTConfig(
        vocab_size=29, hidden_size=16, ffn_dim=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, word_embed_proj_dim=8, init_std=0.3,
        do_layer_norm_before=False,
    )  # fmt: skip
    return OPTForCausalLM(config).eval()


def shared_experts() -> DeepseekV3ForCausalLM:
    config = DeepseekV3Config(
        vocab_size=29, hidden_size=16, intermediate_size=24, moe_intermediate_size=8,
        num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=64,
        n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
        first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4,
        qk_nope_head_dim=4, v_head_dim=4, initializer_range=0.3,
    )  # fmt: skip
    return DeepseekV3ForCausalLM(config).eval()


@pytest.mark.parametrize("make", [llama, post_norm, shared_experts])
def test_no_division_goes_into_a_norm_that_something_else_reads(
    make: Callable[[], nn.Module],
) -> None:
    """A residual stream behind a post-norm, or a router of experts, would read it divided."""
    torch.manual_seed(0)
    model = make()
    skip = ("*.mlp.gate", "*.mlp.experts") if make is shared_experts else ()
    expected = logits(model)
    assert torch.allclose(
        logits(scales_moved_into_norms(model, skip)), expected, rtol=1e-4, atol=1e-4
    )
    read = readers_of_norms(model)
    assert ("model.layers.1.post_attention_layernorm" in read) == (make is llama)


TEXTS = [some_tokens(1, 24, seed=n) for n in range(4)]


def decoder(**changes: Any) -> nn.Module:
    return tiny_decoder(dtype=torch.float32, **changes).eval()


RANGES: list[Grid] = [
    Zeropoint(bits=3, per="channel"), Absmax(bits=3, per="tensor"),
    Zeropoint(bits=3, per="channel", group=5), Absmax(bits=3, per="channel", group=8),
    MxE2M1(per="channel"), NvE2M1(per="tensor"),
]  # fmt: skip


@pytest.mark.parametrize("grid", RANGES, ids=str)
def test_a_range_shrinks_where_that_is_nearer(grid: Grid) -> None:
    torch.manual_seed(0)
    weight, importance = torch.randn(6, 21), torch.rand(21) ** 2
    whole = grid.compute_scales(weight)

    def errors(scales) -> Tensor:
        return grid.sum_per_scale(
            (weight - grid.fake_quantize(weight, scales)).square() * importance
        )

    low, high = grid.value_range(weight)
    tried = torch.stack([errors(whole), *(
        errors(grid.fit_group_scales(low * share, high * share, whole.outer))
        for share in torch.linspace(1, 0.5, 26).tolist()
    )])  # fmt: skip
    found = shrink_range(grid, weight, whole, importance)
    torch.testing.assert_close(errors(found), tried.amin(0))
    assert bool((errors(found) <= errors(whole) * (1 + 1e-6)).all())
    assert bool((errors(found) < errors(whole)).any())
    assert grid.sum_per_scale(torch.ones(6, 21)).sum() == 6 * 21


@pytest.mark.slow
@pytest.mark.parametrize("make", [llama, gpt2, decoder, lambda: decoder(route="resformer")])
def test_sequential_gptq_rounds_by_what_quantized_blocks_give(make) -> None:
    model = make()
    method = "gptq(weighting='none', sequential={})"
    grid = "scheme(weights=absmax(bits=3, per='channel'), method={})"
    small, apart = (
        quantized_layers(quantize_module(model, grid.format(method.format(how)), calibration=TEXTS))
        for how in (True, False)
    )
    first, later = ("h.0.", "h.1.") if "transformer.h.0.mlp.c_fc" in small else ("s.0.", "s.1.")
    scheme = parse_scheme(grid.format(method.format(False)))
    assert scheme.method is not None
    assert scheme.weights is not None
    layers = linear_layers(model)
    inside = {name: each for name, each in layers.items() if later in name}
    put(model, {name: each for name, each in small.items() if first in name})
    seen = collect_statistics(model, inside, TEXTS, gram=True)
    put(model, layers)
    assert inside
    for name, layer in inside.items():
        codes, scales = scheme.method.round_weight(
            weight_and_bias(layer)[0], scheme.weights, seen[name].gram
        )
        expected = scheme.weights.dequantize(codes, scales)
        torch.testing.assert_close(small[name].dequantize(), expected)
    for name in small:
        same = torch.equal(small[name].dequantize(), apart[name].dequantize())
        assert same == (first in name)
