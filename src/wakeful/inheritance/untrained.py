"""`inherit` without training: layers of a reference, chosen and bridged, written as a model."""

import shlex
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import torch

from wakeful.config.commands import command_of
from wakeful.config.schema import Config
from wakeful.config.tables import to_table
from wakeful.data.base import Data
from wakeful.estimates import INTERVAL, Estimate, finite, weighted_mean, with_interval
from wakeful.generation import generation_step
from wakeful.hf.weights_out import export_decoder, stock_architecture
from wakeful.inheritance.bridge import gaps
from wakeful.inheritance.options import InheritOptions
from wakeful.inheritance.reading import evaluated
from wakeful.inheritance.recipe import Recipe
from wakeful.inheritance.stages import TrainingStage
from wakeful.layer_ranges import format_layers
from wakeful.loading.card import model_card
from wakeful.loading.model import Model
from wakeful.model.decoder import Decoder
from wakeful.model.finite import check_finite
from wakeful.norms.base import Norm
from wakeful.paged import Paged
from wakeful.reports.html import write
from wakeful.reports.lineage import bridged
from wakeful.reports.result import Measured
from wakeful.reports.value import Part, Report, Section, Step, Table, Text, method_section
from wakeful.runs.records import Bridged
from wakeful.runs.run import Run
from wakeful.terminal.display import Display

REFERENCE, PLAIN, HEIR = "reference", "without a bridge", "heir"
"""Whose loss in every window is known."""


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class UntrainedHeir(Measured):
    """Layers of a reference, bridged, and what leaving out the others costs."""

    model: Model
    reference: Model
    layers: tuple[int, ...]
    """The reference's layers that it has."""
    rule: str
    """How they were chosen."""
    bridges: tuple[Bridged, ...]
    windows: pl.DataFrame
    """A row a validation window: its number, its tokens, and the loss in it of the reference, of
    the heir, and without the bridge where there is one."""
    options: InheritOptions
    source: str
    """The name that the reference was asked for by."""
    path: Path
    """The folder."""

    @property
    def frame(self) -> pl.DataFrame:
        """The losses, a row a validation window."""
        return self.windows

    @property
    def page(self) -> Path:
        """The page about it."""
        return self.path / "report.html"

    @property
    def losses(self) -> dict[str, Estimate]:
        """Nats a token of each, ± its standard error over windows."""
        return {name: self._over(pl.col(name)) for name in self._models}

    @property
    def costs(self) -> dict[str, Estimate]:
        """The loss over the reference's, paired by window."""
        gap = {name: pl.col(name) - pl.col(REFERENCE) for name in self._models[1:]}
        return {name: self._over(each) for name, each in gap.items()}

    @property
    def _models(self) -> list[str]:
        return [name for name in (REFERENCE, PLAIN, HEIR) if name in self.frame.columns]

    def _over(self, loss: pl.Expr) -> Estimate:
        return weighted_mean(self.frame.select(loss).to_series(), self.frame["tokens"])

    @property
    def summary(self) -> dict[str, Any]:
        """The layers, the bridges, the losses and what they are over the reference's."""
        figures = {"losses": self.losses, "costs": self.costs}
        return {
            "reference": self.source, "rule": self.rule, "layers": [*self.layers],
            "bridges": [to_table(each) for each in self.bridges],
            "parameters": self._parameters,
            **{figure: {name: [value, finite(error)] for name, (value, error) in found.items()}
               for figure, found in figures.items()},
        }  # fmt: skip

    @property
    def _parameters(self) -> dict[str, int]:
        pairs = ((REFERENCE, self.reference), (HEIR, self.model))
        return {n: sum(p.numel() for p in each.module.parameters()) for n, each in pairs}

    @property
    def _chosen(self) -> str:
        return "as they were named" if self.rule == "named" else f"chosen by {self.rule}"

    @property
    def report(self) -> Report:
        """What leaving layers out costs, with a bridge and without."""
        total, costs = len(self.reference.blocks), self.costs
        cost, plain = (
            with_interval(*costs[name], len(self.frame), "+") if name in costs else ""
            for name in (HEIR, PLAIN)
        )
        beside = f"; without a bridge {plain}" if plain else ""
        said = (
            f"{len(self.layers)} of {self.reference.name}'s {total} layers cost {cost} nats a "
            f"token over all of them, and nothing was trained{beside}."
        )
        count = {PLAIN: self._parameters[HEIR], **self._parameters}
        rows = [
            [name, f"{count[name]:,}", with_interval(*loss, len(self.frame)),
             with_interval(*costs[name], len(self.frame), "+") if name in costs else ""]
            for name, loss in self.losses.items()
        ]  # fmt: skip
        parts: list[Part] = [
            Table(["", "parameters", "loss", "over the reference"], rows,
                  "Nats a token on the validation text", "figures"),
            *(Text(bridged(each, self.options.bridge)) for each in self.bridges),
        ]  # fmt: skip
        tokens = int(self.frame["tokens"].sum())
        told = {
            "Layers": f"{format_layers(self.layers)} of 0–{total - 1}, {self._chosen}",
            "Text": f"solved on {self.options.data.source}; loss over {tokens:,} held-out tokens "
            f"in {len(self.frame)} windows, differences paired by window, ± the {INTERVAL}",
            "Weights": f"written in {str(self.model.written_in).removeprefix('torch.')}, and "
            "matrices measured as they are written",
        }
        place = str(self.path)
        smaller = f"wakeful quantize {shlex.quote(place)} --scheme w4a16"
        steps = [generation_step(place, self.model.context), Step("make it smaller", smaller)]
        return Report(
            f"An heir of {self.reference.name}", [said], steps,
            [Section("What leaving layers out costs", parts, brief=True), method_section(told)],
        )  # fmt: skip

    def save(self, folder: str | Path) -> Path:
        """Write the model to a folder that Transformers loads, with the page beside it."""
        decoder, model = self.model.decoder(), self.model
        losses, costs = self.losses, self.costs
        done = [
            f"its layers {format_layers(self.layers)} (from 0), {self._chosen}",
            *(bridged(each, self.options.bridge) for each in self.bridges),
            "nothing was trained",
        ]
        windows = len(self.frame)
        before, after = (with_interval(*losses[name], windows) for name in (REFERENCE, HEIR))
        cost = with_interval(*costs[HEIR], windows, "+")
        card = model_card(
            model, stock_architecture(decoder.config)[0],
            command_of("inherit", self.options, self.source),
            source=self.reference, done=done,
            figures=[f"| loss, nats per token, ± the {INTERVAL} | {before} | {after} |",
                     f"| over the reference, paired | | {cost} |"],
        )  # fmt: skip
        export_decoder(
            decoder, folder, tokenizer=model.own_tokenizer, dtype=model.written_in,
            types=model.types, card=card,
        )  # fmt: skip
        run = Run(folder)
        run.write_json("inherit.json", self.summary)
        run.write_frame("windows.parquet", self.frame)
        write(self.report, run.path / "report.html", self.figures)
        return run.path


def made(
    stage: TrainingStage,
    recipe: Recipe,
    options: InheritOptions,
    reference: Model,
    data: Data,
    config: Config,
    show: Display,
    *,
    source: str,
    out: Path,
) -> UntrainedHeir:
    """Return what an heir's stage starts from, and its losses beside its reference's."""
    decoder = stage.start()
    name = f"{reference.name} with {len(stage.layers)} layers"
    heir = replace(
        reference, name=name, module=decoder.eval().requires_grad_(False), path=None,
        agreement=None, generates_as=reference, read_tokenizer=lambda: reference.own_tokenizer,
    )  # fmt: skip
    models = {REFERENCE: evaluated(config, reference, data, show)}
    check_finite(models[REFERENCE]["loss"].to_torch())
    if recipe.bridge.map != "none" and gaps(recipe.layer_map(0), len(reference.blocks)):
        models[PLAIN] = evaluated(config, replace(heir, name=f"{name}, {PLAIN}"), data, show)
    assert stage.bridge is not None  # of an heir
    bridges = stage.bridge(decoder, partial(show.count, "bridging: layers passed"))
    _round(decoder, heir.written_in)
    models[HEIR] = evaluated(config, heir, data, show)
    frame = models[REFERENCE].select("window", "tokens")
    frame = frame.with_columns(**{each: found["loss"] for each, found in models.items()})
    return UntrainedHeir(
        model=heir, reference=reference, layers=stage.layers, rule=recipe.rule,
        bridges=tuple(bridges), windows=frame, options=options, source=source, path=out,
        figures=options.figures,
    )  # fmt: skip


@torch.no_grad()
def _round(decoder: Decoder, kind: torch.dtype) -> None:
    """Round what is in memory to the type that is written, in place.

    Norms stay: a scale that is stored less one is exact there, and not as the decoder has it.
    """
    for module in decoder.modules():
        for parameter in () if isinstance(module, Norm) else module.parameters(recurse=False):
            if not isinstance(parameter, Paged):
                parameter.copy_(parameter.to(kind))
