"""What verbs find, invented: enough of it for a page, without a model."""

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

from wakeful.config.tables import to_table
from wakeful.diagnosis.measure import ModelDiagnosis
from wakeful.inheritance.outcome import Arm, InheritanceSummary, Point, Reference
from wakeful.inheritance.recipe import Recipe
from wakeful.probes.attention import FirstAttention
from wakeful.probes.base import SCHEMA
from wakeful.quantization import parse_scheme
from wakeful.quantization.damage import Damage
from wakeful.quantization.measure import LAYER_SCHEMA, Measurement, Totals
from wakeful.runs.records import DataFacts
from wakeful.runs.run import Run, environment

TOKENS = 24
"""Tokens whose attention is kept head by head."""
_HEADS = (
    ("first_key_mass_without_row_0", "paper", "all", (0, 1)),
    ("first_key_mass_with_row_0", "paper", "all", (0, 1)),
    ("first_key_share_without_row_0", "paper", "all", (0, 1)),
    ("first_key_share_with_row_0", "paper", "all", (0, 1)),
    ("entropy", "per_head", "all", (0, 4.8)),
    ("rank", "paper", "all", (1, 99)),
    ("mass_columns", "paper", "all", (1, 99)),
)
_LAYERS = (
    ("entropy", "code", "all", (1.8, 4.6)),
    ("lazy", "paper", "all", (0, 0)),
    ("near_rank_1", "paper", "all", (3, 3)),
    ("value_drain", "paper", "first", (0.1, 1.4)),
    ("value_eigenvalue", "paper", "1", (0.1, 98)),
    ("kurtosis", "paper", "first", (4, 560)),
    ("kurtosis", "paper", "rest", (4, 160)),
    ("max_activation", "paper", "first", (0.4, 24073)),
    ("max_activation", "paper", "rest", (0.4, 273)),
    ("residual_peak", "paper", "first", (1, 173)),
    ("token_similarity", "paper", "all", (0.1, 0.7)),
    ("block_influence", "paper", "all", (0, 1)),
    ("angular_distance", "paper", "last", (0, 0.5)),
    *(("top_importance", "code", str(k), (0, 1)) for k in range(1, 6)),
    *(("value_spectrum", "paper", str(k), (0.01, 1)) for k in range(1, 33)),
    *(("outlier_channel", f"channel {n}", "0", (1, 24241)) for n in range(5)),
)


@cache
def diagnosis(
    name: str = "made", *, layers: int = 2, heads: int = 2, groups: int = 1
) -> ModelDiagnosis:
    """Return a diagnosis with every metric that a page draws; the values are uniform."""
    random = np.random.default_rng(sum(map(ord, name)))

    def rows() -> Iterator[tuple[object, ...]]:
        def row(
            layer: int | None, head: int | None, position: str, metric: str, variant: str,
            within: tuple[float, float], kind: str = "exact",
        ) -> tuple[object, ...]:  # fmt: skip
            value, error = random.uniform(*within), random.uniform(0, 0.1 * within[1])
            return layer, head, position, metric, variant, value, error, kind

        for layer in range(layers):
            for metric, variant, position, within in _HEADS:
                for head in (*range(heads), None):
                    yield row(layer, head, position, metric, variant, within)
            for metric, variant, position, within in _LAYERS:
                yield row(layer, None, position, metric, variant, within)
            for head in range(groups):
                yield row(layer, head, "first", "value_drain", "per_head", (0, 2))

    places = [(n, m) for n in range(layers) for m in range(heads)]
    seen = [(*place, *pair) for place in places for pair in _pairs(TOKENS)]
    attention = pl.DataFrame(seen, schema=list(FirstAttention.COLUMNS)[:-1], orient="row")
    return ModelDiagnosis(
        name=name, architecture="LlamaForCausalLM", num_layers=layers, length=128,
        num_sequences=2, loss=3.8, loss_error=0.16,
        rows=pl.DataFrame(list(rows()), schema=SCHEMA, orient="row"),
        tokens=tuple(f" word{n}" for n in range(128)),
        attention=attention.with_columns(value=pl.Series(random.uniform(size=len(seen)))),
    )  # fmt: skip


def _pairs(length: int) -> Iterator[tuple[int, int]]:
    return ((query, key) for query in range(length) for key in range(query + 1))


def damage(name: str, *, lost: float, schemes: Sequence[str] = ("fine",)) -> Damage:
    """Return what schemes did to a model that loses so many nats per token by each."""
    measured = [
        (kind, scheme, position, metric, value)
        for scheme in schemes
        for kind, position, metric, value in (
            *(("mlp", at, "relative_error", 0.1) for at in ("all", "first", "rest")),
        )
    ]
    rows = [
        (scheme, f"layers.{layer}.{kind}", layer, kind, position, metric, value, None)
        for layer in range(2)
        for kind, scheme, position, metric, value in (
            *measured,
            *(("mlp", "", at, "input_kurtosis", 5.0 + layer) for at in ("first", "rest")),
        )
    ]
    layers = pl.DataFrame(rows, schema=LAYER_SCHEMA, orient="row")
    quantized = Totals([3.0 + 3.1 * lost, 4.0 + 2.9 * lost], [0.1, 0.2])
    each = dict.fromkeys(schemes, quantized)
    found = Measurement(name, [3, 3], Totals([3.0, 4.0]), each, layers)
    parsed = {scheme: parse_scheme(scheme) for scheme in schemes}
    sizes = dict.fromkeys(schemes, 2)
    return Damage(found, parsed, 8, sizes)


def inheritance(folder: Path) -> Path:
    """Write what a page needs of an inheritance: an heir and a baseline beside it."""

    def arm(name: str, loss: float, **more: Any) -> Arm:
        points = [
            Point(run=name, step=n, tokens=256 * n, loss=loss + 1 / (1 + n), standard_error=0.02)
            for n in range(3)
        ]
        return Arm(
            arm=name, heir=name == "heir-2", summary="the first layers", runs=(name,), depth=2,
            layers=(0, 1), steps=2, tokens=512, seconds=3.0, all_steps=2, all_tokens=512,
            parameters=1000, cache_bytes_per_token=32, loss=loss,
            standard_error=0.021, start_loss=5.0, minus_reference=loss - 3.0,
            minus_reference_error=0.012, parity=False, curve=tuple(points), **more,
        )  # fmt: skip

    summary = InheritanceSummary(
        reference=Reference(
            name="big", layers=4, parameters=2000, cache_bytes_per_token=64, loss=3.0,
            standard_error=0.02, tokens=None, seconds=None,
        ),
        final="heir-2",
        arms=(
            arm("heir-2", 3.2, minus_heir=0.0, minus_heir_error=None),
            arm("random", 3.1, minus_heir=-0.1, minus_heir_error=0.013),
        ),
        recipe=Recipe(reference="big", rule="angle", layers=(0, 1)),
        data=DataFacts(
            source="book.txt", corpus_sha256="", tokenizer="", train_tokens=9000,
            validation_tokens=1000, vocab_size=280, train_sha256="", validation_sha256="",
        ),
    )  # fmt: skip
    with Run.create(folder, "inherit", {"reference": "big", "status": "done"}) as run:
        run.write_json("summary.json", to_table(summary))
        run.write_json("environment.json", environment(torch.device("cpu")))
    return folder
