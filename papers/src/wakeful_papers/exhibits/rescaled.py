"""Rows of an exhibit at another scale: numbers in which rows differ keep their ratios."""

from collections.abc import Mapping
from typing import Any

from wakeful.config.rows import flatten_config
from wakeful.config.schema import Config, config_from_table, config_to_table
from wakeful.config.tables import TomlTable


def rescale_rows(rows: Mapping[str, Config], base: Config, new_base: Config) -> dict[str, Config]:
    """Return variants that differ from `new_base` as `rows` differ from `base`.

    A field that is equal in a row and in `base` takes the value of `new_base`. A number that
    differs from `base` keeps its ratio to it: a row with 8 times the steps trains for 8 times the
    new steps. Any other field that differs keeps the row's value.

    Raises:
        WakefulError: a row's value is out of its range.
    """
    old_values, new_values = flatten_config(base), flatten_config(new_base)
    changed = [key for key in new_values if new_values[key] != old_values[key]]
    variants: dict[str, Config] = {}
    for name, row in rows.items():
        row_values = flatten_config(row)
        table = config_to_table(row)
        for key in changed:
            value = new_values[key]
            if row_values[key] != old_values[key]:
                ratio = _ratio(key, row_values[key], old_values[key])
                value = row_values[key] if ratio is None else _scale(value, ratio)
            _set_field(table, key, value)
        variants[name] = config_from_table(table)
    return variants


def _set_field(table: TomlTable, name: str, value: Any) -> None:
    """Set the entry with a dotted name in a table, such as "steps" in table["train"]."""
    *sections, last = name.split(".")
    for section in sections:
        table = table.setdefault(section, {})
    table[last] = value


_WITHOUT_RATIO = ("seed", "beta1", "beta2")
"""Last parts of the names of numbers that are never scaled."""


def _ratio(key: str, value: object, base_value: object) -> float | None:
    """Return value / base_value of a field; None if there is no ratio to keep: for values that
    are not numbers, for 0, which stands for "none" or "automatic", and for seeds and betas.
    """
    if key.rpartition(".")[2] in _WITHOUT_RATIO:
        return None
    # Not isinstance: to it True is a number.
    if type(value) not in (int, float) or type(base_value) not in (int, float):
        return None
    return value / base_value if value and base_value else None  # pyright: ignore


def _scale(value: Any, ratio: float) -> Any:
    """Return a number times a ratio; a whole number stays whole, and at least 1 unless it is 0."""
    if isinstance(value, int):
        return max(1, round(value * ratio)) if value else value
    return value * ratio
