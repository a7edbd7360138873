"""Results of quantize: quantized models, and the damage of one or several."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from wakeful.config.commands import command_of
from wakeful.config.reading import LENGTH
from wakeful.errors import WakefulError
from wakeful.loading.card import quantized_card
from wakeful.loading.model import Model
from wakeful.probes.running import as_decoder
from wakeful.quantization.compressed import file_bytes, save_compressed
from wakeful.quantization.convert import quantized_layers, scheme_of
from wakeful.quantization.damage import Damage, damage_summary, predicts, scheme_rows
from wakeful.quantization.gguf_file import save_for_llama_cpp
from wakeful.quantization.matrix_report import matrix_report
from wakeful.quantization.options import QuantizeOptions
from wakeful.quantization.report import before_and_after, quantization_report
from wakeful.quantization.sensitivity import LayerCost, cost_frame
from wakeful.quantization.smallest import MIXED, Smallest
from wakeful.quantization.smallest_report import (
    format_words,
    proof_words,
    smallest_summary,
    tuning_words,
)
from wakeful.reports.result import MeasuredResult, same_or_each
from wakeful.reports.value import Report
from wakeful.runs.run import Environment


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Quantization(MeasuredResult):
    """Quantized models, and what quantizing did to a text where one was given."""

    models: Mapping[str, Model]
    """The quantized models by scheme: each runs, generates and is measured as any other."""
    source: str
    damage: Damage | None
    method: Mapping[str, str]
    layers: tuple[str, ...]
    options: QuantizeOptions
    """Options of the call."""
    head: bool
    """True where the output head is quantized too; one that is tied to the embedding stays."""
    machine: Environment
    costs: tuple[LayerCost, ...] = ()
    """Cost of each layer, where requested."""
    smallest: Smallest | None = None
    """The formats that were chosen, where that was asked for."""
    saved: Mapping[str, Any] | None = None
    """The folder that the quantized model was written to, and its bytes."""

    @property
    def model(self) -> Model:
        """The quantized model, where there is one scheme."""
        if len(self.models) > 1:
            raise WakefulError(
                f"there are {len(self.models)} quantized models: models[...] of "
                f"{', '.join(self.models)}"
            )
        return next(iter(self.models.values()))

    @property
    def frame(self) -> pl.DataFrame:
        """Rows of every layer: its relative error and its input's kurtosis, by scheme."""
        measurement = self._measured.measurement
        return measurement.layers.select(pl.lit(measurement.name).alias("model"), pl.all())

    @property
    def summary(self) -> dict[str, Any]:
        """Perplexity, size and the figures of every scheme, `layers`, `method`, in words."""
        figures = damage_summary(self._measured) | {
            "layers": list(self.layers), "method": dict(self.method), "saved": self.saved,
            "costs": cost_frame(self.costs, self._measured).to_dicts() if self.costs else [],
            "smallest": self._formats,
        }  # fmt: skip
        return json.loads(json.dumps(figures))

    @property
    def report(self) -> Report:
        """Cost of each scheme, the worst layers, the bytes saved; or that nothing was
        measured.
        """
        if self.damage is None:
            lines = [f"{scheme}: {self._layers}; not measured: no text was given"
                    for scheme in self.models]  # fmt: skip
            return Report(f"Quantization of {self.source}", lines, [], [])
        context = min((model.context for model in self.models.values()), default=LENGTH)
        return quantization_report(
            self.damage, method=self.method, saved=self.saved, source=self.source,
            options=self.options, context=context, costs=self.costs, smallest=self.smallest,
        )  # fmt: skip

    def save(self, folder: str | Path) -> Path:
        """Write the damage's run directory; `save_model` writes the model."""
        damage = self._measured
        files = {"quantization.parquet": self.frame, "sequences.parquet": scheme_rows(damage)}
        if self.costs:
            files["sensitivity.parquet"] = cost_frame(self.costs, damage)
        return self.write_run(
            folder, "quantize", self.machine, files, model=self.source,
            schemes=list(damage.schemes),
        )  # fmt: skip

    def save_model(self, folder: str | Path) -> dict[str, Any]:
        """Write the quantized model as compressed-tensors, which Transformers, vLLM and
        `wakeful.load` read, or for llama.cpp as one file; return the folder and its bytes.

        Raises:
            WakefulError: the format has no place for the scheme, or there are several.
        """
        model, path = self.model, Path(folder)
        if self.smallest is not None and self.smallest.target.tables:
            chosen = self.smallest
            save_for_llama_cpp(
                chosen.plain, quantized_layers(chosen.module) | dict(chosen.tables), path,
                tokenizer=model.wakeful_tokenizer,
                name=Path(self.source).name,
                lineage=f"Quantized from {self.source}. {proof_words(self._measured)}",
            )  # fmt: skip
            return {"folder": str(folder), "bytes": path.stat().st_size}
        is_decoder = as_decoder(model.module) is not None  # whose tokenizer may be of a run
        tokenizer = model.wakeful_tokenizer if is_decoder else model.save_tokenizer
        save_compressed(
            model.module, path, tokenizer, card=self._card(), stored=model.stored,
            context=model.context,
        )  # fmt: skip
        return {"folder": str(folder), "bytes": file_bytes(path)}

    def _card(self) -> str:
        scheme = scheme_of(self.model.module)
        assert scheme is not None
        scales = f", {scheme.scales} scales of inputs" if scheme.inputs is not None else ""
        done = [f"Quantized by {scheme.definition}{scales}", self._layers]
        figures = () if self.damage is None else before_and_after(self.damage)
        if self.smallest is not None:
            formats = format_words(self.smallest) + tuning_words(self.smallest)
            done = [proof_words(self._measured), formats]
            figures = before_and_after(self._measured, MIXED)
        return quantized_card(
            self.model.name, self.source, command_of("quantize", self.options, self.source),
            done=done, figures=figures,
        )  # fmt: skip

    @property
    def _formats(self) -> dict[str, Any] | None:
        if self.smallest is None:
            return None
        return smallest_summary(self.smallest, self._measured)

    @property
    def _layers(self) -> str:
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
    """Every model's own result, by its name, without models."""

    @property
    def frame(self) -> pl.DataFrame:
        """The rows of `Quantization.frame` of all models, one after another."""
        return pl.concat(result.frame for result in self.results.values())

    @property
    def summary(self) -> dict[str, Any]:
        """`models` with each one's summary as alone, and `kurtosis_predicts`."""
        figures = {
            "models": [result.summary for result in self.results.values()],
            "kurtosis_predicts": predicts(self._damages),
        }
        return json.loads(json.dumps(figures))

    @property
    def report(self) -> Report:
        """Damage of each scheme to each model, and whether kurtosis predicts it."""
        keys = list(dict.fromkeys(key for result in self.results.values() for key in result.method))
        method = {
            key: same_or_each({n: result.method[key] for n, result in self.results.items()
                               if key in result.method})
            for key in keys
        }  # fmt: skip
        return matrix_report(
            self._damages, method=method, heads=self._heads,
            sources=[result.source for result in self.results.values()],
            options=next(iter(self.results.values())).options,
        )  # fmt: skip

    @property
    def _heads(self) -> str:
        """Sentence on the models whose output heads are quantized; empty where all are alike."""
        quantized = [name for name, result in self.results.items() if result.head]
        rest = [name for name, result in self.results.items() if not result.head]
        if not quantized or not rest:
            return ""
        return (
            f"The output head of {', '.join(quantized)} is quantized too, that of "
            f"{', '.join(rest)} is tied to the embedding and stays: --skip '*head' leaves all of "
            "them out."
        )

    def save(self, folder: str | Path) -> Path:
        """Write the damage of all models with its page to a new folder; return it."""
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
