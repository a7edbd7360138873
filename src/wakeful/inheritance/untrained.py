"""Heirs that are not trained: layers of a reference, chosen and bridged, written as a model."""

import shlex
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import torch

from wakeful.config.commands import format_command_line
from wakeful.config.schema import Config
from wakeful.config.tables import to_table
from wakeful.data.base import Data
from wakeful.estimates import INTERVAL, Estimate, finite_or_none, format_interval, weighted_mean
from wakeful.generation import generation_step
from wakeful.hf.weights_out import export_decoder, stock_architecture
from wakeful.inheritance.options import InheritOptions
from wakeful.inheritance.reading import evaluate_model
from wakeful.inheritance.recipe import Recipe
from wakeful.inheritance.stages import TrainingStage
from wakeful.layer_ranges import format_layers
from wakeful.loading.card import model_card
from wakeful.loading.model import Model
from wakeful.model.decoder import Decoder
from wakeful.model.finite import check_finite
from wakeful.norms.base import Norm
from wakeful.paged import Paged
from wakeful.reports.html import write_page
from wakeful.reports.lineage import describe_bridge
from wakeful.reports.value import NextStep, Part, Report, Section, Table, Text, method_section
from wakeful.runs.records import BridgeGap
from wakeful.runs.run import Run
from wakeful.terminal.display import Display

REFERENCE, HEIR = "reference", "heir"
"""Models whose losses are measured: columns of the table of windows."""


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class UntrainedHeir:
    """Layers of a reference, bridged and not trained, and the loss that the dropped layers cost."""

    model: Model
    """The heir, in memory."""
    reference: Model
    layers: tuple[int, ...]
    """The reference's layers that the heir has, counted from 0."""
    rule: str
    """Rule by which the layers were chosen."""
    bridges: tuple[BridgeGap, ...]
    windows: pl.DataFrame
    """One row per validation window: its number, its number of tokens, and the loss of the
    reference and of the heir."""
    options: InheritOptions
    source: str
    """The reference's name as the caller gave it."""
    path: Path
    """The heir's folder."""

    @property
    def losses(self) -> dict[str, Estimate]:
        """Loss of both models in nats per token, with its standard error over windows."""
        return {name: self._mean(pl.col(name)) for name in (REFERENCE, HEIR)}

    @property
    def cost(self) -> Estimate:
        """The heir's loss minus the reference's, paired by window, with its standard error."""
        return self._mean(pl.col(HEIR) - pl.col(REFERENCE))

    def _mean(self, loss: pl.Expr) -> Estimate:
        return weighted_mean(self.windows.select(loss).to_series(), self.windows["tokens"])

    @property
    def frame(self) -> pl.DataFrame:
        """One row: the heir's loss as an evaluation at step 0, with the columns of a trained
        inheritance's frame.
        """
        loss, error = self.losses[HEIR]
        row = {"arm": HEIR, "run": "", "step": 0, "tokens": 0, "loss": loss,
               "standard_error": finite_or_none(error)}  # fmt: skip
        return pl.DataFrame([row], schema_overrides={"standard_error": pl.Float64})

    @property
    def summary(self) -> dict[str, Any]:
        """Fields of inherit.json: layers, bridges, numbers of parameters, losses and their
        difference. Losses and difference are pairs (value, standard error).
        """

        def to_pair(estimate: Estimate) -> list[float | None]:
            return [estimate[0], finite_or_none(estimate[1])]  # JSON has no NaN

        return {
            "reference": self.source, "rule": self.rule, "layers": [*self.layers],
            "bridges": [to_table(bridge) for bridge in self.bridges],
            "parameters": self._num_parameters,
            "losses": {name: to_pair(loss) for name, loss in self.losses.items()},
            "cost": to_pair(self.cost),
        }  # fmt: skip

    @property
    def _names(self) -> dict[str, str]:
        return {REFERENCE: self.reference.name, HEIR: HEIR}

    @property
    def _num_parameters(self) -> dict[str, int]:
        """Number of parameters of the reference and of the heir."""
        models = ((REFERENCE, self.reference), (HEIR, self.model))
        return {
            name: sum(parameter.numel() for parameter in model.module.parameters())
            for name, model in models
        }

    @property
    def _rule_text(self) -> str:
        return "as they were named" if self.rule == "named" else f"chosen by {self.rule}"

    @property
    def report(self) -> Report:
        """Report of the loss that the dropped layers cost."""
        total, num_windows = len(self.reference.blocks), len(self.windows)
        cost = format_interval(*self.cost, num_windows, "+")
        headline = (
            f"{len(self.layers)} of {self.reference.name}'s {total} layers cost {cost} nats per "
            "token over all of them, and nothing was trained."
        )
        rows = [
            [self._names[name], f"{self._num_parameters[name]:,}",
             format_interval(*loss, num_windows), cost if name == HEIR else ""]
            for name, loss in self.losses.items()
        ]  # fmt: skip
        parts: list[Part] = [
            Table(["", "parameters", "loss", "over the reference"], rows,
                  "Nats per token on the validation text", "figures"),
            *(Text(describe_bridge(bridge, self.options.bridge)) for bridge in self.bridges),
        ]  # fmt: skip
        tokens = int(self.windows["tokens"].sum())
        facts = {
            "Layers": f"{format_layers(self.layers)} of 0–{total - 1}, {self._rule_text}",
            "Text": f"solved on {self.options.data.source}; loss over {tokens:,} held-out tokens "
            f"in {num_windows} windows, differences paired by window, ± the {INTERVAL}",
            "Weights": f"written in {str(self.model.export_dtype).removeprefix('torch.')}, and "
            "matrices measured as they are written",
        }
        folder = str(self.path)
        quantize = f"wakeful quantize {shlex.quote(folder)} --scheme w4a16"
        steps = [generation_step(folder, self.model.context), NextStep("make it smaller", quantize)]
        return Report(
            f"An heir of {self.reference.name}", [headline], steps,
            [Section("What leaving layers out costs", parts, brief=True), method_section(facts)],
        )  # fmt: skip

    def write(self) -> None:
        """Write the heir to its folder as Transformers loads it, with a model card, inherit.json,
        windows.parquet, report.html and the charts that `figures` asks for.
        """
        decoder, model = self.model.decoder(), self.model
        losses = self.losses
        changes = [
            f"its layers {format_layers(self.layers)} (from 0), {self._rule_text}",
            *(describe_bridge(bridge, self.options.bridge) for bridge in self.bridges),
            "nothing was trained",
        ]
        windows = len(self.windows)
        before, after = (format_interval(*losses[name], windows) for name in (REFERENCE, HEIR))
        cost = format_interval(*self.cost, windows, "+")
        card = model_card(
            model, stock_architecture(decoder.config)[0],
            format_command_line("inherit", self.options, self.source),
            source=self.reference, done=changes,
            figures=[(f"loss, nats per token, ± the {INTERVAL}", before, after),
                     ("over the reference, paired", "", cost)],
        )  # fmt: skip
        export_decoder(
            decoder, self.path, tokenizer=model.wakeful_tokenizer, dtype=model.export_dtype,
            types=model.types, card=card,
        )  # fmt: skip
        run = Run(self.path)
        run.write_json("inherit.json", self.summary)
        run.write_frame("windows.parquet", self.windows)
        write_page(self.report, run.path / "report.html", self.options.figures)


def make_untrained(
    stage: TrainingStage,
    recipe: Recipe,
    options: InheritOptions,
    reference: Model,
    data: Data,
    config: Config,
    show: Display,
    *,
    source: str,
    path: Path,
) -> UntrainedHeir:
    """Return the heir that a stage starts from, bridged and rounded to the type that it will be
    written in, with its losses and the reference's in every validation window.

    `source` is the reference's name as the caller gave it, `path` the folder to write the heir to;
    nothing is written yet.
    """
    decoder = stage.start()
    name = f"{reference.name} with {len(stage.layers)} layers"
    heir = replace(
        reference, name=name, module=decoder.eval().requires_grad_(False), path=None,
        agreement=None, generation_source=reference,
        read_tokenizer=lambda: reference.wakeful_tokenizer,
    )  # fmt: skip
    losses = {REFERENCE: evaluate_model(config, reference, data, show)}
    check_finite(losses[REFERENCE]["loss"].to_torch())
    assert stage.bridge is not None  # of an heir
    bridges = stage.bridge(decoder, partial(show.count, "bridging: layers passed"))
    _round_weights(decoder, heir.export_dtype)
    losses[HEIR] = evaluate_model(config, heir, data, show)
    windows = losses[REFERENCE].select("window", "tokens")
    windows = windows.with_columns(**{model: frame["loss"] for model, frame in losses.items()})
    return UntrainedHeir(
        model=heir, reference=reference, layers=stage.layers, rule=recipe.rule,
        bridges=tuple(bridges), windows=windows, options=options, source=source, path=path,
    )  # fmt: skip


@torch.no_grad()
def _round_weights(decoder: Decoder, dtype: torch.dtype) -> None:
    """Round a decoder's weights, in place, to the values that they have in the type `dtype`.

    Norms are left alone: an architecture that stores scales minus one rounds that number instead.
    So are weights that are still in their file (`Paged`), in the type that they have there.
    """
    for module in decoder.modules():
        if isinstance(module, Norm):
            continue
        for parameter in module.parameters(recurse=False):
            if not isinstance(parameter, Paged):
                parameter.copy_(parameter.to(dtype))
