"""Rows of a comparison, and changes that apply to all of them."""

from pathlib import Path

import pytest

from wakeful.config.rows import change_rows, flatten_config, read_rows
from wakeful.config.schema import Config, config_from_table
from wakeful.config.tables import merge_tables
from wakeful.errors import WakefulError

BASE = {"optimizer": {"lr": 1e-2}, "train": {"steps": 2500}}


def rows(**entries: dict) -> dict[str, Config]:
    tables = {name: merge_tables(BASE, {"name": name, **entry}) for name, entry in entries.items()}
    return {name: config_from_table(table) for name, table in tables.items()}


def test_a_preset_with_a_point_in_its_name_keeps_all_of_it(tmp_path: Path) -> None:
    file = tmp_path / "rate-0.5.toml"
    file.write_text("[train]\nsteps = 1\n")
    found = read_rows([file, "activation-gpt2-1.4b"])
    assert found.name == "rate-0.5"
    assert [*found.variants] == ["rate-0.5", "activation-gpt2-1.4b"]


def test_a_change_is_made_in_all_rows_unless_they_differ() -> None:
    found = rows(a={}, b={"optimizer": {"lr": 1.0}})
    changed = change_rows(found, {"train": {"steps": 100}, "model": {"bias": True}})
    assert [(row.train.steps, row.model.bias) for row in changed.values()] == [(100, True)] * 2
    assert [row.optimizer.lr for row in changed.values()] == [1e-2, 1.0]
    for field in ({"optimizer": {"lr": 2.0}}, {"name": "c"}):
        with pytest.raises(WakefulError, match="is for all variants, and they differ in it"):
            change_rows(found, field)


def test_the_fields_are_all_there() -> None:
    fields = flatten_config(Config())
    assert fields["train.distill.alpha"] == 0.6
    assert "name" not in fields
