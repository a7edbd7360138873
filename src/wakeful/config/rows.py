"""Rows of a comparison, and changes that apply to all of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wakeful.config.schema import (
    Config,
    config_from_table,
    config_table,
    config_to_table,
    layouts_of,
    seeds_of,
    variants_of,
)
from wakeful.config.tables import TomlTable, flatten_table
from wakeful.errors import WakefulError


@dataclass(frozen=True)
class ComparisonRows:
    """Variants of one comparison, with the layouts and seeds that their files name."""

    name: str
    """Name of the first configuration."""
    variants: dict[str, Config]
    layouts: tuple[str, ...]
    """Names of layouts that add sections to the page."""
    seed_sets: frozenset[tuple[int, ...]]
    """Seeds of each configuration."""

    def seeds(self, seeds: Sequence[int]) -> tuple[int, ...]:
        """Return these seeds, or those of the configurations where none are given."""
        if seeds:
            return tuple(seeds)
        if len(self.seed_sets) > 1:
            raise WakefulError("the configurations ask for different seeds: use --seeds")
        return next(iter(self.seed_sets), ())


def rows_of(sources: Sequence[Config | Mapping[str, Any] | str | Path]) -> ComparisonRows:
    """Return the rows of `Config`s, presets' names, TOML files or tables, in their order."""
    stems: list[str] = []
    variants: dict[str, Config] = {}
    layouts: list[str] = []
    seed_sets: set[tuple[int, ...]] = set()
    for source in sources:
        table = config_table(source)
        stems.append(_stem(source, table))
        seed_sets.add(tuple(seeds_of(table)))
        layouts += [name for name in layouts_of(table) if name not in layouts]
        for name, entry in variants_of(stems[-1], table).items():
            if name in variants:
                raise WakefulError(f"two variants are called {name!r}; rename one")
            variants[name] = config_from_table(entry)
    return ComparisonRows(stems[0] if stems else "", variants, tuple(layouts), frozenset(seed_sets))


def _stem(source: Config | Mapping[str, Any] | str | Path, table: Mapping[str, Any]) -> str:
    """Return the name of a configuration without a [variants] table: its file's, or its own."""
    if isinstance(source, str | Path):
        return Path(source).name.removesuffix(".toml")  # a preset's may have a point
    return source.name if isinstance(source, Config) else str(table.get("name", "vanilla"))


def rescaled(
    rows: Mapping[str, Config], base: Config, to: Config, *, strict: bool = False
) -> dict[str, Config]:
    """Return rows that differ from `to` as the given rows differ from `base`.

    A field that is equal in a row and in `base` takes the value of `to`. A number that differs from
    `base` keeps its ratio: a row of 8 times the steps trains for 8 times the new steps. Any other
    field that differs stays as it is in the row.

    Raises:
        WakefulError: a row's value is out of its range; with `strict` also where `to` changes a
            field in which a row differs and that has no ratio.
    """
    before, after = flat(base), flat(to)
    changed = [key for key in after if after[key] != before[key]]
    variants: dict[str, Config] = {}
    for name, row in rows.items():
        row_values = flat(row)
        table: TomlTable = config_to_table(row)
        for key in changed:
            value = after[key]
            if row_values[key] != before[key]:
                ratio = _ratio(key, row_values[key], before[key])
                if ratio is None and strict:
                    raise WakefulError(
                        f"{key} differs between the rows on purpose ({row_values[key]!r} in "
                        f"{name}): name the row that is to change, as --variants.NAME.{key}"
                    )
                value = row_values[key] if ratio is None else _times(value, ratio)
            *sections, last = key.split(".")
            section = table
            for part in sections:
                section = section.setdefault(part, {})
            section[last] = value
        variants[name] = config_from_table(table)
    return variants


def flat(config: Config) -> dict[str, Any]:
    """Return a configuration's fields by dotted name, without its own name."""
    return {key: value for key, value in flatten_table(config_to_table(config)) if key != "name"}


def config_differences(before: Config, after: Config) -> dict[str, tuple[Any, Any]]:
    """Return the fields in which two configurations differ, by dotted name: both values."""
    first, second = ({"name": config.name, **flat(config)} for config in (before, after))
    return {key: (first[key], second[key]) for key in first if first[key] != second[key]}


_WITHOUT_RATIO = ("seed", "beta1", "beta2")
"""Numbers that are not scaled."""


def _ratio(key: str, own: object, base: object) -> float | None:
    if key.rpartition(".")[2] in _WITHOUT_RATIO:
        return None
    numbers = type(own) in (int, float) and type(base) in (int, float)
    return own / base if numbers and own and base else None  # pyright: ignore


def _times(value: Any, ratio: float) -> Any:
    if isinstance(value, int):
        return max(1, round(value * ratio)) if value else value
    return value * ratio
