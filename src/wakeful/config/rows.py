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

    def choose_seeds(self, seeds: Sequence[int]) -> tuple[int, ...]:
        """Return the given seeds or, if there are none, those that the configurations name."""
        if seeds:
            return tuple(seeds)
        if len(self.seed_sets) > 1:
            raise WakefulError("the configurations ask for different seeds: use --seeds")
        return next(iter(self.seed_sets), ())


def read_rows(sources: Sequence[Config | Mapping[str, Any] | str | Path]) -> ComparisonRows:
    """Return the variants to compare, from configurations in any form, in the order given.

    A source is a `Config`, a preset's name, a TOML file or a table.
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


def rescale_rows(
    rows: Mapping[str, Config], base: Config, new_base: Config, *, strict: bool = False
) -> dict[str, Config]:
    """Return variants that differ from `new_base` as the given ones (`rows`) differ from `base`.

    A field that is equal in a row and in `base` takes the value of `new_base`. A number that
    differs from `base` keeps its ratio to it: a row with 8 times the steps trains for 8 times the
    new steps. Any other field that differs keeps the row's value.

    Raises:
        WakefulError: a row's value is out of its range; with `strict` also where `new_base` changes
            a field in which a row differs and that has no ratio.
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
                if ratio is None and strict:
                    raise WakefulError(
                        f"{key} differs between the rows ({row_values[key]!r} in "
                        f"{name}): name the row to change, as --variants.NAME.{key}"
                    )
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


def flatten_config(config: Config) -> dict[str, Any]:
    """Return a configuration's fields by dotted name, such as "train.steps", except its name."""
    return {key: value for key, value in flatten_table(config_to_table(config)) if key != "name"}


def config_differences(first: Config, second: Config) -> dict[str, tuple[Any, Any]]:
    """Return (first value, second value) of each field in which two configurations differ, by
    dotted name.
    """
    first_fields = {"name": first.name, **flatten_config(first)}
    second_fields = {"name": second.name, **flatten_config(second)}
    return {
        key: (value, second_fields[key])
        for key, value in first_fields.items()
        if value != second_fields[key]
    }


_WITHOUT_RATIO = ("seed", "beta1", "beta2")
"""Last parts of the names of numbers that are never scaled."""


def _ratio(key: str, value: object, base_value: object) -> float | None:
    """Return value / base_value of a field; None where there is no ratio to keep: for values that
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
