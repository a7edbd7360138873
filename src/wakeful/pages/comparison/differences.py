"""What the runs of a comparison do not have in common, besides their losses."""

from collections.abc import Mapping
from typing import Any

from wakeful.config.schema import config_to_table
from wakeful.pages.comparison.reading import Comparison

_EXPECTED = ("name", "train.seed")


def differing_fields(comparison: Comparison) -> list[tuple[str, list[str]]]:
    """Return each configuration field that differs between variants, with each variant's value."""
    tables = [
        dict(_flat(config_to_table(comparison.of(variant)[0].config)))
        for variant in comparison.variants
    ]
    return [
        (field, [_shown(table[field]) for table in tables])
        for field in tables[0]
        if field not in _EXPECTED and any(table[field] != tables[0][field] for table in tables)
    ]


def same_batches(comparison: Comparison) -> bool:
    """Say whether runs of one seed saw the same tokens at the same step.

    The order is a function of the seed, the training tokens, the length and the batch size.
    """
    return (
        len(
            {
                (
                    run.config.train.length,
                    run.config.train.batch_size,
                    run.summary["data"]["train_tokens"],
                )
                for run in (*comparison.runs, *comparison.partial)
            }
        )
        == 1
    )


def machines(comparison: Comparison) -> list[str]:
    """Describe each different machine and version that finished runs were trained on."""
    described = (
        f"{run.environment['device_name']}, {run.environment['threads']} threads; "
        f"torch {run.environment['torch']}, Python {run.environment['python']}, "
        f"wakeful {run.environment['wakeful']}"
        for run in comparison.runs
    )
    return list(dict.fromkeys(described))


def _flat(table: Mapping[str, Any], place: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for key, value in table.items():
        where = f"{place}{key}"
        rows += _flat(value, f"{where}.") if isinstance(value, Mapping) else [(where, value)]
    return rows


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)
