"""Bridges over layers left out, against least squares by their definition."""

from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from helpers import EXAMPLES, some_tokens, tiny_decoder
from wakeful.config.schema import BridgeConfig
from wakeful.errors import WakefulError
from wakeful.inheritance.blocks import inherit_blocks
from wakeful.inheritance.bridge import bridge, find_gaps, solve_bridge
from wakeful.inheritance.equations import whole_products
from wakeful.inheritance.layers import LayerMap
from wakeful.inheritance.stream import TextStream
from wakeful.model.decoder import Decoder
from wakeful.runs.records import BridgeGap, Gap

LAYERS = LayerMap((0, 3), "named")
ONE_GAP = LayerMap((0, 3, 4), "named")
TOKENS = some_tokens(9, 11)
SHAPES: list[dict[str, Any]] = [
    {"mlp": "swiglu"},
    {"mlp": "gelu", "bias": True, "norm": "layernorm", "positions": "learned"},
    {"mlp": "swiglu", "bias": True, "num_kv_heads": 4},
    {"mlp": "gelu_exact", "tied": True, "parallel": True},
    {"mlp": "swiglu", "route": 'resformer(mode="learnable")'},
]


def activations(
    decoder: Decoder, layer: int, tokens: Tensor = TOKENS
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the input and the output of a layer's `down`, and the output of the layer."""
    actual: list[Tensor] = []
    block = decoder.blocks[layer]
    down = block.get_submodule("mlp.down")
    handles = [
        down.register_forward_pre_hook(lambda _, args: actual.extend(args)),
        down.register_forward_hook(lambda _m, _args, out: actual.extend([out])),
        block.register_forward_hook(lambda _m, _args, out: actual.append(out[0])),
    ]
    with torch.no_grad():
        decoder.hidden(tokens)
    for handle in handles:
        handle.remove()
    hidden, feed_forward_output, out = actual
    return hidden, feed_forward_output, out


def problem(
    heir: Decoder, reference: Decoder, options: BridgeConfig, after: int = 0, last: int = 2
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return features, targets, token weights and the first token's equation, by definition."""
    hidden, feed_forward_output, out = activations(heir, after)
    y = activations(reference, last)[2]
    f = feed_forward_output if options.map == "output" else hidden
    if heir.config.bias:
        f = torch.cat([f, torch.ones_like(f[..., :1])], -1)
    x1, y1 = out[:, 0].mean(0), y[:, 0].mean(0)
    first = y1 * (x1.norm() / y1.norm()).sqrt() - (out - feed_forward_output)[:, 0].mean(0)
    z = y - (out - feed_forward_output)
    weights = 1 / y[:, 1:].flatten(0, 1).norm(dim=1)
    return f[:, 1:].flatten(0, 1), z[:, 1:].flatten(0, 1), weights, f[:, 0].mean(0), first


def solve_by_definition(
    heir: Decoder, reference: Decoder, options: BridgeConfig, *, constrained: bool
) -> tuple[Tensor, Tensor | None]:
    """Return W_down and its bias by `torch.linalg.lstsq`, without a normal equation."""
    f, z, w, f1, z1 = problem(heir, reference, options)
    f, z = f * w.unsqueeze(1), z * w.unsqueeze(1)
    size = f.shape[1] - heir.config.bias
    rows = torch.eye(f.shape[1], dtype=f.dtype)[:size]
    rows *= (options.ridge * f.square().sum(0)[:size].mean()).sqrt()
    f, z = torch.cat([f, rows]), torch.cat([z, z.new_zeros(size, z.shape[1])])
    if constrained:
        # S = S₀ + N Z, with S₀ a solution of the constraint and N a basis of what it leaves free.
        start = torch.outer(f1, z1) / (f1 @ f1)
        free = torch.linalg.svd(f1.unsqueeze(0)).Vh[1:].T
        solution = start + free @ torch.linalg.lstsq(f @ free, z - f @ start).solution
    else:
        solution = torch.linalg.lstsq(f, z).solution
    new = solution[:size].T
    down = heir.blocks[0].get_submodule("mlp.down")
    weight, bias = down.get_parameter("weight"), None
    if heir.config.bias:
        old = down.get_parameter("bias") if options.map == "output" else torch.zeros(16)
        bias = solution[size] + (new @ old if options.map == "output" else 0)
    return (new @ weight if options.map == "output" else new), bias


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("solve", ["output", "down"])
@pytest.mark.parametrize("constrained", [True, False])
def test_a_bridge_is_the_least_squares_solution(
    shape: dict[str, Any],
    solve: Literal["output", "down"],
    constrained: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Whatever comes out.
    monkeypatch.setattr("wakeful.inheritance.bridge._MIN_COSINE", 2.0 if constrained else -2.0)
    options = BridgeConfig(map=solve, ridge=1e-4)
    reference = tiny_decoder(**shape)
    heir = inherit_blocks(reference, LAYERS)
    with torch.no_grad():
        weight, bias = solve_by_definition(heir, reference, options, constrained=constrained)
    before = {name: p.clone() for name, p in heir.named_parameters()}
    originals = {name: p.clone() for name, p in reference.named_parameters()}
    (actual,) = bridge(heir, reference, LAYERS, TOKENS, options)
    down = heir.blocks[0].get_submodule("mlp.down")
    torch.testing.assert_close(down.get_parameter("weight"), weight, rtol=1e-7, atol=1e-8)
    if bias is not None:
        torch.testing.assert_close(down.get_parameter("bias"), bias, rtol=1e-7, atol=1e-8)
    changed = {name for name, p in heir.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {"blocks.0.mlp.down.weight"} | (
        {"blocks.0.mlp.down.bias"} if bias is not None else set()
    )
    for name, parameter in reference.named_parameters():
        assert torch.equal(parameter, originals[name])
    assert all(parameter.requires_grad for parameter in heir.parameters())
    assert (actual.after, actual.first, actual.last) == (0, 1, 2)
    assert actual.error < actual.plain
    # What is said of it is what the heir does on the same text.
    y = activations(reference, 2)[2][:, 1:]
    x = activations(heir, 0)[2][:, 1:]
    w = 1 / y.square().sum(-1)
    error = (w * (x - y).square().sum(-1)).sum() / (w * y.square().sum(-1)).sum()
    assert actual.error == pytest.approx(error.item())


@pytest.mark.parametrize("inside", [True, False])
def test_the_first_token_is_constrained_where_it_would_be_turned(
    inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It grows long in layer 1, which the heir lacks, or is long from its embedding on."""
    tokens = some_tokens(40, 11).clamp(min=1)
    tokens[:, 0] = 0  # a token of its own: the mean first token is each
    reference = tiny_decoder()
    length = torch.zeros(16).index_fill_(0, torch.tensor([3]), 5000.0)
    with torch.no_grad():
        if inside:  # layer 1 adds 5,000 to one channel of the first token, and little to others
            hidden = activations(reference, 1, tokens)[0]
            later_states, first = hidden[:, 1:].flatten(0, 1), hidden[0, 0]
            reads = torch.linalg.solve(later_states.T @ later_states, first)
            down = reference.blocks[1].get_submodule("mlp.down").get_parameter("weight")
            down += torch.outer(length, reads / (reads @ first))
        else:
            reference.embed.weight[0] += length
    plain, constrained, out = (inherit_blocks(reference, LAYERS) for _ in range(3))
    bridge(constrained, reference, LAYERS, tokens)
    with monkeypatch.context() as patch:
        patch.setattr("wakeful.inheritance.bridge._MIN_COSINE", -2.0)  # never constrained
        bridge(out, reference, LAYERS, tokens)
    x, constrained_states, lost = (
        activations(model, 0, tokens)[2] for model in (plain, constrained, out)
    )
    y = activations(reference, 2, tokens)[2][0, 0]
    if inside:
        assert torch.cosine_similarity(lost[0, 0], y, dim=0) < 0.5
        torch.testing.assert_close(constrained_states[0, 0], y * (x[0, 0].norm() / y.norm()).sqrt())
    else:
        assert torch.cosine_similarity(lost[0, 0], y, dim=0) > 0.99
        assert torch.equal(constrained_states, lost)


def test_gaps_lie_between_neighbors_and_behind_the_last() -> None:
    assert find_gaps(LayerMap((0, 1, 4, 5), "x"), 8) == [Gap(1, 2, 3), Gap(3, 6, 7)]
    assert find_gaps(LayerMap((2, 3), "x"), 4) == []
    assert find_gaps(LayerMap((0, 1, 0, 1), "stacked"), 4) == []
    assert find_gaps(LayerMap((3, 1), "x"), 4) == []


def test_layers_that_do_nothing_are_left_out_without_a_trace() -> None:
    reference = tiny_decoder(bias=True)
    with torch.no_grad():
        for layer in (1, 2):
            for name in ("attention.out", "mlp.down"):
                for parameter in reference.blocks[layer].get_submodule(name).parameters():
                    parameter.zero_()
    for map_ in ("output", "down"):
        heir = inherit_blocks(reference, LAYERS)
        options = BridgeConfig(map=map_, ridge=0.0)
        (actual,) = bridge(heir, reference, LAYERS, some_tokens(40, 11), options)
        assert actual.plain == pytest.approx(0, abs=1e-12)
        assert actual.error == pytest.approx(0, abs=1e-12)
        torch.testing.assert_close(heir(TOKENS), reference(TOKENS), rtol=1e-8, atol=1e-8)


@torch.no_grad()
def alone(heir: Decoder, reference: Decoder, gap: Gap, options: BridgeConfig) -> BridgeGap:
    """Bridge one gap on the heir's stream as it is now."""
    streams = TextStream(heir, TOKENS), TextStream(reference, TOKENS)
    for stream, layer in zip(streams, (gap.after, gap.last + 1), strict=True):
        stream.advance(layer)
    return solve_bridge(*streams, gap, options)


def test_a_later_bridge_stands_on_the_stream_of_the_earlier() -> None:
    reference = tiny_decoder(num_layers=6)
    layers = LayerMap((0, 2, 4), "alternate")
    options = BridgeConfig(ridge=1e-4)
    heir = inherit_blocks(reference, layers)
    actual = bridge(heir, reference, layers, TOKENS, options)
    assert [(b.after, b.first, b.last) for b in actual] == [(0, 1, 1), (1, 3, 3), (2, 5, 5)]
    steps = inherit_blocks(reference, layers)
    for gap, single_bridge in zip(find_gaps(layers, 6), actual, strict=True):
        assert alone(steps, reference, gap, options) == single_bridge
    for name, parameter in heir.named_parameters():
        assert torch.equal(parameter, steps.get_parameter(name)), name
    # In another order the last is solved on a stream that it does not have later.
    wrong = inherit_blocks(reference, layers)
    for gap in reversed(find_gaps(layers, 6)):
        alone(wrong, reference, gap, options)
    assert not torch.allclose(wrong(TOKENS), heir(TOKENS))


def test_how_the_text_is_split_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = tiny_decoder()
    first_heir, second_heir = inherit_blocks(reference, LAYERS), inherit_blocks(reference, LAYERS)
    bridge(first_heir, reference, LAYERS, TOKENS)
    monkeypatch.setattr("wakeful.inheritance.stream._TOKENS_PER_BATCH", 25)
    bridge(second_heir, reference, LAYERS, TOKENS)
    torch.testing.assert_close(first_heir(TOKENS), second_heir(TOKENS), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_documents_of_a_row_are_bridged_as_rows_of_their_own(shape: dict[str, Any]) -> None:
    reference, alone = tiny_decoder(**shape), some_tokens(8, 7)
    together, numbers = alone.view(4, 14), torch.arange(14).expand(4, -1) // 7
    first_heir, second_heir, crossed = (inherit_blocks(reference, LAYERS) for _ in range(3))
    bridge(first_heir, reference, LAYERS, alone)
    bridge(second_heir, reference, LAYERS, together, documents=numbers)
    bridge(crossed, reference, LAYERS, together)
    with torch.no_grad():
        torch.testing.assert_close(first_heir(alone), second_heir(alone), rtol=1e-6, atol=1e-6)
        assert not torch.allclose(first_heir(alone), crossed(alone), rtol=1e-3, atol=1e-3)


def test_no_bridge_changes_nothing() -> None:
    reference = tiny_decoder()
    heir, plain = inherit_blocks(reference, LAYERS), inherit_blocks(reference, LAYERS)
    assert bridge(heir, reference, LAYERS, TOKENS, BridgeConfig(map="none")) == []
    assert torch.equal(heir(TOKENS), plain(TOKENS))


@pytest.mark.parametrize(
    "shape", [{"placement": "post"}, {"placement": "mixed"}, {"depth": ""}], ids=str
)
def test_a_stream_that_is_no_plain_sum_is_refused(shape: dict[str, Any]) -> None:
    if "depth" in shape:  # any that is not the plain one
        shape = {"depth": next(e for f, e in EXAMPLES if f == "depth" and e != "residual")}
    reference = tiny_decoder(**shape)
    with pytest.raises(WakefulError, match=rf"model.{next(iter(shape))} = .* --bridge.map none"):
        bridge(inherit_blocks(reference, LayerMap((0, 1), "x")), reference, LAYERS, TOKENS)


def test_too_few_tokens_are_refused() -> None:
    reference = tiny_decoder()
    with pytest.raises(WakefulError, match=r"give more --bridge\.tokens"):
        bridge(
            inherit_blocks(reference, LAYERS),
            reference,
            LAYERS,
            TOKENS[:1],
            BridgeConfig(ridge=0.0),
        )


@pytest.mark.parametrize("kind", ["down", "output"])
@pytest.mark.parametrize("shape", SHAPES[1:3])
def test_float32_solves_as_float64_does(
    shape: dict[str, Any], kind: Literal["down", "output"], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "wakeful.inheritance.stream._TOKENS_PER_BATCH", 25
    )  # several parts are summed
    options = BridgeConfig(map=kind, ridge=1e-2)
    actual = []
    for dtype in (torch.float32, torch.float64):
        reference = tiny_decoder(num_layers=5, **shape).to(dtype)
        heir = inherit_blocks(reference, ONE_GAP)
        (bridged,) = bridge(heir, reference, ONE_GAP, TOKENS, options)
        actual.append((heir.get_parameter("blocks.0.mlp.down.weight").double(), bridged))
    (single, single_state), (double, double_state) = actual
    torch.testing.assert_close(single, double, rtol=1e-3, atol=1e-5)
    assert single_state.error == pytest.approx(double_state.error, rel=1e-4)
    assert single_state.plain == pytest.approx(double_state.plain, rel=1e-4)


def test_what_is_left_of_a_layer_is_without_what_its_matrix_put_out_in_mixed_precision() -> None:
    decoder = tiny_decoder(num_layers=3).float()
    context = torch.autocast("cpu", dtype=torch.bfloat16)
    stream = TextStream(decoder, TOKENS, autocast=context)
    with torch.no_grad():
        for read, feed_forward_output, put_out in stream.activations():
            assert (read.dtype, feed_forward_output.dtype, put_out.dtype) == (
                torch.bfloat16, torch.bfloat16, torch.float32,
            )  # fmt: skip
            with context:
                again = stream.blocks[0].mlp.down(read)
            assert torch.equal(feed_forward_output, again)
            assert not torch.equal(
                feed_forward_output.float(), read.float() @ stream.blocks[0].mlp.down.weight.T
            )


def test_products_are_whole_whatever_is_allowed_elsewhere() -> None:
    torch.set_float32_matmul_precision("high")
    try:
        with whole_products():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
