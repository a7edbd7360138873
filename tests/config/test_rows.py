"""Changes meant for all rows of a table, where rows differ on purpose."""

from pathlib import Path

import pytest

from wakeful.cli.command import split_row_options
from wakeful.config.rows import flatten_config, read_rows, rescale_rows
from wakeful.config.schema import Config, config_from_table
from wakeful.config.tables import merge_tables
from wakeful.errors import WakefulError

BASE = {"optimizer": {"lr": 1e-2}, "train": {"steps": 2500}}


def rows(**entries: dict) -> dict[str, Config]:
    tables = {name: merge_tables(BASE, {"name": name, **entry}) for name, entry in entries.items()}
    return {name: config_from_table(table) for name, table in tables.items()}


def changed(**entry: dict) -> Config:
    return config_from_table(merge_tables(merge_tables(BASE, {"name": "a"}), entry))


def test_numbers_keep_their_ratios_and_the_rest_follows() -> None:
    found = rows(a={}, muon={"optimizer": {"lr": 1.0, "name": "muon"}, "train": {"steps": 20_000}})
    to = changed(train={"steps": 100, "length": 64}, optimizer={"lr": 2e-2})
    again = rescale_rows(found, found["a"], to, strict=True)
    assert again["a"] == to
    muon = again["muon"]
    assert (muon.name, muon.optimizer.name) == ("muon", "muon")
    assert (muon.train.steps, muon.train.length, muon.optimizer.lr) == (800, 64, 2.0)


def test_a_preset_with_a_point_in_its_name_keeps_all_of_it(tmp_path: Path) -> None:
    file = tmp_path / "rate-0.5.toml"
    file.write_text("[train]\nsteps = 1\n")
    found = read_rows([file, "activation-gpt2-1.4b"])
    assert found.name == "rate-0.5"
    assert [*found.variants] == ["rate-0.5", "activation-gpt2-1.4b"]


def test_nothing_asked_changes_nothing_and_whole_numbers_stay_whole() -> None:
    found = rows(a={}, b={"train": {"steps": 3000}})
    assert rescale_rows(found, found["a"], found["a"], strict=True) == found
    assert rescale_rows(found, found["a"], changed(train={"steps": 1}))["b"].train.steps == 1


def test_numbers_without_a_ratio_stay_the_rows_own() -> None:
    found = rows(a={}, b={"optimizer": {"beta2": 0.99}, "sample": {"seed": 3}})
    to = changed(optimizer={"beta2": 0.999}, sample={"seed": 5})
    again = rescale_rows(found, found["a"], to)["b"]
    assert (again.optimizer.beta2, again.sample.seed) == (0.99, 3)
    with pytest.raises(WakefulError, match=r"beta2 differs between the rows .*0\.99 in b"):
        rescale_rows(found, found["a"], changed(optimizer={"beta2": 0.999}), strict=True)


def test_words_in_which_rows_differ_have_no_ratio() -> None:
    found = rows(a={}, b={"optimizer": {"name": "orthoadam"}}, c={"model": {"bias": True}})
    to = changed(optimizer={"name": "muon"})
    assert rescale_rows(found, found["a"], to)["b"].optimizer.name == "orthoadam"
    with pytest.raises(WakefulError, match=r"'orthoadam' in b.*--variants.NAME.optimizer.name"):
        rescale_rows(found, found["a"], to, strict=True)
    # A flag has no ratio either, though true / true would be one.
    with pytest.raises(WakefulError, match=r"model\.bias differs"):
        rescale_rows(found, found["c"], found["a"], strict=True)


def test_options_for_one_row_are_taken_by_its_name() -> None:
    shared, own = split_row_options(
        ["--train.steps", "5", "--variants.a.b.train.steps", "7", "--variants.a.x=3", "--seeds",
         "0", "1"], ["a", "a.b"],
    )  # fmt: skip
    assert shared == ["--train.steps", "5", "--seeds", "0", "1"]
    assert own == {"a": ["--x=3"], "a.b": ["--train.steps", "7"]}
    with pytest.raises(WakefulError, match=r"--variants.c.x names no row; there are a, a.b"):
        split_row_options(["--variants.c.x=1"], ["a", "a.b"])


def test_the_fields_are_all_there() -> None:
    fields = flatten_config(Config())
    assert fields["train.distill.alpha"] == 0.6
    assert "name" not in fields
