"""Runs of layers tried with a bridge, against heirs that are built without them."""

import pytest
import torch

from helpers import some_tokens, tiny_decoder
from wakeful.config.schema import BridgeConfig
from wakeful.errors import WakefulError
from wakeful.inheritance import choice
from wakeful.inheritance.blocks import inherit_blocks
from wakeful.inheritance.bridge import bridge
from wakeful.inheritance.choice import bridged_losses
from wakeful.inheritance.layers import LayerDiagnosis, LayerMap, diagnose_layers, growth_order

TEXT = some_tokens(9, 13)


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"bias": True, "scale_logits_by_layer": True, "mlp": "gelu", "tied": True},
        {"relaxed_prefix": 5},
    ],
    ids=str,
)
@pytest.mark.parametrize("pinned", [0, 2])
def test_a_tried_run_has_the_loss_of_the_heir_without_it(
    shape: dict, pinned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "_STRIDE", 1)
    reference = tiny_decoder(num_layers=7, **shape)
    before = {name: p.clone() for name, p in reference.named_parameters()}
    options = BridgeConfig(ridge=1e-2)
    actual = bridged_losses(reference, TEXT, 3, options, pinned=pinned)
    assert list(actual) == list(range(max(1, pinned), 4))
    for name, parameter in reference.named_parameters():
        assert torch.equal(parameter, before[name]), name
    for start, loss in actual.items():
        layers = LayerMap((*range(start), *range(start + 3, 7)), "named")
        heir = inherit_blocks(reference, layers)
        bridge(heir, reference, layers, TEXT[:5], options)
        with torch.no_grad():
            expected = heir.loss(TEXT[5:, :-1], TEXT[5:, 1:])
        assert loss == pytest.approx(expected.item(), rel=1e-5)


def test_documents_of_a_row_do_not_see_each_other() -> None:
    reference = tiny_decoder(num_layers=5)
    numbers = torch.arange(TEXT.shape[1]).expand(len(TEXT), -1) // 4
    actual = bridged_losses(reference, TEXT, 2, BridgeConfig(), documents=numbers)
    for start, loss in actual.items():
        layers = LayerMap((*range(start), *range(start + 2, 5)), "named")
        heir = inherit_blocks(reference, layers)
        bridge(heir, reference, layers, TEXT[:-4], BridgeConfig(), documents=numbers[:-4])
        with torch.no_grad():
            logits = heir(TEXT[-4:, :-1], documents=numbers[-4:, :-1]).flatten(0, 1)
            expected = torch.nn.functional.cross_entropy(logits, TEXT[-4:, 1:].flatten())
        assert loss == pytest.approx(expected.item(), rel=1e-5)


def test_runs_are_tried_in_mixed_precision_with_the_matrix_of_each() -> None:
    reference = tiny_decoder(num_layers=7).float()
    context = torch.autocast("cpu", dtype=torch.bfloat16)
    exact = bridged_losses(reference, TEXT, 3, BridgeConfig())
    mixed = bridged_losses(reference, TEXT, 3, BridgeConfig(), autocast=context)
    assert mixed == pytest.approx(exact, rel=0.01)
    assert mixed != exact
    again = bridged_losses(reference, TEXT, 3, BridgeConfig(), autocast=context)
    assert mixed == again


def test_every_second_start_is_tried_and_the_neighbors_of_the_best() -> None:
    reference = tiny_decoder(num_layers=10)
    actual = bridged_losses(reference, TEXT, 2, BridgeConfig())
    assert set(range(1, 8, 2)) <= actual.keys()
    best = min((start for start in actual if start % 2), key=lambda start: actual[start])
    assert set(actual) == set(range(1, 8, 2)) | {best - 1, best + 1} & set(range(1, 8))


def test_the_run_of_the_least_loss_is_left_out_and_grows_back_by_angle() -> None:
    steps = [0.3, 0.1, 0.5, 0.2, 0.4, 0.1]
    angles = [[sum(steps[low:high]) for high in range(7)] for low in range(7)]
    names: tuple[str, ...] = ("rank", "mass", "influence", "angle")
    figures = dict.fromkeys(names, steps)
    facts = LayerDiagnosis(figures, angles, {1: 3.0, 3: 2.0, 2: 2.5})
    assert sorted(growth_order(facts, "bridge", 4)[:4]) == [0, 1, 2, 5]
    assert growth_order(facts, "bridge", 4) == [0, 1, 2, 5, 4, 3]
    assert growth_order(LayerDiagnosis(figures, angles), "bridge", 6) == list(range(6))


def test_what_cannot_be_tried_is_refused() -> None:
    reference = tiny_decoder()
    with pytest.raises(WakefulError, match="no run of 3 layers fits between the ends of 4"):
        bridged_losses(reference, TEXT, 3, BridgeConfig())
    with pytest.raises(WakefulError, match="leave none to solve on"):
        bridged_losses(reference, TEXT[:4], 2, BridgeConfig())
    with pytest.raises(WakefulError, match="its layers read from each other"):
        bridged_losses(tiny_decoder(route="resformer"), TEXT, 2, BridgeConfig())
    with pytest.raises(WakefulError, match=r"model\.placement = post"):
        bridged_losses(tiny_decoder(placement="post"), TEXT, 2, BridgeConfig())


@pytest.mark.slow
def test_bridging_trying_and_diagnosing_say_how_far_they_are() -> None:
    reference, passed = tiny_decoder(num_layers=6), list[tuple[int, int]]()

    def heard(done: int, total: int) -> None:
        passed.append((done, total))

    layers = LayerMap((0, 3), "first")
    bridge(
        inherit_blocks(reference, layers), reference, layers, TEXT, BridgeConfig(), progress=heard
    )
    assert passed == [(layer, 6) for layer in range(7)]
    passed.clear()
    tried = bridged_losses(reference, TEXT, 2, BridgeConfig(), progress=heard)
    assert [done for done, _ in passed] == [*range(len(tried) + 1)]
    assert passed[-1] == (len(tried), len(tried))
    passed.clear()
    diagnose_layers(reference, TEXT[:3].tolist(), heard)
    assert passed == [(0, 3), (1, 3), (2, 3), (3, 3)]
