"""A recipe carried out: inherit, train, evaluate, grow until parity (algorithm 1), and baselines.

What has been done is read from the runs' folders alone: a recipe continues wherever it was cut off.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from wakeful.config.tables import to_table
from wakeful.display import Passed, Shown
from wakeful.errors import Interrupted, WakefulError
from wakeful.heirs.baselines import baseline_of, folder_of
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
from wakeful.runs.distributed import is_lost, joined, lost
from wakeful.runs.run import Run, is_done, refuse_link, run_at
from wakeful.training.loop import Initial, resume_command, train


@dataclass(frozen=True)
class Seed:
    """A recipe with one seed, whose runs lie below a folder."""

    recipe: Recipe
    reference: Decoder
    loss: float
    """The reference's, on the same validation set: parity is a final loss at or under it."""
    out: Path
    shown: Shown
    resume: Path | None = None
    """The inheritance's folder, where it is not `out`."""

    def carry_out(self) -> FinishedStages:
        """Train the heirs and the baselines, going on with what is there.

        Raises:
            Interrupted: a signal ended a run, which is saved.
        """
        with self._resumable():
            rounds = tuple(self._rounds())
            heirs = [each.stage for each in rounds]
            baselines = tuple(
                self._finished(stage)
                for name in self.recipe.baselines
                for stage in self._stages(name, heirs)
            )
        return FinishedStages(rounds, baselines)

    def first(self) -> TrainingStage:
        """Return the stage of the first heir."""
        return self._round(0, None)

    def _rounds(self) -> Iterator[FinishedStage]:
        recipe = self.recipe
        if recipe.drops > 1:
            yield from self._drops()
            return
        spent = 0.0
        before: FinishedStage | None = None
        for number in range(recipe.rounds):
            before = self._finished(self._round(number, before))
            yield before
            spent += before.summary.seconds
            if recipe.until == "parity" and before.loss <= self.loss:
                return
            if recipe.minutes and spent >= 60 * recipe.minutes:
                return

    def _drops(self) -> Iterator[FinishedStage]:
        """Train an heir after each drop, from the one before it."""
        before, done = None, 0
        for layers, steps in self.recipe.parts(self.reference.config.num_layers):
            before = self._finished(self._heir_stage(layers, before, "heir", steps, done))
            done += steps
            yield before

    def _round(self, number: int, before: FinishedStage | None) -> TrainingStage:
        """Return an heir's stage; it grows from the one before it where the recipe says so."""
        recipe, layers = self.recipe, self.recipe.layer_map(number)
        grows_on = recipe.grow_from == "student" and recipe.rounds > 1
        grown, steps = before if grows_on else None, recipe.train.steps
        arm = "heir" if grows_on else f"heir-{len(layers)}"
        return self._heir_stage(layers, grown, arm, steps, number * steps if grown else 0)

    def _heir_stage(
        self, layers: LayerMap, before: FinishedStage | None, arm: str, steps: int, offset: int
    ) -> TrainingStage:
        """Return the stage of an heir, which goes on from the one `before`, if any."""
        recipe, total = self.recipe, self.reference.config.num_layers
        had = (None, ()) if before is None else (self._layers(before), before.bridges)
        return TrainingStage(
            name=f"heir-{len(layers)}",
            arm=arm,
            steps=steps,
            offset=offset,
            start=partial(self._heir, layers, before),
            layers=layers.sources,
            learned=(recipe.healing(layers, total), recipe.heal.lora),
            bridge=partial(bridges, recipe, self.reference, layers, *had),
        )

    def _layers(self, heir: FinishedStage) -> LayerMap:
        return LayerMap(heir.stage.layers, self.recipe.rule)

    def _heir(self, layers: LayerMap, before: FinishedStage | None, progress: Passed) -> Decoder:
        recipe, donor, seed = self.recipe, self.reference, self.recipe.train.seed
        if before is not None:
            student, had = _trained(before.run.path), self._layers(before)
            if len(layers) < len(had):
                return inherit(student, layers.within(had), seed=seed)
            return grow(student, had, donor, layers, copy=recipe.copy, seed=seed)
        if recipe.width:
            donor = narrowed_reference(recipe, donor, recipe.width, progress)
        return inherit(
            donor, layers, copy=recipe.copy, route=recipe.route, normalizer=recipe.normalizer,
            seed=seed,
        )  # fmt: skip

    def _stages(self, name: str, heirs: Sequence[TrainingStage]) -> Iterator[TrainingStage]:
        """Yield a baseline's stages, which follow from the last heir's depth and steps."""
        recipe, last = self.recipe, heirs[-1]
        baseline, folder = baseline_of(name), folder_of(name)
        setting = setting_of(recipe, self.reference, LayerMap(last.layers, recipe.rule))
        steps = last.offset + last.steps
        if baseline.all_rounds:
            steps = sum(each.steps for each in heirs)
        steps *= baseline.times

        def start(progress: Passed) -> Decoder:
            return baseline.start(dataclasses.replace(setting, progress=progress))

        then = baseline.second
        if then is None:
            solved = partial(bridges, recipe, setting.reference, setting.layers, None, ())
            yield TrainingStage(
                folder, name, steps, 0, start, learned=learning(recipe, baseline, setting),
                layers=setting.layers.sources if baseline.bridged else (),
                bridge=solved if baseline.bridged else None,
            )  # fmt: skip
            return
        before, half = self.out / f"{folder}-1", half_way(recipe, steps)
        yield TrainingStage(before.name, name, half, 0, start)
        yield TrainingStage(
            folder, name, steps - half, half, lambda _: then(setting, _trained(before))
        )

    def _finished(self, stage: TrainingStage) -> FinishedStage:
        """Return the stage's run: the one that is there, continued if need be, or a new one."""
        recipe, place, shown = self.recipe, self.out / stage.name, self.shown
        refuse_link(place)
        with joined() as world:
            world.meet()  # no process looks while another begins the run
            there, done = world.gather([run_at(place) is not None, is_done(place)])[0]
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
        if recipe.width and stage.layers:  # an heir, whose card and page say what they came to
            origin["width"] = to_table(kept_of(decoder.config, self.reference.config))
        if stage.bridge is not None:
            with shown(stage.name) as show:
                passed = partial(show.count, "bridging the layers left out: layers passed")
                origin["bridges"] = [to_table(found) for found in stage.bridge(decoder, passed)]
        config = stage_config(recipe, stage, decoder)
        with shown(stage.name) as show:
            run = train(config, place, initial=Initial(decoder, origin), show=show)
        return FinishedStage(stage, run)

    @contextmanager
    def _resumable(self) -> Iterator[None]:
        """Say how to go on where a signal ends a run."""
        again = f"continue with: {resume_command('inherit', self.resume or self.out)}"
        try:
            yield
        except Interrupted:
            raise Interrupted("stopped, and what was trained is saved", again) from None
        except WakefulError as error:
            if error.__cause__ is None or not is_lost(error.__cause__):
                raise
            raise WakefulError(lost(again)) from error.__cause__


def _trained(place: Path) -> Decoder:
    return read_decoder(place, dtype="auto").decoder()
