"""A recipe carried out: inherit, train, evaluate, grow until parity (algorithm 1), and baselines.

What has been done is read from the runs' folders alone: a recipe continues wherever it was cut off.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from wakeful.config.tables import to_table
from wakeful.display import Passed, Shown
from wakeful.errors import Interrupted, WakefulError
from wakeful.heirs.baselines import Setting, baseline_of, folder_of
from wakeful.heirs.bridge import Bridged
from wakeful.heirs.inherit import grow, inherit
from wakeful.heirs.layers import LayerMap
from wakeful.heirs.narrow import kept_of
from wakeful.heirs.recipe import Recipe
from wakeful.heirs.solving import bridges, narrowed_reference
from wakeful.heirs.stages import (
    FinishedStage,
    FinishedStages,
    TrainingStage,
    half_way,
    learning,
    setting_of,
    stage_config,
)
from wakeful.loading.load import read_decoder
from wakeful.model.decoder import Decoder
from wakeful.runs.run import Run, refuse_link
from wakeful.training.loop import Initial, train
from wakeful.world import is_lost, joined, lost, started_as


def carry_out(
    recipe: Recipe,
    reference: Decoder,
    *,
    loss: float,
    out: Path,
    shown: Shown,
    resume: Path | None = None,
) -> FinishedStages:
    """Train the heirs and the baselines below `out`, going on with what is there.

    `loss` is the reference's on the same validation set: parity is a final loss at or under it.
    `resume` is the inheritance's folder, where it is not `out`.

    Raises:
        Interrupted: a signal ended a run, which is saved.
    """
    with _resumable(resume or out):
        rounds = tuple(_rounds(recipe, reference, loss, out, shown))
        heirs = [each.stage for each in rounds]
        baselines = tuple(
            _finished(recipe, reference, stage, out, shown)
            for name in recipe.baselines
            for stage in _stages(recipe, reference, name, heirs, out)
        )
    return FinishedStages(rounds, baselines)


def train_heirs(
    recipe: Recipe, reference: Decoder, *, loss: float, out: Path, shown: Shown, resume: Path
) -> None:
    """Do the part of `carry_out` that is the heirs'."""
    with _resumable(resume):
        for _ in _rounds(recipe, reference, loss, out, shown):
            pass


def train_baseline(
    recipe: Recipe,
    name: str,
    reference: Decoder,
    *,
    loss: float,
    out: Path,
    shown: Shown,
    resume: Path,
) -> None:
    """Do the part of `carry_out` that is one baseline's.

    Of several heirs the last decides its depth and steps, so those must be trained; a single one
    need not be.
    """
    with _resumable(resume):
        if recipe.most_heirs > 1:
            heirs = [each.stage for each in _rounds(recipe, reference, loss, out, shown)]
        else:
            heirs = [_round(recipe, reference, 0, None)]
        for stage in _stages(recipe, reference, name, heirs, out):
            _finished(recipe, reference, stage, out, shown)


@contextmanager
def _resumable(out: Path) -> Iterator[None]:
    """Say how to go on where a signal ends a run."""
    starter = "wakeful" if started_as()[1] == 1 else "torchrun [as before] -m wakeful"
    again = f"continue with: {starter} inherit --resume {out}"
    try:
        yield
    except Interrupted:
        raise Interrupted("stopped, and what was trained is saved", again) from None
    except WakefulError as error:
        if error.__cause__ is None or not is_lost(error.__cause__):
            raise
        raise WakefulError(lost(again)) from error.__cause__


def _drops(recipe: Recipe, reference: Decoder, out: Path, shown: Shown) -> Iterator[FinishedStage]:
    """Train an heir after each drop, from the one before it."""
    total, before, done = reference.config.num_layers, None, 0
    for layers, steps in recipe.parts(total):
        stage = TrainingStage(
            name=f"heir-{len(layers)}",
            arm="heir",
            steps=steps,
            offset=done,
            start=partial(_dropped, recipe, reference, layers, before),
            layers=layers.sources,
            distill=recipe.healing(layers, total),
            lora=recipe.heal.lora,
            bridge=partial(bridges, recipe, reference, layers, *_had(recipe, before)),
        )
        before = _finished(recipe, reference, stage, out, shown)
        done += steps
        yield before


def _had(
    recipe: Recipe, before: FinishedStage | None
) -> tuple[LayerMap | None, tuple[Bridged, ...]]:
    """Return the layers and bridges of the heir that another one starts from."""
    if before is None:
        return None, ()
    return LayerMap(before.stage.layers, recipe.rule), before.bridges


def _dropped(
    recipe: Recipe,
    reference: Decoder,
    layers: LayerMap,
    before: FinishedStage | None,
    progress: Passed,
) -> Decoder:
    if before is None:
        return _heir(recipe, reference, layers, None, progress)
    student = read_decoder(before.run.path, dtype="auto").decoder()
    had = LayerMap(before.stage.layers, recipe.rule)
    return inherit(student, layers.within(had), seed=recipe.train.seed)


def _rounds(
    recipe: Recipe, reference: Decoder, loss: float, out: Path, shown: Shown
) -> Iterator[FinishedStage]:
    if recipe.drops > 1:
        yield from _drops(recipe, reference, out, shown)
        return
    spent = 0.0
    before: FinishedStage | None = None
    for number in range(recipe.rounds):
        stage = _round(recipe, reference, number, before)
        before = _finished(recipe, reference, stage, out, shown)
        yield before
        spent += before.summary.seconds
        if recipe.until == "parity" and before.loss <= loss:
            return
        if recipe.minutes and spent >= 60 * recipe.minutes:
            return


def _round(
    recipe: Recipe, reference: Decoder, number: int, before: FinishedStage | None
) -> TrainingStage:
    """Return an heir's stage; it grows from the one before it where the recipe says so."""
    steps, layers = recipe.train.steps, recipe.layer_map(number)
    grows_on = recipe.grow_from == "student" and recipe.rounds > 1
    grown = before if grows_on else None
    return TrainingStage(
        name=f"heir-{len(layers)}",
        arm="heir" if grows_on else f"heir-{len(layers)}",
        steps=steps,
        offset=number * steps if grown else 0,
        start=partial(_heir, recipe, reference, layers, grown),
        layers=layers.sources,
        distill=recipe.healing(layers, reference.config.num_layers),
        lora=recipe.heal.lora,
        bridge=partial(bridges, recipe, reference, layers, *_had(recipe, grown)),
    )


def _heir(
    recipe: Recipe,
    reference: Decoder,
    layers: LayerMap,
    grown: FinishedStage | None,
    progress: Passed,
) -> Decoder:
    if grown is not None:
        student = read_decoder(grown.run.path, dtype="auto").decoder()
        before = LayerMap(grown.stage.layers, recipe.rule)
        return grow(student, before, reference, layers, copy=recipe.copy, seed=recipe.train.seed)
    donor = (
        narrowed_reference(recipe, reference, recipe.width, progress) if recipe.width else reference
    )
    return inherit(
        donor, layers, copy=recipe.copy, route=recipe.route, normalizer=recipe.normalizer,
        seed=recipe.train.seed,
    )  # fmt: skip


def _stages(
    recipe: Recipe, reference: Decoder, name: str, heirs: Sequence[TrainingStage], out: Path
) -> Iterator[TrainingStage]:
    """A baseline's stages: the last heir's depth, and as many steps as went into it, so many times
    as many, or as many as all rounds took.
    """
    last = heirs[-1]
    into_it, in_all = last.offset + last.steps, sum(each.steps for each in heirs)
    setting = setting_of(recipe, reference, LayerMap(last.layers, recipe.rule))
    steps = in_all if baseline_of(name).all_rounds else into_it
    yield from _baseline(recipe, name, setting, steps, out)


def _baseline(
    recipe: Recipe, name: str, setting: Setting, steps: int, out: Path
) -> Iterator[TrainingStage]:
    baseline, folder = baseline_of(name), folder_of(name)
    then = baseline.second
    steps *= baseline.times

    def start(progress: Passed) -> Decoder:
        return baseline.start(dataclasses.replace(setting, progress=progress))

    if then is None:
        lesson, lora = learning(recipe, baseline, setting)
        solved = partial(bridges, recipe, setting.reference, setting.layers, None, ())
        yield TrainingStage(
            folder, name, steps, 0, start, distill=lesson, lora=lora,
            layers=setting.layers.sources if baseline.bridged else (),
            bridge=solved if baseline.bridged else None,
        )  # fmt: skip
        return
    before, half = out / f"{folder}-1", half_way(recipe, steps)
    yield TrainingStage(before.name, name, half, 0, start)
    yield TrainingStage(
        folder, name, steps - half, half,
        lambda _: then(setting, read_decoder(before, dtype="auto").decoder()),
    )  # fmt: skip


def _finished(
    recipe: Recipe, reference: Decoder, stage: TrainingStage, out: Path, shown: Shown
) -> FinishedStage:
    """Return the stage's run: the one that is there, continued if need be, or a new one."""
    place = out / stage.name
    refuse_link(place)
    with joined() as world:
        world.meet()  # no process looks while another begins the run
        there = (place / "run.json").is_file()
        done = there and Run.open(place).header.status == "done"
        there, done = world.gather([there, done])[0]
    if there:
        run = Run.open(place)
        if not done:
            with shown(stage.name) as show:
                run = train(run.config, place, resume=True, show=show)
        return FinishedStage(stage, run)
    with shown(stage.name) as show:
        decoder = stage.start(partial(show.count, "narrowing: layers passed"))
    origin = {
        "reference": recipe.reference,
        "arm": stage.arm,
        "offset": stage.offset,
        "layers": list(stage.layers),
    }
    if recipe.width and stage.layers:  # an heir, whose card and page say what the shares came to
        origin["width"] = to_table(kept_of(decoder.config, reference.config))
    if stage.bridge is not None:
        with shown(stage.name) as show:
            passed = partial(show.count, "bridging the layers left out: layers passed")
            origin["bridges"] = [to_table(found) for found in stage.bridge(decoder, passed)]
    config = stage_config(recipe, stage, decoder)
    with shown(stage.name) as show:
        run = train(config, place, initial=Initial(decoder, origin), show=show)
    return FinishedStage(stage, run)
