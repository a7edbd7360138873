"""Whether files that others wrote hold what a report reads from them."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import polars as pl

from wakeful.data.parquet_header import fault_in_parquet
from wakeful.errors import WakefulError

Kinds = type | tuple[type, ...]
Fields = Mapping[str, Kinds]
_NUMBER = (int, float)
_LARGEST_LOSS = 1e100
"""Nats a token; the squares of larger ones are no numbers."""
_MOST_ROWS = 2**24
"""Of a table; a small file can announce any number."""

SUMMARY: Fields = {
    "parameters.total": int,
    "kv_cache_bytes_per_token": _NUMBER,
    "tokens_per_second": _NUMBER,
    "seconds": _NUMBER,
    "validation.num_windows": int,
    "samples": list,
}
DATA: Fields = {
    "source": (str, list),
    "corpus_sha256": str,
    "tokenizer": str,
    "train_tokens": int,
    "validation_tokens": int,
    "vocab_size": int,
}
COMPARISON: Fields = {"name": str, "baseline": str, "variants": list, "seeds": list}
ENVIRONMENT: Fields = {
    "device_name": str, "threads": int, "torch": str, "python": str, "wakeful": str,
}  # fmt: skip

Columns = Mapping[str, type]
"""The polars type of each column."""
METRICS: Columns = {"kind": pl.String, "step": pl.Int64, "loss": pl.Float64, "tokens": pl.Int64}
VALIDATION: Columns = {"window": pl.Int64, "loss": pl.Float64, "tokens": pl.Int64}


def check_fields(path: Path, table: Mapping[str, Any], fields: Fields) -> None:
    """Raise `WakefulError` unless `table`, read from `path`, has these (dotted) fields."""
    for key, kinds in fields.items():
        value: Any = table
        for part in key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                raise WakefulError(f"{path} has no {key}; was it written by this wakeful?")
            value = value[part]
        if not _is(value, kinds):
            raise WakefulError(f"{path}: {key} cannot be {_shown(value)}")


def check_items(path: Path, table: Mapping[str, Any], fields: Fields) -> None:
    """Raise `WakefulError` unless the lists in these fields hold nothing but such items."""
    for key, kinds in fields.items():
        for item in table[key]:
            if not _is(item, kinds):
                raise WakefulError(f"{path}: {key} cannot hold {_shown(item)}")


def check_samples(path: Path, samples: Iterable[Any]) -> None:
    """Raise `WakefulError` unless every sample has a prompt and a text."""
    for number, sample in enumerate(samples, start=1):
        if not isinstance(sample, Mapping):
            raise WakefulError(f"{path}: sample {number} cannot be {_shown(sample)}")
        check_fields(path, sample, {"prompt": str, "text": str})


def read_frame(path: Path, columns: Columns) -> pl.DataFrame:
    """Return a parquet file's frame, whose `columns` have these types.

    Raises:
        WakefulError: it is missing, damaged, or without one of the columns.
    """
    if not path.is_file():
        raise WakefulError(f"{path} is missing: is the run finished?")
    try:
        fault = fault_in_parquet(path, most_rows=_MOST_ROWS)
        if fault:
            raise WakefulError(f"{path} cannot be read: {fault}")
        table = pl.scan_parquet(path, glob=False, hive_partitioning=False)
        _check_columns(path, table.collect_schema(), columns)
        frame = table.select(*columns).collect()
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError) as error:
        raise WakefulError(f"{path} cannot be read: {_first_line(error)}") from None
    return typed(path, frame, columns)


def typed(path: Path, frame: pl.DataFrame, columns: Columns) -> pl.DataFrame:
    """Return the frame with `columns` cast to their types, or raise `WakefulError`."""
    _check_columns(path, frame.schema, columns)
    try:
        return frame.with_columns(pl.col(name).cast(kind) for name, kind in columns.items())
    except pl.exceptions.PolarsError as error:
        raise WakefulError(f"{path} holds other types: {_first_line(error)}") from None


def _check_columns(path: Path, schema: Mapping[str, Any], columns: Columns) -> None:
    for name in columns:
        if name not in schema:
            raise WakefulError(f"{path} has no column {name!r}")
        if schema[name].is_nested():
            raise WakefulError(f"{path} holds other types: {name} is {schema[name]}")


def check_windows(path: Path, validation: pl.DataFrame) -> None:
    """Raise `WakefulError` unless every window has a finite loss and at least one token."""
    columns = validation.select("window", "loss", "tokens")
    if columns.is_empty():
        raise WakefulError(f"{path} has no validation windows")
    sound = pl.col("loss").is_finite() & (pl.col("loss").abs() < _LARGEST_LOSS)
    good = columns.select(sound & (pl.col("tokens") > 0)).to_series()
    if columns.null_count().sum_horizontal().item() or not good.all():
        raise WakefulError(f"{path}: a validation window has no finite loss or no tokens")
    if columns["window"].is_duplicated().any():
        raise WakefulError(f"{path} has a validation window twice")


def _is(value: Any, kinds: Kinds) -> bool:
    wrong = isinstance(value, _NUMBER) and (isinstance(value, bool) or not _finite(value))
    return isinstance(value, kinds) and (not wrong or kinds is bool)


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number past every float
        return False


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) < 60 else f"{text[:57]}..."


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
