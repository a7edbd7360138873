"""Rows of a table that differ on purpose, and changes that are meant for all of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wakeful.config.schema import (
    Config,
    config_from_table,
    config_to_table,
    layouts_of,
    seeds_of,
    table_of,
    variants_of,
)
from wakeful.config.tables import Table, flattened, merged, nested
from wakeful.errors import WakefulError


@dataclass(frozen=True)
class Rows:
    """The variants of one comparison, and what the configurations that name them say of it."""

    name: str
    """That of the first configuration."""
    variants: dict[str, Config]
    layouts: tuple[str, ...]
    """The names of layouts that add to the page."""
    asked: frozenset[tuple[int, ...]]
    """The seeds that each configuration asks for."""

    def seeds(self, given: Sequence[int]) -> tuple[int, ...]:
        """Return the seeds that are given, or else those that the configurations ask for."""
        if given:
            return tuple(given)
        if len(self.asked) > 1:
            raise WakefulError("the configurations ask for different seeds: use --seeds")
        return next(iter(self.asked), ())


def rows_of(sources: Sequence[Config | Mapping[str, Any] | str | Path]) -> Rows:
    """Return the rows of `Config`s, presets' names, TOML files or tables, in their order."""
    stems: list[str] = []
    variants: dict[str, Config] = {}
    layouts: list[str] = []
    asked: set[tuple[int, ...]] = set()
    for source in sources:
        table = table_of(source)
        stems.append(_stem(source, table))
        asked.add(tuple(seeds_of(table)))
        layouts += [name for name in layouts_of(table) if name not in layouts]
        for name, entry in variants_of(stems[-1], table).items():
            if name in variants:
                raise WakefulError(f"two variants are called {name!r}; rename one")
            variants[name] = config_from_table(entry)
    return Rows(stems[0] if stems else "", variants, tuple(layouts), frozenset(asked))


def _stem(source: Config | Mapping[str, Any] | str | Path, table: Mapping[str, Any]) -> str:
    """Return the name of a configuration's one variant: its file's, or its own."""
    if isinstance(source, str | Path):
        return Path(source).name.removesuffix(".toml")  # a preset's may have a point
    return source.name if isinstance(source, Config) else str(table.get("name", "vanilla"))


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
                ratio = _ratio(key, own[key], before[key])
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
    return {key: value for key, value in flattened(config_to_table(config)) if key != "name"}


def config_differences(before: Config, after: Config) -> dict[str, tuple[Any, Any]]:
    """Return both values of each field, by its dotted name, in which two configurations differ."""
    one, other = ({"name": each.name, **flat(each)} for each in (before, after))
    return {key: (one[key], other[key]) for key in one if one[key] != other[key]}


_WITHOUT_RATIO = ("seed", "beta1", "beta2")
"""Numbers of which a multiple means nothing."""


def _ratio(key: str, own: object, base: object) -> float | None:
    if key.rpartition(".")[2] in _WITHOUT_RATIO:
        return None
    numbers = type(own) in (int, float) and type(base) in (int, float)
    return own / base if numbers and own and base else None  # pyright: ignore


def _times(value: Any, ratio: float) -> Any:
    if isinstance(value, int):
        return max(1, round(value * ratio)) if value else value
    return value * ratio
