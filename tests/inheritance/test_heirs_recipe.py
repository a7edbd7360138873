"""The recipe: rounds, parity, baselines, and going on where it was cut off."""

import contextlib
import dataclasses
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest
import torch
from safetensors.torch import load_file

from inheritance.references import reference, text, trained
from wakeful.config.keywords import options_from
from wakeful.config.schema import BridgeConfig, DataConfig, HealConfig, OptimizerConfig, TrainConfig
from wakeful.data.order import Batches
from wakeful.data.preparing import prepare_data
from wakeful.data.tokens import PreparedData
from wakeful.errors import Interrupted, WakefulError
from wakeful.inheritance.blocks import inherit_blocks
from wakeful.inheritance.bridge import bridge
from wakeful.inheritance.layers import LayerMap
from wakeful.inheritance.options import InheritOptions
from wakeful.inheritance.outcome import compare_arms, group_by_arm, loss_curve
from wakeful.inheritance.plan import make_recipe
from wakeful.inheritance.recipe import Recipe
from wakeful.inheritance.rounds import BASELINES, StageRunner, check_stages
from wakeful.inheritance.stages import FinishedStages
from wakeful.loading.load import read_decoder
from wakeful.loading.model import Model
from wakeful.runs import checkpoint
from wakeful.runs.run import Run
from wakeful.terminal.display import Display

__all__ = ["reference", "text", "trained"]
IMPOSSIBLE = -1.0
"""A reference's loss that no heir reaches."""


@contextlib.contextmanager
def quietly(name: str) -> Iterator[Display]:
    yield Display()


def carry_out(*args, **kwargs) -> FinishedStages:
    return StageRunner(*args, **kwargs).carry_out()


@pytest.fixture
def reference_model(reference: Run) -> Model:
    return read_decoder(reference.path)


def recipe_for(reference: Run, text: Path, **over: object) -> Recipe:
    tokenizer = read_decoder(reference.path).wakeful_tokenizer
    data = prepare_data(str(text), tokenizer=tokenizer, validation_fraction=0.1)
    recipe = Recipe(
        reference=str(reference.path),
        rule="first",
        layers=(0, 1),
        order=(0, 1, 2, 3),
        data=DataConfig(source=str(data.folder)),
        optimizer=OptimizerConfig(lr=1e-3, final_lr=1e-4, warmup_steps=1),
        train=TrainConfig(steps=4, batch_size=2, length=16, eval_every=2, checkpoint_every=3,
                          keep_checkpoints=1, device="cpu"),
    )  # fmt: skip
    return dataclasses.replace(recipe, **over)


def weights(run: Run) -> dict[str, torch.Tensor]:
    return load_file(checkpoint.newest_checkpoint(run.checkpoints) / "model.safetensors")


def everything(outcome: FinishedStages) -> dict[str, dict[str, torch.Tensor]]:
    return {
        finished.stage.name: weights(finished.run)
        for finished in (*outcome.rounds, *outcome.baselines)
    }


def same(first: FinishedStages, second: FinishedStages) -> None:
    actual, expected = everything(first), everything(second)
    assert actual.keys() == expected.keys()
    for name, tensors in actual.items():
        for key, tensor in tensors.items():
            assert torch.equal(tensor, expected[name][key]), f"{name}: {key}"
    for a, b in zip(
        (*first.rounds, *first.baselines), (*second.rounds, *second.baselines), strict=True
    ):
        assert a.loss == b.loss


@pytest.mark.slow
def test_it_grows_until_parity_and_no_further(
    reference: Run, text: Path, reference_model: Model, tmp_path: Path
) -> None:
    recipe = recipe_for(reference, text, grow=1, rounds=3)
    never = carry_out(
        recipe, reference_model.decoder(), loss=IMPOSSIBLE, out=tmp_path / "a", display=quietly
    )
    assert [finished.stage.layers for finished in never.rounds] == [(0, 1), (0, 1, 2), (0, 1, 2, 3)]
    target = never.rounds[1].loss
    assert never.rounds[0].loss > target
    # A loss that is met exactly is parity.
    met = carry_out(
        recipe, reference_model.decoder(), loss=target, out=tmp_path / "b", display=quietly
    )
    assert [finished.stage.name for finished in met.rounds] == ["heir-2", "heir-3"]
    beyond = dataclasses.replace(recipe, until="budget", rounds=2)
    target = never.rounds[0].loss  # met at once
    all_rounds = carry_out(
        beyond, reference_model.decoder(), loss=target, out=tmp_path / "c", display=quietly
    )
    assert len(all_rounds.rounds) == 2


@pytest.mark.slow
def test_a_round_restarts_from_the_reference(
    reference: Run, text: Path, reference_model: Model, tmp_path: Path
) -> None:
    recipe = recipe_for(reference, text, grow=1, rounds=2)
    keep = dataclasses.replace(recipe, train=dataclasses.replace(recipe.train, keep_checkpoints=9))
    again = carry_out(
        keep, reference_model.decoder(), loss=IMPOSSIBLE, out=tmp_path / "a", display=quietly
    )
    start = load_file(again.rounds[1].run.checkpoints / "step-00000000" / "model.safetensors")
    name = "blocks.1.mlp.up.weight"
    assert torch.equal(start[name], reference_model.decoder().get_parameter(name))
    assert [arm for arm, _ in group_by_arm(again)] == ["heir-2", "heir-3"]
    points = loss_curve(again.rounds[1:])
    assert [point.step for point in points] == [0, 2, 4]
    assert [point.tokens for point in points] == [0, 64, 128]


@pytest.mark.slow
@pytest.mark.parametrize("bos", [False, True])
def test_heirs_are_solved_on_windows_as_training_has_them(
    reference: Run, text: Path, reference_model: Model, tmp_path: Path, bos: bool
) -> None:
    recipe = recipe_for(reference, text, bridge=BridgeConfig(tokens=2048))
    source = dataclasses.replace(recipe.data, bos=bos, max_tokens=1000)
    recipe = dataclasses.replace(
        recipe, data=source, train=dataclasses.replace(recipe.train, keep_checkpoints=9)
    )
    done = carry_out(
        recipe, reference_model.decoder(), loss=IMPOSSIBLE, out=tmp_path / "a", display=quietly
    )
    data = PreparedData.open(source.source)
    tokens = torch.tensor(data.train.tokens[:992].tolist()).view(62, 16)
    if bos:
        tokens[:, 0] = data.tokenizer.start_token
    layers = LayerMap((0, 1), "first")
    heir = inherit_blocks(reference_model.decoder(), layers)
    bridge(heir, reference_model.decoder(), layers, tokens, recipe.bridge)
    start = load_file(done.rounds[0].run.checkpoints / "step-00000000" / "model.safetensors")
    name = "blocks.1.mlp.down.weight"
    torch.testing.assert_close(start[name], heir.get_parameter(name).data)


@pytest.mark.slow
def test_baselines_take_the_same_steps_and_tokens(
    reference: Run, text: Path, reference_model: Model, tmp_path: Path
) -> None:
    names = ("random", "reference")
    recipe = recipe_for(reference, text, baselines=names)
    outcome = carry_out(
        recipe, reference_model.decoder(), loss=IMPOSSIBLE, out=tmp_path, display=quietly
    )
    actual = dict(group_by_arm(outcome))
    assert list(actual) == ["heir-2", *names]
    for stages in actual.values():
        assert sum(finished.summary.tokens for finished in stages) == 4 * 2 * 16
        assert [finished.run.header.status for finished in stages] == ["done"] * len(stages)
    assert {name: stages[0].run.config.model.num_layers for name, stages in actual.items()} == {
        "heir-2": 2, "random": 2, "reference": 4
    }  # fmt: skip
    batches = {name: stages[-1].run.config.train.seed for name, stages in actual.items()}
    assert set(batches.values()) == {0}
    # Every model was evaluated on the same windows.
    windows = pl.read_parquet(outcome.rounds[0].run.path / "validation.parquet")
    lines = {arm.arm: arm for arm in compare_arms(outcome, windows, IMPOSSIBLE)}
    assert set(lines) == set(actual)
    assert lines["reference"].start_loss < lines["heir-2"].start_loss  # it begins as it was
    random = lines["random"]
    assert random.minus_heir == pytest.approx(random.loss - outcome.rounds[0].loss, abs=1e-6)


class Killed(BaseException):
    """Exception that ends a run in the middle of a step, like a power failure."""


@pytest.fixture(scope="module")
def uncut(
    trained: tuple[Path, Run], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Recipe, FinishedStages]:
    """Give 12 steps: two rounds of growth and, after 8, random weights."""
    text, reference = trained
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WAKEFUL_CACHE", str(text.parent / "cache"))
        recipe = recipe_for(reference, text, grow=1, rounds=2, baselines=("random",))
        decoder, out = read_decoder(reference.path).decoder(), tmp_path_factory.mktemp("uncut")
        return recipe, carry_out(recipe, decoder, loss=IMPOSSIBLE, out=out / "a", display=quietly)


@pytest.mark.slow
@pytest.mark.parametrize("stop", [2, 5, 7, 9, 11])
def test_an_interrupted_recipe_ends_as_if_it_had_not_been(
    uncut: tuple[Recipe, FinishedStages], reference_model: Model, tmp_path: Path, stop: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    recipe, uninterrupted = uncut
    real, num_batches = Batches.batch, [0]
    out = tmp_path / "b c"

    def batch(self: Batches, step: int) -> torch.Tensor:
        num_batches[0] += 1
        if num_batches[0] == stop:
            if stop % 2:
                raise Killed
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(Batches, "batch", batch)
        with pytest.raises((Killed, Interrupted)) as ended:
            carry_out(recipe, reference_model.decoder(), loss=IMPOSSIBLE, out=out, display=quietly)
    if not stop % 2:
        assert f"wakeful inherit --resume '{out}'" in str(ended.value)
    cut = carry_out(recipe, reference_model.decoder(), loss=IMPOSSIBLE, out=out, display=quietly)
    same(uninterrupted, cut)


@pytest.mark.slow
def test_a_recipe_cut_between_its_rounds_goes_on(
    reference: Run, text: Path, reference_model: Model, tmp_path: Path
) -> None:
    recipe = recipe_for(reference, text, grow=1, rounds=2)
    uninterrupted = carry_out(
        recipe, reference_model.decoder(), loss=IMPOSSIBLE, out=tmp_path / "a", display=quietly
    )
    first_round = dataclasses.replace(recipe, rounds=1)
    carry_out(
        first_round, reference_model.decoder(), loss=IMPOSSIBLE, out=tmp_path / "b", display=quietly
    )
    stamp = (tmp_path / "b/heir-2/summary.json").stat().st_mtime_ns
    cut = carry_out(
        recipe, reference_model.decoder(), loss=IMPOSSIBLE, out=tmp_path / "b", display=quietly
    )
    same(uninterrupted, cut)
    assert (tmp_path / "b/heir-2/summary.json").stat().st_mtime_ns == stamp


def test_recipes_that_cannot_be(reference: Run, text: Path) -> None:
    def refused(message: str, **over: object) -> None:
        with pytest.raises(WakefulError, match=message):
            recipe_for(reference, text, **over).check(4)

    recipe_for(reference, text, grow=1, rounds=3).check(4)
    refused("all 4 of the reference before round 4", grow=1, rounds=4)
    refused("have no order to grow in", grow=1, rounds=2, order=(), rule="named")
    refused("named twice", baselines=("random", "random"))
    refused("wants layer 4", layers=(0, 4))


@pytest.mark.parametrize(("total", "depths"), [(8, [5, 7, 8]), (9, [5, 7, 9]), (6, [5, 6])])
def test_the_last_round_takes_what_is_left(
    total: int, depths: list[int], reference: Run, text: Path
) -> None:
    options = InheritOptions(choose="first", layers=5, grow=2)
    data = prepare_data(str(text), tokenizer=read_decoder(reference.path).wakeful_tokenizer)
    recipe = make_recipe("runs/reference", options, total, data, None)
    recipe.check(total)
    assert [recipe.depth(number) for number in range(recipe.rounds)] == depths
    assert recipe.layer_map(recipe.rounds - 1).sources == tuple(range(total))


@pytest.mark.parametrize("steps", [1, 9, 101, 199, 204])
def test_a_round_is_evaluated_after_every_fifth_of_its_steps(
    steps: int, reference: Run, text: Path
) -> None:
    data = PreparedData.open(recipe_for(reference, text).data.source)
    options = options_from(InheritOptions, {"steps": steps, "choose": "first"})
    train = make_recipe("runs/reference", options, 4, data, None).train
    places = [*range(train.eval_every, steps, train.eval_every), steps]
    assert len(places) == min(5, steps)
    # A straight line through the last two says something only where they lie apart.
    assert places[-1] - places[-2:][0] >= (steps > 1) * steps // 10


@pytest.mark.parametrize("name", BASELINES)
def test_every_baseline_is_checked_without_its_weights(reference: Run, name: str) -> None:
    decoder = read_decoder(reference.path).decoder()
    recipe = Recipe(
        reference=str(reference.path), rule="first", layers=(0, 1), baselines=(name,),
        train=TrainConfig(steps=4, length=16), heal=HealConfig(),
    )  # fmt: skip
    config = check_stages(recipe, decoder)
    assert config.model == decoder.config
    for odd, message in (
        (dataclasses.replace(recipe, data=DataConfig(validation_fraction=2.0)), "fraction"),
        (dataclasses.replace(recipe, optimizer=OptimizerConfig(name="adamm")), "adamm"),
        (dataclasses.replace(recipe, normalizer="softmax2"), "softmax2"),
    ):
        with pytest.raises(WakefulError, match=message):
            check_stages(odd, decoder)


@pytest.mark.slow
def test_growth_from_the_reference_costs_all_of_its_rounds(
    reference: Run, text: Path, reference_model: Model, tmp_path: Path
) -> None:
    recipe = recipe_for(reference, text, grow=1, rounds=3, baselines=("random",))
    recipe.check(4)
    check_stages(recipe, reference_model.decoder())
    recipe = dataclasses.replace(
        recipe, train=dataclasses.replace(recipe.train, keep_checkpoints=99)
    )
    outcome = carry_out(
        recipe, reference_model.decoder(), loss=IMPOSSIBLE, out=tmp_path / "a", display=quietly
    )
    windows = pl.read_parquet(outcome.rounds[0].run.path / "validation.parquet")
    lines = {arm.arm: arm for arm in compare_arms(outcome, windows, IMPOSSIBLE)}
    tokens = 4 * 2 * 16  # of a round
    spent = {name: (arm.steps, arm.tokens, arm.all_steps, arm.all_tokens)
             for name, arm in lines.items()}  # fmt: skip
    assert spent == {
        "heir-2": (4, tokens, 4, tokens), "heir-3": (4, tokens, 8, 2 * tokens),
        "heir-4": (4, tokens, 12, 3 * tokens), "random": (4, tokens, 4, tokens),
    }  # fmt: skip
