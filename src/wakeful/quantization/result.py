"""Results of quantize: quantized models, and the damage of one or several."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from wakeful.config.commands import format_command_line
from wakeful.errors import WakefulError
from wakeful.loading.card import quantized_card
from wakeful.loading.model import Model
from wakeful.probes.running import as_decoder
from wakeful.quantization.compressed import file_bytes, rotates_inputs, save_compressed
from wakeful.quantization.convert import quantized_layers, scheme_of
from wakeful.quantization.damage import Damage, damage_summary, scheme_rows
from wakeful.quantization.format_search import MIXED, MixedModel
from wakeful.quantization.gguf_file import save_for_llama_cpp
from wakeful.quantization.mixed_report import (
    comparison_sentence,
    describe_formats,
    describe_tuning,
    mixed_model_summary,
)
from wakeful.quantization.options import QuantizeOptions
from wakeful.quantization.report import matrix_report, model_card_rows, quantization_report
from wakeful.quantization.sensitivity import LayerCost, cost_frame
from wakeful.reports.result import MeasuredResult, same_or_each
from wakeful.reports.value import Report
from wakeful.runs.run import Environment


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Quantization(MeasuredResult):
    """Quantized models of one model, and the damage of quantizing it where it was measured on a
    text.
    """

    models: Mapping[str, Model]
    """The quantized models by scheme; each is a model like any other."""
    source: str
    damage: Damage | None
    method: Mapping[str, str]
    layers: tuple[str, ...]
    options: QuantizeOptions
    """Options of the call."""
    head: bool
    """True where the output head is quantized too; one tied to the embedding never is."""
    machine: Environment
    costs: tuple[LayerCost, ...] = ()
    """Cost of each layer, where requested."""
    mixed_model: MixedModel | None = None
    """The model with a format for each layer, where formats were chosen."""
    saved: Mapping[str, Any] | None = None
    """The folder and the bytes of the saved model, where it was saved."""

    @property
    def model(self) -> Model:
        """The quantized model of the only scheme; raises `WakefulError` if there are several."""
        if len(self.models) > 1:
            raise WakefulError(
                f"there are {len(self.models)} quantized models: models[...] of "
                f"{', '.join(self.models)}"
            )
        return next(iter(self.models.values()))

    @property
    def frame(self) -> pl.DataFrame:
        """A table with one row per scheme, layer and metric: relative errors and input kurtosis."""
        measurement = self._measured.measurement
        return measurement.layers.select(pl.lit(measurement.name).alias("model"), pl.all())

    @property
    def summary(self) -> dict[str, Any]:
        """Figures of the model and of every scheme, as in summary.json.

        Raises:
            WakefulError: nothing was measured.
        """
        figures = damage_summary(self._measured) | {
            "layers": list(self.layers), "method": dict(self.method), "saved": self.saved,
            "costs": cost_frame(self.costs).to_dicts() if self.costs else [],
            "smallest": self._mixed_summary,  # the model with a format for each layer
        }  # fmt: skip
        return json.loads(json.dumps(figures))  # as it is read from the file: without tuples

    @property
    def report(self) -> Report:
        """The report of the damage; without a measurement, one line per scheme."""
        if self.damage is None:
            lines = [f"{scheme}: {self._describe_layers()}; not measured: no text was given"
                     for scheme in self.models]  # fmt: skip
            return Report(f"Quantization of {self.source}", lines, [], [])
        return quantization_report(
            self.damage, method=self.method, saved=self.saved, source=self.source,
            options=self.options, costs=self.costs, mixed_model=self.mixed_model,
        )  # fmt: skip

    def save(self, folder: str | Path) -> Path:
        """Write the measurement as a run directory and return it; `save_model` writes the model.

        Raises:
            WakefulError: nothing was measured, or the folder exists.
        """
        damage = self._measured
        tables = {"quantization.parquet": self.frame, "sequences.parquet": scheme_rows(damage)}
        if self.costs:
            tables["sensitivity.parquet"] = cost_frame(self.costs)
        return self.write_run(
            folder, "quantize", self.machine, tables, model=self.source,
            schemes=list(damage.schemes),
        )  # fmt: skip

    def save_model(self, folder: str | Path) -> dict[str, Any]:
        """Write the quantized model and return its path, as "folder", and the "bytes" written.

        The format is compressed-tensors, which Transformers, vLLM and `wakeful.load` read; or a
        file for llama.cpp, where the formats were chosen for it.

        Raises:
            WakefulError: the format does not support the scheme, or there are several schemes.
        """
        model, path = self.model, Path(folder)
        mixed = self.mixed_model
        if mixed is not None and mixed.engine.quantizes_embeddings:  # llama.cpp
            save_for_llama_cpp(
                mixed.full_model, quantized_layers(mixed.module) | dict(mixed.embeddings), path,
                tokenizer=model.wakeful_tokenizer,
                name=Path(self.source).name,
                lineage=f"Quantized from {self.source}. "
                f"{comparison_sentence(self._measured, mixed)}",
            )  # fmt: skip
            return {"folder": str(folder), "bytes": path.stat().st_size}
        # A decoder may have our own tokenizer, which has yet to be written in Transformers' form.
        is_decoder = as_decoder(model.module) is not None
        tokenizer = model.wakeful_tokenizer if is_decoder else model.save_tokenizer
        save_compressed(
            model.module, path, tokenizer, card=self._model_card(), stored=model.stored,
            context=model.context,
        )  # fmt: skip
        return {"folder": str(folder), "bytes": file_bytes(path)}

    def _model_card(self) -> str:
        """Return the README.md of the saved model: how it was quantized, and figures."""
        if self.mixed_model is not None:
            mixed = self.mixed_model
            formats = describe_formats(mixed) + describe_tuning(mixed)
            sentences = [comparison_sentence(self._measured, mixed), formats]
            if mixed.rotation is not None:
                sentences.append(f"Rotation: {mixed.rotation.description}")
            figures = model_card_rows(self._measured, MIXED)
        else:
            scheme = scheme_of(self.model.module)
            assert scheme is not None
            scales = f", {scheme.scales} scales of inputs" if scheme.inputs is not None else ""
            sentences = [f"Quantized by {scheme.definition}{scales}", self._describe_layers()]
            figures = () if self.damage is None else model_card_rows(self.damage)
        command = format_command_line("quantize", self.options, self.source)
        return quantized_card(
            self.model.name, self.source, command, done=sentences, figures=figures,
            rotates_inputs=rotates_inputs(self.model.module),
        )  # fmt: skip

    @property
    def _mixed_summary(self) -> dict[str, Any] | None:
        if self.mixed_model is None:
            return None
        return mixed_model_summary(self.mixed_model, self._measured)

    def _describe_layers(self) -> str:
        """Return a phrase on how many layers are quantized, and whether the head is."""
        if not self.layers:
            return "The weights stay in full precision"
        head = "too" if self.head else "stays in full precision"
        return f"{len(self.layers)} linear layers; the output head {head}"

    @property
    def _measured(self) -> Damage:
        if self.damage is None:
            raise WakefulError("nothing was measured: give quantize a text=...")
        return self.damage


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class QuantizationMatrix(MeasuredResult):
    """Damage of several schemes to several models, without the quantized models."""

    results: Mapping[str, Quantization]
    """Each model's result, by its name, without its quantized models."""

    @property
    def frame(self) -> pl.DataFrame:
        """The tables `Quantization.frame` of all models, joined."""
        return pl.concat(result.frame for result in self.results.values())

    @property
    def summary(self) -> dict[str, Any]:
        """Each model's summary, under "models"."""
        return {"models": [result.summary for result in self.results.values()]}

    @property
    def report(self) -> Report:
        """The report of the damage of each scheme to each model.

        Its section on the method has one row per topic, with the text that all models share or,
        where texts differ, that of each model.
        """
        methods = {name: result.method for name, result in self.results.items()}
        topics = dict.fromkeys(topic for method in methods.values() for topic in method)
        joined_method: dict[str, str] = {}
        for topic in topics:
            texts = {name: method[topic] for name, method in methods.items() if topic in method}
            joined_method[topic] = same_or_each(texts)
        return matrix_report(
            self._damages, method=joined_method,
            sources=[result.source for result in self.results.values()],
            options=next(iter(self.results.values())).options,
        )  # fmt: skip

    def save(self, folder: str | Path) -> Path:
        """Write the measurements of all models, with their page, to a new folder and return it."""
        damages = self._damages
        return self.write_run(
            folder, "quantize", next(iter(self.results.values())).machine,
            {"quantization.parquet": self.frame,
             "sequences.parquet": pl.concat(map(scheme_rows, damages))},
            models=[result.source for result in self.results.values()],
            schemes=list(damages[0].schemes),
        )  # fmt: skip

    @property
    def _damages(self) -> list[Damage]:
        return [result._measured for result in self.results.values()]
