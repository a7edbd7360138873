"""Choosing layers: every figure by its definition, every rule by hand."""

import pytest
import torch

from helpers import some_tokens, tiny_decoder
from wakeful.errors import WakefulError
from wakeful.inheritance.layers import LayerMap, diagnose_layers, from_order, growth_order
from wakeful.probes import exact

SEQUENCES = some_tokens(3, 15).tolist()


@pytest.mark.parametrize("depth", ["residual", "denseformer"])
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


def choose_layers(angles: list[list[float]], num_layers: int) -> LayerMap:
    return from_order(growth_order(angles, num_layers), num_layers, "angle")


def test_the_run_over_which_the_stream_turns_least_is_dropped() -> None:
    # Angles of single blocks, added up along the depth: the least run of two is blocks 2 and 3.
    steps = [0.30, 0.10, 0.02, 0.05, 0.09]
    facts = added(steps)
    assert choose_layers(facts, 3).sources == (0, 1, 4)
    # Growing back, block 3 (0.05) goes in before block 2 (0.02).
    assert growth_order(facts, 3) == [0, 1, 4, 3, 2]
    assert choose_layers(facts, 5).sources == (0, 1, 2, 3, 4)
    assert choose_layers(facts, 1).sources == (0,)
    # The last layer stays, though the run without it would turn less.
    falling = [0.30, 0.20, 0.10, 0.05, 0.02]
    facts = added(falling)
    assert choose_layers(facts, 3).sources == (0, 1, 4)


def added(steps: list[float]) -> list[list[float]]:
    """Return the angles between layers where those of single ones add up."""
    ends = range(len(steps) + 1)
    return [[sum(steps[low:high]) for high in ends] for low in ends]


def test_the_run_is_the_one_with_the_least_angle_and_grows_back_from_its_ends() -> None:
    torch.manual_seed(0)
    points = torch.randn(10, 4, dtype=torch.float64).cumsum(0)
    angles = torch.cdist(points, points).tolist()
    for num_layers in range(2, 10):
        dropped = 9 - num_layers
        starts = range(1, 9 - dropped)
        start = min(starts, key=lambda first: angles[first][first + dropped])
        missing = [*range(start, start + dropped)]
        order = growth_order(angles, num_layers)
        assert order[:num_layers] == sorted({*range(9)} - {*missing})
        for layer in order[num_layers:]:
            # What grows back is an end of the run, the one that leaves the least turn.
            rests = {missing[0]: missing[1:], missing[-1]: missing[:-1]}
            turns = {end: angles[rest[0]][rest[-1] + 1] if rest else 0.0
                     for end, rest in rests.items()}  # fmt: skip
            assert turns[layer] == min(turns.values())
            missing.remove(layer)
        assert missing == []


@pytest.mark.usefixtures("as_users_run_it")
def test_what_is_refused() -> None:
    with pytest.raises(WakefulError, match="layers = 3 is more than the reference's 2"):
        choose_layers(added([1.0, 2.0]), 3)
    with pytest.raises(WakefulError, match="more than the reference's 2"):
        from_order([0, 1], 3, "angle")
