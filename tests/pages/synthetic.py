"""What verbs find, invented: enough of it for a page, without a model."""

from collections.abc import Iterator
from functools import cache

import numpy as np
import polars as pl

from wakeful.evaluation.diagnosis import Diagnosis
from wakeful.probes.base import SCHEMA
from wakeful.probes.patterns import FirstAttention

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
    ("leading_key", "code", "all", (0, 0)),
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
    name: str = "made", *, layers: int = 2, heads: int = 2, groups: int = 1, pictured: int = 2
) -> Diagnosis:
    """Return a diagnosis with every metric that a page draws; the values are uniform.

    `pictured` layers have pictures of up to four heads' attention.
    """
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
        for layer in range(pictured):
            for head in range(min(4, heads)):
                for query, key in _pairs(32):
                    place = f"{query},{key}"
                    yield row(layer, head, place, "attention_picture", "paper", (0, 1))
        for query, key in _pairs(48):
            yield row(None, None, f"{query},{key}", "mean_attention", "paper", (0, 1))
        for token in range(32):
            for channel in range(192):
                place = f"{token},{channel}"
                yield row(None, None, place, "hidden_picture", "paper", (2, 14211))

    places = [(n, m) for n in range(layers) for m in range(heads)]
    seen = [(*place, *pair) for place in places for pair in _pairs(TOKENS)]
    attention = pl.DataFrame(seen, schema=list(FirstAttention.COLUMNS)[:-1], orient="row")
    return Diagnosis(
        name=name, architecture="LlamaForCausalLM", num_layers=layers, length=128,
        num_sequences=2, loss=3.8, loss_error=0.16,
        rows=pl.DataFrame(list(rows()), schema=SCHEMA, orient="row"),
        tokens=tuple(f" word{n}" for n in range(128)),
        attention=attention.with_columns(value=pl.Series(random.uniform(size=len(seen)))),
    )  # fmt: skip


def _pairs(length: int) -> Iterator[tuple[int, int]]:
    return ((query, key) for query in range(length) for key in range(query + 1))
