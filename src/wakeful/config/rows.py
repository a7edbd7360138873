"""Rows of a table that differ on purpose, and changes that are meant for all of them."""

from collections.abc import Mapping
from typing import Any

from wakeful.config.schema import Config, config_from_table, config_to_table
from wakeful.config.tables import Table, merged
from wakeful.errors import WakefulError


def rescaled(
    rows: Mapping[str, Config], base: Config, to: Config, *, strict: bool = False
) -> dict[str, Config]:
    """Return rows, each a variation of `base`, as the same variations of `to`.

    A field that a row has as `base` does becomes that of `to`. A number in which a row differs from
    `base` keeps its ratio: a row of 8 times the steps trains for 8 times the new steps. Anything
    else in which it differs stays the row's own.

    Raises:
        WakefulError: a row's value is out of its range; with `strict` also where `to` changes a
            field in which a row differs and that has no ratio.
    """
    before, after = flat(base), flat(to)
    changed = [key for key in after if after[key] != before[key]]
    found: dict[str, Config] = {}
    for name, row in rows.items():
        own = flat(row)
        table: Table = config_to_table(row)
        for key in changed:
            value = after[key]
            if own[key] != before[key]:
                ratio = _ratio(own[key], before[key])
                if ratio is None and strict:
                    raise WakefulError(
                        f"{key} differs between the rows on purpose ({own[key]!r} in {name}): name "
                        f"the row that is to change, as --variants.NAME.{key}"
                    )
                value = own[key] if ratio is None else _times(value, ratio)
            table = merged(table, nested(key, value))
        found[name] = config_from_table(table)
    return found


def flat(config: Config) -> dict[str, Any]:
    """Return a configuration's fields by their dotted names; its own name is not among them."""
    found: dict[str, Any] = {}

    def walk(table: Mapping[str, Any], place: str) -> None:
        for key, value in table.items():
            if isinstance(value, Mapping):
                walk(value, f"{place}{key}.")
            else:
                found[f"{place}{key}"] = value

    walk(config_to_table(config), "")
    del found["name"]
    return found


def nested(name: str, value: Any) -> Table:
    """Return the table in which a dotted name has this value."""
    for part in reversed(name.split(".")):
        value = {part: value}
    return value


def _ratio(own: object, base: object) -> float | None:
    numbers = type(own) in (int, float) and type(base) in (int, float)
    return own / base if numbers and own and base else None  # pyright: ignore


def _times(value: Any, ratio: float) -> Any:
    if isinstance(value, int):
        return max(1, round(value * ratio)) if value else value
    return value * ratio
