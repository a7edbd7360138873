"""Rows of a comparison, and changes that apply to all of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wakeful.config.schema import (
    Config,
    config_from_table,
    config_to_table,
    load_config_table,
    read_layouts,
    read_seeds,
    split_variants,
)
from wakeful.config.tables import flatten_table, merge_tables
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

    def choose_seeds(self, seeds: Sequence[int]) -> tuple[int, ...]:
        """Return the given seeds or, if there are none, those that the configurations name.

        Raises:
            WakefulError: no seeds are given and the configurations name different ones.
        """
        if seeds:
            return tuple(seeds)
        if len(self.seed_sets) > 1:
            raise WakefulError("the configurations ask for different seeds: use --seeds")
        return next(iter(self.seed_sets), ())


def read_rows(sources: Sequence[Config | Mapping[str, Any] | str | Path]) -> ComparisonRows:
    """Return the variants to compare, with seeds and layouts, from configurations in any form.

    A source is a `Config`, a preset's name, a TOML file or a table. It has one variant, or several
    in a table [variants]; all keep the order given.

    Raises:
        WakefulError: a configuration does not exist or is wrong, or two variants have one name.
    """
    names: list[str] = []
    variants: dict[str, Config] = {}
    layouts: list[str] = []
    seed_sets: set[tuple[int, ...]] = set()
    for source in sources:
        table = load_config_table(source)
        names.append(_default_name(source, table))
        seed_sets.add(tuple(read_seeds(table)))
        layouts += [layout for layout in read_layouts(table) if layout not in layouts]
        for name, variant_table in split_variants(names[-1], table).items():
            if name in variants:
                raise WakefulError(f"two variants are called {name!r}; rename one")
            variants[name] = config_from_table(variant_table)
    return ComparisonRows(names[0] if names else "", variants, tuple(layouts), frozenset(seed_sets))


def _default_name(source: Config | Mapping[str, Any] | str | Path, table: Mapping[str, Any]) -> str:
    """Return the name of a configuration without a [variants] table: its file's, or its own."""
    if isinstance(source, str | Path):
        return Path(source).name.removesuffix(".toml")  # a preset's name may contain a point
    return source.name if isinstance(source, Config) else str(table.get("name", "vanilla"))


def change_rows(variants: Mapping[str, Config], changes: Mapping[str, Any]) -> dict[str, Config]:
    """Return the variants, by name, with the fields in the table `changes` set in all of them.

    Raises:
        WakefulError: the variants differ in such a field: the difference to be compared would be
            lost.
    """
    for key, _ in flatten_table(changes):
        tables = [{"name": config.name, **flatten_config(config)} for config in variants.values()]
        values = [table[key] for table in tables]
        if any(value != values[0] for value in values):
            raise WakefulError(
                f"--{key} is for all variants, and they differ in it: change it in a TOML file, or "
                "leave variants out by --only"
            )
    return {
        name: config_from_table(merge_tables(config_to_table(config), changes))
        for name, config in variants.items()
    }


def flatten_config(config: Config) -> dict[str, Any]:
    """Return a configuration's fields by dotted name, such as "train.steps", except its name."""
    return {key: value for key, value in flatten_table(config_to_table(config)) if key != "name"}


def config_differences(first: Config, second: Config) -> dict[str, tuple[Any, Any]]:
    """Return (first value, second value) of each field in which two configurations differ, by
    dotted name; the configurations' names count too.
    """
    first_fields = {"name": first.name, **flatten_config(first)}
    second_fields = {"name": second.name, **flatten_config(second)}
    return {
        key: (value, second_fields[key])
        for key, value in first_fields.items()
        if value != second_fields[key]
    }
