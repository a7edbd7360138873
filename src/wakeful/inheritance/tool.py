"""`inherit`: a reference and a text in, a folder of runs and a page out."""

import copy
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import tomli_w
import torch

from wakeful.config.commands import format_command_line
from wakeful.config.keywords import accept_options, options_from
from wakeful.config.reading import REFERENCES, FigureFormat
from wakeful.config.schema import Config
from wakeful.config.tables import to_table
from wakeful.data.base import Data
from wakeful.data.preparing import reopen_data
from wakeful.device import choose_device
from wakeful.errors import WakefulError
from wakeful.estimates import finite_or_none
from wakeful.hf.weights_out import export_decoder, refuse_existing
from wakeful.inheritance import outcome
from wakeful.inheritance import plan as planning
from wakeful.inheritance.blocks import departures
from wakeful.inheritance.layers import LayerMap
from wakeful.inheritance.options import InheritOptions
from wakeful.inheritance.reading import evaluate_model, measure_angles, prepare_text
from wakeful.inheritance.recipe import Recipe, read_recipe
from wakeful.inheritance.report import inheritance_report
from wakeful.inheritance.result import Inheritance
from wakeful.inheritance.rounds import StageRunner, check_stages
from wakeful.inheritance.stages import FinishedStages
from wakeful.inheritance.untrained import make_untrained
from wakeful.loading.load import load, read_decoder
from wakeful.loading.model import AnyTokenizer, Model
from wakeful.loading.sources import Source, convert_to_decoder, source_name
from wakeful.model.finite import check_finite
from wakeful.optim.build import optimizer_of
from wakeful.reports.html import write_page
from wakeful.reports.result import first_process_display
from wakeful.runs.distributed import World, join_processes
from wakeful.runs.records import StepRow, data_facts, logged_rows
from wakeful.runs.run import Run, SharedRun, environment, read_windows
from wakeful.switches import default_torch_state
from wakeful.terminal.display import Display, DisplayFactory
from wakeful.training import choose_own_device, mean_loss
from wakeful.variants import build


@dataclass(frozen=True, kw_only=True)
class InheritancePlan:
    """plan.json: where a recipe comes from."""

    command: str
    """The command line that repeats the inheritance."""
    options: InheritOptions
    agreement: str
    """Difference of the reference as our decoder to Transformers' model; "" of our own models."""


@accept_options(InheritOptions)
@default_torch_state()
def inherit(
    reference: Source | None = None,
    *,
    tokenizer: AnyTokenizer | str | Path | None = None,
    display: DisplayFactory | None = None,
    options: InheritOptions | None = None,
    **kwargs: Any,
) -> Inheritance:
    """Start a smaller model from a reference's blocks, train it, and compare it with baselines.

        wakeful.inherit("smollm2", layers=15, text="book.txt", steps=200, baseline=["random"])

    Args:
        reference: a name, a path, what `wakeful.load` returned, or a module in memory, which is
            exported into the folder so that the work can be resumed.
        tokenizer: replaces the reference's own; required for a module; may be a path.
        display: shows progress; None is a bar where there is a terminal.
        options: `InheritOptions`, whose fields and short names are keyword arguments too.
        kwargs: those fields; with `resume`, which names a folder to go on with, only `figures`.

    The folder gets recipe.toml, a training run for each heir and baseline, plan.json,
    reference.parquet, summary.json and report.html. With `heal={"by": "none"}` nothing is trained,
    and the folder is the bridged heir as Transformers loads it, with inherit.json and report.html;
    the result's `untrained`, otherwise None, has its losses in each window.
    Nothing is written before everything that can be checked has been.

    Raises:
        WakefulError: the reference or the text cannot be read, its architecture cannot be inherited
            from, the layers do not fit it, `out` exists, or a run fails.
            Files that existed before are kept.
    """
    options = options_from(InheritOptions, kwargs, options)
    if options.resume and reference is not None:
        raise WakefulError("resume goes on with a folder's own reference: name none")
    if not options.resume and reference is None:
        raise WakefulError(f"name one reference: {REFERENCES}")
    with join_processes() as world:
        display = partial(first_process_display, display, world=world)
        choose_own_device(options.train.device, world, field="device")
        if reference is not None:
            _check_names(options)
            if world.size > 1 and options.heal.by == "none":
                raise WakefulError("--heal.by none is for one process: leave out torchrun")
        if reference is None:
            out = Path(options.resume)
            job = _reopen(out, display, world)
        else:
            name = Path(source_name(reference)).name.removesuffix(".gguf")
            out = Path(options.out or f"runs/inherit-{name}")
            request = _Request(reference, tokenizer, options, out, display, world)
            if options.heal.by == "none":
                return request.write_untrained()
            if world.first:
                new_job = request.begin()
                world.meet()
                job = world.leader_first(lambda: new_job)  # then the others read the text
            else:
                world.meet()  # while the first plans
                job = _reopen(out, display, world)
        job.carry_out(display, world, options.figures)
    return Inheritance(job.run.path, job.run.path / "report.html")


@dataclass(frozen=True)
class _Job:
    """An inheritance's folder with everything that training starts from."""

    run: Run
    recipe: Recipe
    plan: InheritancePlan
    reference: Model
    data: Data
    windows: pl.DataFrame
    """The reference's loss in every validation window."""

    def carry_out(
        self, display: DisplayFactory, world: World, figures: Sequence[FigureFormat]
    ) -> None:
        """Train the heirs and the baselines, or read those that are trained already. Then the first
        process writes summary.json, report.html and, in the formats `figures`, its charts.
        """
        reference_loss, _ = mean_loss(self.windows)
        run = self.run if world.first else SharedRun.open(self.run.path)
        with run.lock(), run.under_way():
            runner = StageRunner(
                self.recipe, self.reference.decoder(), reference_loss, run.path, display
            )
            stages = runner.carry_out()
            if world.first:
                self.run.write_json("summary.json", self._summary(stages))
                write_page(
                    inheritance_report(self.run.path), self.run.path / "report.html", figures
                )
            world.meet()  # for the others the run ends when its page is written

    def _summary(self, stages: FinishedStages) -> outcome.InheritanceSummary:
        """Return the fields of summary.json: the reference, every model trained in `stages`, and
        what the last heir was made of.
        """
        recipe, plan = self.recipe, self.plan
        reference = self.reference.decoder()
        loss, error = mean_loss(self.windows)
        tokens, seconds = training_cost(recipe.reference)
        last = stages.rounds[-1]
        return outcome.InheritanceSummary(
            reference=outcome.Reference(
                name=self.reference.name,
                source=recipe.reference,
                layers=reference.config.num_layers,
                parameters=reference.num_parameters()["total"],
                cache_bytes_per_token=reference.cache_bytes_per_token,
                loss=loss,
                standard_error=finite_or_none(error),
                tokens=tokens,
                seconds=seconds,
                agreement=plan.agreement,
                parts=outcome.losses_by_part(self.windows, self.windows),
            ),
            final=last.stage.arm,
            arms=outcome.compare_arms(stages, self.windows, loss),
            recipe=recipe,
            bridges=last.bridges,
            departures=tuple(
                departures(
                    reference, LayerMap(last.stage.layers, recipe.rule), route=recipe.route,
                    normalizer=recipe.normalizer,
                )
            ),
            data=data_facts(self.data),
        )  # fmt: skip


@dataclass(frozen=True)
class _Prepared:
    """A reference and a text, read, and the layers that were chosen."""

    reference: Model
    options: InheritOptions
    data: Data
    recipe: Recipe
    config: Config
    """Configuration of a run that would train the whole reference."""


@dataclass(frozen=True)
class _Request:
    """Arguments of a new inheritance."""

    source: Source
    tokenizer: AnyTokenizer | str | Path | None
    options: InheritOptions
    out: Path
    display: DisplayFactory
    world: World

    def write_untrained(self) -> Inheritance:
        """Choose layers, bridge the gaps, and write the heir to `out` without training it; return
        the heir with its folder.
        """
        refuse_existing(self.out)
        with self.display("inherit") as show:
            prepared = self._prepare(show)
            reference, recipe = prepared.reference, prepared.recipe
            no_target = math.inf  # the loss at which training would stop
            runner = StageRunner(recipe, reference.decoder(), no_target, self.out, self.display)
            heir = make_untrained(
                runner.first(), recipe, self.options, reference, prepared.data, prepared.config,
                show, source=source_name(self.source), path=self.out,
            )  # fmt: skip
        heir.write()
        return Inheritance(self.out, self.out / "report.html", heir)

    def begin(self) -> _Job:
        """Read the reference and the text, plan the recipe, evaluate the reference, and create the
        inheritance's folder; return what training starts from.

        A reference that no path has is exported into the folder.
        """
        run = Run(self.out)
        run.refuse_existing("inherit")
        with self.display("inherit") as show:
            prepared = self._prepare(show)
            reference, data, recipe = prepared.reference, prepared.data, prepared.recipe
            windows = evaluate_model(prepared.config, reference, data, show)
            check_finite(windows["loss"].to_torch())
        device = choose_device(self.options.train.device)
        fields = {"reference": source_name(self.source), "name": self.out.name}
        with Run.create(self.out, "inherit", fields) as new:
            new.write_text("recipe.toml", tomli_w.dumps(to_table(recipe)))
            new.write_json("environment.json", environment(device, self.world.size))
            plan = InheritancePlan(
                command=format_command_line("inherit", prepared.options, recipe.reference),
                options=prepared.options,
                agreement=str(reference.agreement or ""),
            )
            new.write_json("plan.json", plan)
            new.write_frame("reference.parquet", windows)
            reference.wakeful_tokenizer.save(new.path)
            if reference.path is None:  # resuming reads it from here
                export_decoder(
                    reference.decoder(), new.path / outcome.REFERENCE,
                    tokenizer=reference.wakeful_tokenizer,
                    dtype=next(reference.module.parameters()).dtype,
                )  # fmt: skip
        return _Job(run, recipe, plan, reference, data, windows)

    def _prepare(self, show: Display) -> _Prepared:
        """Read the reference and the text, choose the layers, and return all of it.

        Reading and measuring take time, so what can be checked is checked before: the number of
        layers before the text is read, and a recipe without angles before angles are measured. Last
        comes the final recipe.
        """
        reference, source = _load_reference(self.source, self.tokenizer, self.out, show)
        options = _fill_from_reference(self.options, reference)
        total = reference.decoder().config.num_layers
        planning.plan_layers(options, total, None)  # raises if the layers do not fit the reference
        data = prepare_text(options, reference, show)
        recipe_without_angles = planning.make_recipe(source, options, total, data, None)
        self._check(recipe_without_angles, reference)
        angles = measure_angles(options, reference, data, show)
        recipe = planning.make_recipe(source, options, total, data, angles)
        config = self._check(recipe, reference)
        return _Prepared(reference, options, data, recipe, config)

    def _check(self, recipe: Recipe, reference: Model) -> Config:
        """Check a recipe and all its stages; return the configuration of a run that would train the
        whole reference.
        """
        decoder = reference.decoder()
        recipe.check(decoder.config.num_layers)
        return check_stages(recipe, decoder, self.world)


def _check_names(options: InheritOptions) -> None:
    """Raise `WakefulError` for a route, normalizer or optimizer that does not exist."""
    for folder, expression in (("routes", options.route), ("normalizers", options.normalizer)):
        if expression:
            build(folder, expression, imports=True)
    optimizer_of(options.optimizer.name, imports=True)


def _load_reference(
    source: Source, tokenizer: AnyTokenizer | str | Path | None, out: Path, show: Display
) -> tuple[Model, str]:
    """Return (reference as a decoder, the name or path from which a resumed run reads it).

    If `source` is a name or a path and no `tokenizer` replaces its own, it is read again from
    there. Otherwise it is read from a folder in `out`, to which the caller must export the model;
    the returned model's `path` is then None.
    """
    show.note(f"loading {source_name(source)}")
    if isinstance(source, str | Path) and tokenizer is None:
        return convert_to_decoder(read_decoder(source), show), str(source)
    model = load(source, tokenizer=tokenizer)
    if model.is_quantized:
        raise WakefulError(f"{model.name} is quantized: name the model it was made from")
    original, model = model.module, convert_to_decoder(model, show)
    decoder = model.decoder()
    # The user's own module is copied, since it must not change; others are copied to float32, in
    # which a resumed run reads them.
    if decoder is original or decoder.head.weight.dtype != torch.float32:
        model = dataclasses.replace(model, module=copy.deepcopy(decoder).float().eval())
    return dataclasses.replace(model, path=None), str((out / outcome.REFERENCE).absolute())


def _fill_from_reference(options: InheritOptions, reference: Model) -> InheritOptions:
    """Return the options with two fields filled in from the reference: an unset length, which its
    context limits, and whether windows begin with BOS.
    """
    context = reference.decoder().config.context
    train = dataclasses.replace(options.train, length=options.train.length or min(256, context))
    # data.bos can only turn BOS on. Without it the option bos decides: "on", "off", or "auto", as
    # the reference's tokenizer has it.
    bos = options.data.bos or reference.starts_with_bos(options.bos)
    data = dataclasses.replace(options.data, bos=bos)
    return dataclasses.replace(options, train=train, data=data)


def _reopen(out: Path, display: DisplayFactory, world: World) -> _Job:
    """Read an inheritance's folder again, with its reference and its text.

    Raises:
        WakefulError: it is no inheritance, or the prepared text is gone and the text has changed.
    """
    run = Run.open(out)
    run.check_kind("inherit", "is not an inheritance")
    recipe = read_recipe(run.path)
    plan = run.read(InheritancePlan, "plan.json")
    with display("inherit") as show:
        show.note(f"loading {recipe.reference}")
        reference = read_decoder(recipe.reference)
        recipe.check(reference.decoder().config.num_layers)
        # On another machine, or without the cache, the text is prepared again.
        data = world.leader_first(
            lambda: reopen_data(recipe.data) or prepare_text(plan.options, reference, show)
        )
    if data.prepared_source != recipe.data.source:
        raise WakefulError(
            f"{out} was started on different text than {plan.options.data.source} now holds: "
            "restore the text, or start again in a new folder"
        )
    windows = read_windows(run.path / "reference.parquet")
    return _Job(run, recipe, plan, reference, data, windows)


def training_cost(source: str) -> tuple[int | None, float | None]:
    """Return (tokens that a model was trained on, seconds) if it is a run of ours; (None, None) for
    other models.
    """
    if not (Path(source) / "run.json").is_file():  # only our runs have this file
        return None, None
    steps = logged_rows(Run.open(source), StepRow)
    return (steps[-1].tokens, steps[-1].seconds) if steps else (None, None)
