"""Rows of an exhibit at another scale, where rows differ on purpose."""

from wakeful.config.schema import Config, config_from_table
from wakeful.config.tables import merge_tables
from wakeful_papers.exhibits.rescaled import rescale_rows

BASE = {"optimizer": {"lr": 1e-2}, "train": {"steps": 2500}}


def rows(**entries: dict) -> dict[str, Config]:
    tables = {name: merge_tables(BASE, {"name": name, **entry}) for name, entry in entries.items()}
    return {name: config_from_table(table) for name, table in tables.items()}


def changed(**entry: dict) -> Config:
    return config_from_table(merge_tables(merge_tables(BASE, {"name": "a"}), entry))


def test_numbers_keep_their_ratios_and_the_rest_follows() -> None:
    found = rows(a={}, muon={"optimizer": {"lr": 1.0, "name": "muon"}, "train": {"steps": 20_000}})
    to = changed(train={"steps": 100, "length": 64}, optimizer={"lr": 2e-2})
    again = rescale_rows(found, found["a"], to)
    assert again["a"] == to
    muon = again["muon"]
    assert (muon.name, muon.optimizer.name) == ("muon", "muon")
    assert (muon.train.steps, muon.train.length, muon.optimizer.lr) == (800, 64, 2.0)


def test_nothing_asked_changes_nothing_and_whole_numbers_stay_whole() -> None:
    found = rows(a={}, b={"train": {"steps": 3000}})
    assert rescale_rows(found, found["a"], found["a"]) == found
    assert rescale_rows(found, found["a"], changed(train={"steps": 1}))["b"].train.steps == 1


def test_numbers_without_a_ratio_stay_the_rows_own() -> None:
    found = rows(a={}, b={"optimizer": {"beta2": 0.99}, "train": {"seed": 3}})
    to = changed(optimizer={"beta2": 0.999}, train={"seed": 5})
    again = rescale_rows(found, found["a"], to)["b"]
    assert (again.optimizer.beta2, again.train.seed) == (0.99, 3)


def test_words_in_which_rows_differ_have_no_ratio() -> None:
    found = rows(a={}, b={"optimizer": {"name": "orthoadam"}}, c={"model": {"bias": True}})
    to = changed(optimizer={"name": "muon"})
    assert rescale_rows(found, found["a"], to)["b"].optimizer.name == "orthoadam"
