"""Choosing layers: every figure by its definition, every rule by hand."""

import itertools
import math
from collections.abc import Sequence

import pytest
import torch

from helpers import some_tokens, tiny_decoder
from wakeful.errors import WakefulError
from wakeful.inheritance.layers import (
    By,
    LayerDiagnosis,
    LayerMap,
    diagnose_layers,
    from_order,
    growth_order,
)
from wakeful.model.attend import causal_mask, explicit_attention
from wakeful.probes import exact
from wakeful.probes.base import AttentionEvent, MeanProbe
from wakeful.probes.watch import watch

SEQUENCES = some_tokens(3, 15).tolist()


class Keep(MeanProbe):
    """Keeps the events themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.attention: list[AttentionEvent] = []
        self.inputs: dict[int, list[torch.Tensor]] = {}
        self.outputs: dict[int, list[torch.Tensor]] = {}

    def see(self, event) -> None:
        if isinstance(event, AttentionEvent):
            self.attention.append(event)

    def hook(self, layer: int):
        def forward(_block, args, output) -> None:
            self.inputs.setdefault(layer, []).append(args[0][0])
            self.outputs.setdefault(layer, []).append(output[0][0])

        return forward


@pytest.mark.parametrize("depth", ["residual", "denseformer", "embedding_residual"])
def test_the_figures_are_those_of_the_definitions(depth: str) -> None:
    """A block's input is what it receives: under a depth mix not the block before's output."""
    decoder = tiny_decoder(num_layers=3, depth=depth).eval()
    diagnosed = diagnose_layers(decoder, SEQUENCES)
    keep = Keep()
    for layer, block in enumerate(decoder.blocks):
        block.register_forward_hook(keep.hook(layer))
    with torch.no_grad(), watch(decoder, keep):
        for sequence in SEQUENCES:
            decoder(torch.tensor([sequence]))
    seen = causal_mask(15, 15, 0, torch.device("cpu"))
    for layer in range(3):
        ranks, columns = [], []
        for event in keep.attention[layer::3]:
            heads = [part.transpose(1, 2) for part in (event.q, event.k, event.v)]
            A = explicit_attention(*heads, scale=event.scale, sink=None, keep=seen)[1][0]
            ranks.append(exact.rank(A, 0.9).double())
            columns.append(exact.mass_columns(A, 0.9).double().mean())
        assert diagnosed.figures["rank"][layer] == torch.stack(ranks).mean(0).max()
        assert diagnosed.figures["mass"][layer] == pytest.approx(float(sum(columns)) / 3)
        pairs = list(zip(keep.inputs[layer], keep.outputs[layer], strict=True))
        influence = [float(exact.block_influence(a, b)) for a, b in pairs]
        assert diagnosed.figures["influence"][layer] == pytest.approx(sum(influence) / 3)
        angle = [float(exact.angular_distance(a, b)) for a, b in pairs]
        assert diagnosed.figures["angle"][layer] == pytest.approx(sum(angle) / 3)
    if depth != "residual":
        assert not torch.equal(keep.inputs[2][0], keep.outputs[1][0])
    ends = [*(keep.inputs[layer] for layer in range(3)), keep.outputs[2]]
    for low in range(4):
        for high in range(low + 1, 4):
            angle = [
                float(exact.angular_distance(a, b))
                for a, b in zip(ends[low], ends[high], strict=True)
            ]
            assert diagnosed.angles[low][high] == pytest.approx(sum(angle) / 3)
    assert decoder.training is False


def diagnosed(figures: list[float], angles: list[list[float]] | None = None) -> LayerDiagnosis:
    names = ("rank", "mass", "influence", "angle")
    return LayerDiagnosis(dict.fromkeys(names, figures), angles or [])


def choose_layers(facts: LayerDiagnosis, by: By, num_layers: int, **how: int) -> LayerMap:
    return from_order(growth_order(facts, by, num_layers, **how), num_layers, by)


def test_the_highest_figures_are_kept_in_their_order() -> None:
    facts = diagnosed([5.0, 9.0, 1.0, 9.0, 7.0])
    for by in ("rank", "mass", "influence"):
        assert choose_layers(facts, by, 3, pinned=0).sources == (1, 3, 4)
        assert choose_layers(facts, by, 3).sources == (0, 1, 3)
        assert choose_layers(facts, by, 3, pinned=3).sources == (0, 1, 2)
    # What a growth adds comes next in the same order.
    order = growth_order(facts, "rank", 2, pinned=0)
    assert order == [1, 3, 4, 0, 2]
    assert from_order(order, 4, "rank").sources == (0, 1, 3, 4)


def test_the_run_over_which_the_stream_turns_least_is_dropped() -> None:
    # Angles of single blocks, added up along the depth: the least run of two is blocks 2 and 3.
    steps = [0.30, 0.10, 0.02, 0.05, 0.09]
    facts = diagnosed([0.0] * 5, added(steps))
    assert choose_layers(facts, "angle", 3).sources == (0, 1, 4)
    # Growing back, block 3 (0.05) goes in before block 2 (0.02).
    assert growth_order(facts, "angle", 3) == [0, 1, 4, 3, 2]
    assert choose_layers(facts, "angle", 5).sources == (0, 1, 2, 3, 4)
    assert choose_layers(facts, "angle", 1).sources == (0,)
    assert choose_layers(facts, "angle", 3, pinned=3).sources == (0, 1, 2)
    # The last layer stays, though the run without it would turn less.
    falling = [0.30, 0.20, 0.10, 0.05, 0.02]
    facts = diagnosed([0.0] * 5, added(falling))
    assert choose_layers(facts, "angle", 3).sources == (0, 1, 4)


def added(steps: list[float]) -> list[list[float]]:
    """Return the angles between layers where those of single ones add up."""
    ends = range(len(steps) + 1)
    return [[sum(steps[low:high]) for high in ends] for low in ends]


def test_several_runs_are_those_with_the_least_sum() -> None:
    torch.manual_seed(0)
    points = torch.randn(10, 4, dtype=torch.float64).cumsum(0)
    angles = torch.cdist(points, points).tolist()
    facts = diagnosed([0.0] * 9, angles)
    for gaps in (1, 2, 3):
        for kept in range(2, 10):
            # By definition: every way to leave so many of the layers 1 to 7 out.
            sums = {
                left_out: sum(angles[start][stop] for start, stop in runs)
                for left_out in itertools.combinations(range(1, 8), 9 - kept)
                if len(runs := runs_of(left_out)) <= gaps
            }
            least = min(sums, key=lambda layers: sums[layers])
            actual = choose_layers(facts, "angle", kept, gaps=gaps).sources
            assert sorted({*range(9)} - {*least}) == list(actual)
            order = growth_order(facts, "angle", kept, gaps=gaps)
            assert sorted(order) == list(range(9))
            # Each layer that grows back is the end of a run, the one that leaves the least turn.
            for number in range(kept, 9):
                sums = {}
                missing = sorted(order[number:])
                for start, stop in runs_of(missing):
                    for layer in {start, stop - 1}:
                        rest = runs_of([other for other in missing if other != layer])
                        sums[layer] = sum(angles[low][high] for low, high in rest)
                assert sums[order[number]] == pytest.approx(min(sums.values()))


def runs_of(layers: Sequence[int]) -> list[tuple[int, int]]:
    """Return the runs of neighbors that layers make, each with its end."""
    starts = [layer for layer in layers if layer - 1 not in layers]
    stops = [layer + 1 for layer in layers if layer + 1 not in layers]
    return list(zip(starts, stops, strict=True))


def test_the_laziest_run_is_contiguous() -> None:
    facts = diagnosed([5.0, 9.0, 1.0, 2.0, 7.0])
    assert choose_layers(facts, "lazy", 2).sources == (2, 3)
    assert choose_layers(facts, "lazy", 3).sources == (2, 3, 4)


@pytest.mark.usefixtures("as_users_run_it")
def test_what_is_refused() -> None:
    facts = diagnosed([1.0, 2.0])
    with pytest.raises(WakefulError, match="layers = 3: must be between 1 and the reference's 2"):
        choose_layers(facts, "rank", 3)
    with pytest.raises(WakefulError, match="pinned = 2 must be"):
        choose_layers(facts, "rank", 1, pinned=2)
    with pytest.raises(WakefulError, match="choose must be one of rank, mass"):
        choose_layers(facts, "size", 1)
    with pytest.raises(WakefulError, match="more than the reference's 2"):
        from_order([0, 1], 3, "rank")
    assert math.isfinite(facts.figures["rank"][0])
