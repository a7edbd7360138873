"""A recipe carried out: inherit, train, evaluate, grow until parity (algorithm 1), and baselines.

Progress is read from the runs' folders alone: a recipe continues where it was interrupted.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from wakeful.config.schema import Config
from wakeful.config.tables import to_table
from wakeful.errors import Interrupted, WakefulError
from wakeful.inheritance.blocks import inherit_blocks, random_like_heir
from wakeful.inheritance.bridge import check_bridge, find_gaps
from wakeful.inheritance.layers import LayerMap, first
from wakeful.inheritance.options import BaselineName
from wakeful.inheritance.recipe import Recipe
from wakeful.inheritance.solving import bridge_on_text
from wakeful.inheritance.stages import FinishedStage, FinishedStages, TrainingStage
from wakeful.layer_ranges import format_layers
from wakeful.model.decoder import Decoder
from wakeful.runs.distributed import ALONE, World, is_lost, join_processes, lost_message
from wakeful.runs.run import Run, is_done, refuse_link, run_at
from wakeful.terminal.display import DisplayFactory
from wakeful.training import Initial, check_parts, resume_command, train_run

BASELINES: Mapping[BaselineName, str] = {
    "random": "the same shape at random",
    "reference": "the whole reference, trained further",
}
"""Starts of the models that are trained beside an heir."""


def check_stages(recipe: Recipe, reference: Decoder, world: World = ALONE) -> Config:
    """Check every stage of a recipe on the meta device, where weights take no memory; return the
    configuration of a run that would train the whole reference.

    `world` are the processes that would train.

    Raises:
        WakefulError: a stage cannot be trained in these processes, or a bridge cannot be built.
    """
    steps = recipe.train.steps
    with torch.device("meta"):
        meta_reference = Decoder(reference.config)
        # The last heir is the largest: if it can be trained, all can.
        largest_layers = recipe.layer_map(recipe.rounds - 1)
        heir = _make_heir(recipe, meta_reference, largest_layers)
    # The first heir drops most layers: if it has no gaps, none has.
    if recipe.bridge.map != "none" and find_gaps(recipe.layer_map(0), reference.config.num_layers):
        check_bridge(meta_reference)
    check_parts(recipe.run_config("heir", heir, steps, recipe.healing), world)
    for name in recipe.baselines:
        with torch.device("meta"):
            decoder = heir if name == "random" else _whole_reference(recipe, meta_reference)
        check_parts(recipe.run_config(name, decoder, steps), world)
    return recipe.run_config("reference", reference, steps)


def _make_heir(recipe: Recipe, reference: Decoder, layers: LayerMap) -> Decoder:
    return inherit_blocks(
        reference, layers, route=recipe.route, normalizer=recipe.normalizer,
        seed=recipe.train.seed,
    )  # fmt: skip


def _whole_reference(recipe: Recipe, reference: Decoder) -> Decoder:
    """Return a copy of the whole reference, with the heir's route and normalizer."""
    total = reference.config.num_layers
    return inherit_blocks(
        reference, first(total, of=total), route=recipe.route, normalizer=recipe.normalizer,
        seed=recipe.train.seed,
    )  # fmt: skip


@dataclass(frozen=True)
class StageRunner:
    """A recipe whose runs lie in a folder."""

    recipe: Recipe
    reference: Decoder
    loss: float
    """The reference's, on the same validation set: parity is a final loss at or under it."""
    out: Path
    display: DisplayFactory

    def carry_out(self) -> FinishedStages:
        """Train the heirs and the baselines; continue the runs that exist.

        Raises:
            Interrupted: a signal ended a run, which is saved.
        """
        with self.resumable():
            rounds = tuple(self._rounds())
            last = rounds[-1].stage
            baselines = [
                self.run_stage(self._baseline_stage(name, last)) for name in self.recipe.baselines
            ]
        return FinishedStages(rounds, tuple(baselines))

    def first(self) -> TrainingStage:
        """Return the stage of the first heir."""
        return self._heir_stage(0)

    def _rounds(self) -> Iterator[FinishedStage]:
        """Train one heir after the other and yield each: through all rounds or, if the recipe says
        so, until one reaches parity, a loss no higher than the reference's.
        """
        for number in range(self.recipe.rounds):
            finished = self.run_stage(self._heir_stage(number))
            yield finished
            if self.recipe.until == "parity" and finished.loss <= self.loss:
                return

    def _heir_stage(self, number: int) -> TrainingStage:
        """Return the stage of the heir of round `number`, from 0."""
        recipe, layers = self.recipe, self.recipe.layer_map(number)
        name = f"heir-{len(layers)}"
        return TrainingStage(
            name=name,
            arm=name,
            summary=f"the reference's layers {format_layers(layers.sources)}",
            steps=recipe.train.steps,
            start=partial(_make_heir, recipe, self.reference, layers),
            layers=layers.sources,
            objective=recipe.healing,
            bridge=partial(bridge_on_text, recipe, self.reference, layers),
        )

    def _baseline_stage(self, name: BaselineName, last: TrainingStage) -> TrainingStage:
        """Return the stage of a baseline, which trains for as many steps as the last heir's stage.
        The baseline starts with random weights in that heir's shape, or as the whole reference.
        """
        recipe = self.recipe
        start = partial(_whole_reference, recipe, self.reference)
        if name == "random":
            start = partial(
                random_like_heir, self.reference, last.layers, route=recipe.route,
                normalizer=recipe.normalizer, seed=recipe.train.seed,
            )  # fmt: skip
        return TrainingStage(
            name=name, arm=name, summary=BASELINES[name], steps=last.steps,
            start=start, origin={"baseline": BASELINES[name], "random": name == "random"},
        )  # fmt: skip

    def run_stage(self, stage: TrainingStage) -> FinishedStage:
        """Return a stage's finished run: read it, continue it, or train it from the start.

        The run is in a folder with the stage's name. A new one's run.json records where its weights
        come from, with the errors of bridges.
        """
        recipe, folder, display = self.recipe, self.out / stage.name, self.display
        refuse_link(folder)
        with join_processes() as world:
            world.meet()  # all have left the stage before: its files are complete
            # All have looked before any begins the run; they go by what the first one sees.
            exists, is_finished = world.gather([run_at(folder) is not None, is_done(folder)])[0]
        if exists:
            run = Run.open(folder)
            if not is_finished:
                with display(stage.name) as show:
                    run = train_run(run.config, folder, resume=True, show=show)
            return FinishedStage(stage, run)
        decoder = stage.start()
        origin = {
            "reference": recipe.reference,
            "arm": stage.arm,
            "offset": stage.offset,
            "layers": list(stage.layers),
            **stage.origin,
        }
        if stage.bridge is not None:
            with display(stage.name) as show:
                on_progress = partial(show.count, "bridging the layers left out: layers passed")
                origin["bridges"] = [
                    to_table(bridge) for bridge in stage.bridge(decoder, on_progress)
                ]
        config = recipe.run_config(
            stage.name, decoder, stage.steps, stage.objective, offset=stage.offset
        )
        with display(stage.name) as show:
            run = train_run(config, folder, initial=Initial(decoder, origin), show=show)
        return FinishedStage(stage, run)

    @contextmanager
    def resumable(self) -> Iterator[None]:
        """Within the context, add to an error the command that continues the inheritance, if a
        signal or the loss of a process ended a run. Other errors pass unchanged.
        """
        next_step = f"continue with: {resume_command('inherit', self.out)}"
        try:
            yield
        except Interrupted:
            raise Interrupted("stopped, and what was trained is saved", next_step) from None
        except WakefulError as error:
            if error.__cause__ is None or not is_lost(error.__cause__):
                raise
            raise WakefulError(lost_message(next_step)) from error.__cause__
