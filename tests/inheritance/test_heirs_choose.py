"""Choosing layers: every figure by its definition, every rule by hand."""

import itertools
from collections.abc import Sequence

import pytest
import torch

from helpers import some_tokens, tiny_decoder
from wakeful.errors import WakefulError
from wakeful.inheritance.layers import LayerMap, diagnose_layers, from_order, growth_order
from wakeful.probes import exact

SEQUENCES = some_tokens(3, 15).tolist()


@pytest.mark.parametrize("depth", ["residual", "denseformer", "embedding_residual"])
def test_angles_are_those_of_the_definition(depth: str) -> None:
    """A block's input is what it receives: under a depth mix not the block before's output."""
    decoder = tiny_decoder(num_layers=3, depth=depth).eval()
    angles = diagnose_layers(decoder, SEQUENCES)
    ends: list[list[torch.Tensor]] = [[] for _ in range(4)]
    for layer, block in enumerate(decoder.blocks):
        block.register_forward_pre_hook(lambda _, args, layer=layer: ends[layer].append(args[0][0]))
    decoder.blocks[-1].register_forward_hook(lambda _, args, out: ends[3].append(out[0][0]))
    with torch.no_grad():
        for sequence in SEQUENCES:
            decoder(torch.tensor([sequence]))
    for low in range(4):
        for high in range(low + 1, 4):
            pairs = zip(ends[low], ends[high], strict=True)
            angle = [float(exact.angular_distance(a, b)) for a, b in pairs]
            assert angles[low][high] == pytest.approx(sum(angle) / 3)
    assert decoder.training is False


def choose_layers(angles: list[list[float]], num_layers: int, **how: int) -> LayerMap:
    return from_order(growth_order(angles, num_layers, **how), num_layers, "angle")


def test_the_run_over_which_the_stream_turns_least_is_dropped() -> None:
    # Angles of single blocks, added up along the depth: the least run of two is blocks 2 and 3.
    steps = [0.30, 0.10, 0.02, 0.05, 0.09]
    facts = added(steps)
    assert choose_layers(facts, 3).sources == (0, 1, 4)
    # Growing back, block 3 (0.05) goes in before block 2 (0.02).
    assert growth_order(facts, 3) == [0, 1, 4, 3, 2]
    assert choose_layers(facts, 5).sources == (0, 1, 2, 3, 4)
    assert choose_layers(facts, 1).sources == (0,)
    assert choose_layers(facts, 3, pinned=3).sources == (0, 1, 2)
    # The last layer stays, though the run without it would turn less.
    falling = [0.30, 0.20, 0.10, 0.05, 0.02]
    facts = added(falling)
    assert choose_layers(facts, 3).sources == (0, 1, 4)


def added(steps: list[float]) -> list[list[float]]:
    """Return the angles between layers where those of single ones add up."""
    ends = range(len(steps) + 1)
    return [[sum(steps[low:high]) for high in ends] for low in ends]


def test_several_runs_are_those_with_the_least_sum() -> None:
    torch.manual_seed(0)
    points = torch.randn(10, 4, dtype=torch.float64).cumsum(0)
    angles = torch.cdist(points, points).tolist()
    for gaps in (1, 2, 3):
        for num_layers in range(2, 10):
            # By definition: every way to leave so many of the layers 1 to 7 out.
            sums = {
                left_out: sum(angles[start][stop] for start, stop in runs)
                for left_out in itertools.combinations(range(1, 8), 9 - num_layers)
                if len(runs := runs_of(left_out)) <= gaps
            }
            best_layers = min(sums, key=lambda layers: sums[layers])
            actual = choose_layers(angles, num_layers, gaps=gaps).sources
            assert sorted({*range(9)} - {*best_layers}) == list(actual)
            order = growth_order(angles, num_layers, gaps=gaps)
            assert sorted(order) == list(range(9))
            # Each layer that grows back is the end of a run, the one that leaves the least turn.
            for number in range(num_layers, 9):
                sums = {}
                missing = sorted(order[number:])
                for start, stop in runs_of(missing):
                    for layer in {start, stop - 1}:
                        rest = runs_of(
                            [dropped_layer for dropped_layer in missing if dropped_layer != layer]
                        )
                        sums[layer] = sum(angles[low][high] for low, high in rest)
                assert sums[order[number]] == pytest.approx(min(sums.values()))


def runs_of(layers: Sequence[int]) -> list[tuple[int, int]]:
    """Return the runs of neighbors that layers make, each with its end."""
    starts = [layer for layer in layers if layer - 1 not in layers]
    stops = [layer + 1 for layer in layers if layer + 1 not in layers]
    return list(zip(starts, stops, strict=True))


@pytest.mark.usefixtures("as_users_run_it")
def test_what_is_refused() -> None:
    facts = added([1.0, 2.0])
    with pytest.raises(WakefulError, match="layers = 3: must be between 1 and the reference's 2"):
        choose_layers(facts, 3)
    with pytest.raises(WakefulError, match="pinned = 2 must be"):
        choose_layers(facts, 1, pinned=2)
    with pytest.raises(WakefulError, match="more than the reference's 2"):
        from_order([0, 1], 3, "angle")
