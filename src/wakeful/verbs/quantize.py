"""The verb quantize: a model and a text in, a run directory with the damage of each scheme out."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
import torch
import transformers
from rich.table import Table as Grid
from torch import Tensor, nn

from wakeful.data.beginning import beginning_of
from wakeful.device import DTYPES, choose_device
from wakeful.display import Display
from wakeful.errors import WakefulError
from wakeful.evaluation.diagnosis import sequences_of
from wakeful.hf.quantized import file_bytes, save_quantised, state_bytes
from wakeful.loading.load import load
from wakeful.loading.model import Model
from wakeful.pages.charts import save_chart
from wakeful.pages.quantization.charts import charts
from wakeful.pages.quantization.findings import Damage, damage_grid, scheme_rows, summary
from wakeful.pages.quantization.page import write_quantization
from wakeful.quant.arithmetic import Arithmetic
from wakeful.quant.convert import linear_layers, quantize
from wakeful.quant.measure import measure
from wakeful.quant.schemes import ScaleKind, Scheme, parse_scheme
from wakeful.runs.run import Run, environment


def run_quantize(
    model: str,
    out: Path,
    *,
    show: Display,
    scheme: Sequence[str] = ("fine", "moderate", "coarse", "w4"),
    scales: Sequence[ScaleKind] = ("dynamic",),
    text: str = "",
    data: str = "python-stdlib",
    length: int = 512,
    num_sequences: int = 8,
    calibration_sequences: int = 4,
    save: str = "",
    arithmetic: Arithmetic = "integer",
    skip: Sequence[str] = (),
    bos: bool = False,
    device: str = "auto",
    dtype: str = "float32",
    trust_remote_code: bool = False,
    figures: Sequence[str] = (),
) -> tuple[Run, Grid]:
    """Measure what each scheme does to a model and write `out`, which must not exist.

    `out` gets quantization.parquet (tidy rows of every layer), sequences.parquet, summary.json and
    report.html; `save` the quantised model itself. Nothing is written before all is measured.
    """
    schemes = chosen_schemes(scheme, scales)
    _check(out, save, schemes, num_sequences, calibration_sequences)
    calibrated = any(each.scales == "static" for each in schemes)
    transformers.logging.disable_progress_bar()
    place = choose_device(device)
    show.note(f"loading {model}")
    loaded = load(model, device=place, dtype=DTYPES[dtype], trust_remote_code=trust_remote_code)
    layers = linear_layers(loaded.module, skip)
    sequences, calibration = _tokens(
        loaded, text or data, length=length, num_sequences=num_sequences, bos=bos, device=place,
        extra=calibration_sequences if calibrated else 0,
    )  # fmt: skip
    forms: dict[str, nn.Module] = {}
    for each in schemes:
        show.note(f"quantising {loaded.name}: {each}")
        given = calibration if each.scales == "static" else ()
        forms[str(each)] = quantize(
            loaded.module, each, arithmetic=arithmetic, calibration=given, skip=skip
        )
    measurement = measure(
        loaded.name,
        loaded.module,
        forms,
        sequences,
        progress=lambda done: show.note(f"sequence {done} of {num_sequences}"),
    )
    full = state_bytes(loaded.module)
    sizes = {name: state_bytes(form) for name, form in forms.items()}
    damage = Damage(measurement, {str(each): each for each in schemes}, full, sizes)
    method = _method(
        loaded, text or data, len(layers), length=length, num_sequences=num_sequences, bos=bos,
        dtype=dtype, arithmetic=arithmetic, skip=skip,
        calibration=calibration_sequences if calibrated else 0, machine=environment(place),
    )  # fmt: skip
    saved = _save(loaded, forms, save, model) if save else None
    _write(out, model, damage, method, list(layers), saved, figures, environment(place))
    return Run(out), damage_grid(damage)


def chosen_schemes(names: Sequence[str], scales: Sequence[ScaleKind]) -> list[Scheme]:
    """Return each scheme under each kind of scales; one that cannot be static is dynamic only.

    Raises:
        WakefulError: a scheme is named twice, or only static scales are asked of one that has none.
    """
    if not names or not scales:
        raise WakefulError("name at least one scheme and one kind of scales")
    found: list[Scheme] = []
    for name in names:
        for kind in scales:
            if kind == "static" and "dynamic" in scales and not parse_scheme(name).can_be_static:
                continue
            each = parse_scheme(name, kind)
            if each in found:
                raise WakefulError(f"scheme {each} is named twice")
            found.append(each)
    return found


def _check(out: Path, save: str, schemes: Sequence[Scheme], count: int, calibration: int) -> None:
    Run(out).refuse_existing("quantize")
    if count < 1 or calibration < 1:
        raise WakefulError(
            f"num_sequences and calibration_sequences must be at least 1, got {count} and "
            f"{calibration}"
        )
    if not save:
        return
    if len(schemes) > 1:
        raise WakefulError(
            f"--save writes one model, and {len(schemes)} schemes are asked for: name one with "
            "--scheme"
        )
    one, other = Path(save).resolve(), out.resolve()
    if one.is_relative_to(other) or other.is_relative_to(one):
        raise WakefulError(
            f"--save {save} and --out {out} are one folder or one inside the other: name two"
        )
    Run(save).refuse_existing("quantized")


def _tokens(
    loaded: Model,
    source: str,
    *,
    length: int,
    num_sequences: int,
    bos: bool,
    device: torch.device,
    extra: int,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the sequences to measure on and, after them, those to calibrate with."""
    count = num_sequences + extra
    found = sequences_of(
        loaded, beginning_of(source, length * count), length=length, num_sequences=count, bos=bos
    )
    tensors = [torch.tensor([tokens], device=device) for tokens in found]
    return tensors[:num_sequences], tensors[num_sequences:]


def _save(loaded: Model, forms: dict[str, nn.Module], folder: str, source: str) -> dict[str, Any]:
    (name, form), path = next(iter(forms.items())), Path(folder)
    fields = {"source": source, "scheme": name, "status": "done"}
    with Run.create(path, "quantized", fields) as run:
        save_quantised(form, run.path, name=loaded.name, context=loaded.context, bos=loaded.bos)
        loaded.save_tokenizer(run.path)
    return {"folder": folder, "bytes": file_bytes(path)}


def _method(
    loaded: Model,
    source: str,
    layers: int,
    *,
    length: int,
    num_sequences: int,
    bos: bool,
    dtype: str,
    arithmetic: str,
    skip: Sequence[str],
    calibration: int,
    machine: dict[str, Any],
) -> dict[str, str]:
    return {
        "Model": f"{loaded.name} ({loaded.architecture})",
        "Layers": f"{layers} linear layers; embeddings, norms and a head tied to an embedding stay"
        + (f", and what matches {', '.join(skip)}" if skip else ""),
        "Text": f"{source}, {num_sequences} sequences of {length} tokens from its beginning, the "
        "same for every scheme",
        "Perplexity": f"exp(Σ nll / Σ tokens); window {length}, stride {length}, BOS "
        + ("before every sequence" if bos else "none")
        + f"; full-precision model in {dtype}",
        "Errors": "± one standard error over sequences; an increase is paired, both models on the "
        "same tokens",
        "KL": "of the quantised model's next-token distribution from the full-precision one's, "
        "nats a token",
        "Layer error": "‖ŷ − y‖ / ‖y‖ of a layer given the full-precision input; of a block with "
        "all errors before it",
        "Kurtosis": "not excess (a Gaussian has 3), over channels, of the full-precision model",
        "Scales": "dynamic: of the tensor at hand, one sequence at a time"
        + (f"; static: the largest of {calibration} further sequences" if calibration else ""),
        "Arithmetic": f"{arithmetic}; grids in float32",
        "Machine": f"{machine['device_name']}, {machine['threads']} threads; torch "
        f"{machine['torch']}, Transformers {machine['transformers']}, wakeful {machine['wakeful']}",
    }


def _write(
    out: Path,
    model: str,
    damage: Damage,
    method: dict[str, str],
    layers: list[str],
    saved: dict[str, Any] | None,
    figures: Sequence[str],
    machine: dict[str, Any],
) -> None:
    measurement = damage.measurement
    fields = {"model": model, "schemes": list(damage.schemes), "status": "done"}
    with Run.create(out, "quantize", fields) as run:
        run.write_json("environment.json", machine)
        named = pl.lit(measurement.name).alias("model")
        run.write_frame("quantization.parquet", measurement.layers.select(named, pl.all()))
        run.write_frame("sequences.parquet", scheme_rows(damage).select(named, pl.all()))
        figures_found = summary(damage) | {"layers": layers, "method": method, "saved": saved}
        run.write_json("summary.json", json.loads(json.dumps(figures_found)))
        title = f"Quantisation of {measurement.name}"
        write_quantization(
            damage, run.path / "report.html", title=title, method=method, saved=saved
        )
        if figures:
            (run.path / "figures").mkdir()
            for name, chart in charts(damage):
                for suffix in figures:
                    save_chart(chart, run.path / "figures" / f"{name}.{suffix}")
