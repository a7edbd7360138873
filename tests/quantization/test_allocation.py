"""Formats of fused layers within a number of bytes, against every choice there is."""

import itertools
import random

import pytest

from wakeful.errors import WakefulError
from wakeful.quantization import allocation
from wakeful.quantization.allocation import FormatChoice, Frontier, lower_bound
from wakeful.quantization.groups import fused_groups


def some_groups(seed: int, unit: int = 8) -> list[list[FormatChoice]]:
    draw = random.Random(seed)

    def choice() -> FormatChoice:
        return FormatChoice(unit * draw.randint(1, 40), draw.expovariate(1.0))

    return [[choice() for _ in range(draw.randint(1, 4))] for _ in range(5)]


def every(groups: list[list[FormatChoice]]) -> list[tuple[int, float]]:
    return [
        (sum(each.bytes for each in chosen), sum(each.cost for each in chosen))
        for chosen in itertools.product(*groups)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_no_choice_of_formats_costs_less(seed: int) -> None:
    groups = some_groups(seed)
    totals, frontier = every(groups), Frontier(groups)
    assert (frontier.min_bytes, frontier.max_bytes) == (min(totals)[0], max(totals)[0])
    for budget in range(frontier.min_bytes, frontier.max_bytes + 20, 7):
        best = min(cost for size, cost in totals if size <= budget)
        found = frontier.within_bytes(budget)
        picked = [group[n] for group, n in zip(groups, found.choice_indices, strict=True)]
        assert found.bytes == sum(each.bytes for each in picked) <= budget
        assert found.cost == pytest.approx(best)
        assert found.bound <= best + 1e-9
        least = min(size for size, cost in totals if cost <= best + 1e-12)
        assert frontier.within_cost(best + 1e-12).bytes == least
    curve = frontier.curve()
    assert curve == sorted(curve)
    assert curve[-1][1] == pytest.approx(min(cost for _, cost in totals))


def test_bytes_that_share_no_unit_are_rounded_up(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, exact = some_groups(3, unit=1_000_003), Frontier(some_groups(3, unit=1_000_003))
    monkeypatch.setattr(allocation, "_UNITS", 50)
    coarse = Frontier(groups)
    for budget in range(exact.min_bytes, exact.max_bytes, exact.max_bytes // 9):
        found, best = coarse.within_bytes(budget), exact.within_bytes(budget)
        assert found.bytes <= budget
        assert best.cost <= found.cost
    assert coarse.within_bytes(exact.max_bytes).cost == pytest.approx(
        exact.within_bytes(exact.max_bytes).cost
    )


def test_the_bound_is_met_where_choices_are_many() -> None:
    groups = [[FormatChoice(40 + 10 * n, 2.0**-n / (g + 1)) for n in range(6)] for g in range(60)]
    found = Frontier(groups).within_bytes(3_600)
    assert found.bound <= found.cost <= 1.01 * found.bound
    assert lower_bound(groups, 10**6) == pytest.approx(sum(group[-1].cost for group in groups))


def test_a_budget_below_the_smallest_formats_is_refused() -> None:
    with pytest.raises(WakefulError, match="too few: in their smallest formats"):
        Frontier(
            [[FormatChoice(10, 1.0)], [FormatChoice(20, 0.0), FormatChoice(5, 3.0)]]
        ).within_bytes(14)


def test_layers_that_an_engine_fuses_are_groups() -> None:
    llama = [f"model.layers.0.{each}" for each in (
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
        "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
    )]  # fmt: skip
    groups = fused_groups([*llama, "lm_head"])
    assert groups == [tuple(llama[:3]), (llama[3],), tuple(llama[4:6]), (llama[6],), ("lm_head",)]
    experts = [f"model.layers.1.mlp.experts.{kind}.{n}" for kind in ("gate_up_proj", "down_proj")
               for n in range(2)]  # fmt: skip
    shared = [f"model.layers.1.mlp.shared_expert.{kind}_proj" for kind in ("gate", "up", "down")]
    assert fused_groups([*experts, *shared]) == [tuple(experts), tuple(shared[:2]), (shared[2],)]
    ours = [f"blocks.2.{each}" for each in (
        "attention.query", "attention.key", "attention.value", "attention.out",
        "mlp.gate", "mlp.up", "mlp.down",
    )]  # fmt: skip
    assert fused_groups(ours) == [tuple(ours[:3]), (ours[3],), tuple(ours[4:6]), (ours[6],)]
