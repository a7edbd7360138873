"""Reports of any two variants, and the rows that figures draw."""

import json
import re
from pathlib import Path

import pytest

import wakeful
from pages.test_report import make_comparison
from wakeful.errors import WakefulError
from wakeful.training.compared import read_comparison
from wakeful.training.tables import paired_difference

SHIFTS = {"a": 0.0, "=b": -0.5, "c": 0.25}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_comparison(tmp_path / "made", SHIFTS, [0, 1])


@pytest.mark.slow
def test_any_two_variants_are_compared(folder: Path, tmp_path: Path) -> None:
    usual, found = read_comparison(folder), read_comparison(folder, "=b")
    assert found.variants == found.names == ("=b", "a", "c")
    difference, error = paired_difference(usual, "=b")
    assert paired_difference(found, "a") == pytest.approx((-difference, error))
    page = tmp_path / "pair.html"
    pair = wakeful.report(folder, out=page, baseline="=b", only=["c"])
    assert pair.frame["variant"].to_list() == ["=b", "c"]
    assert pair.frame["difference"][1] == paired_difference(found, "c")[0]
    assert re.search(r"c ends 0\.7\d+ ± 0\.\d+ nats above =b\.", " ".join(pair.verdicts))
    assert "The validation loss of c is higher than that of =b." in page.read_text()


@pytest.mark.parametrize("wrong", [{"baseline": "cc"}, {"only": ["d"]}])
def test_a_variant_that_is_not_there_is_named(folder: Path, wrong: dict) -> None:
    with pytest.raises(WakefulError, match="none of the variants with a finished run: a, =b, c"):
        wakeful.report(folder, **wrong)


def test_an_interrupted_comparison_says_how_to_go_on(folder: Path) -> None:
    for seed in (0, 1):
        header = folder / f"a/seed-{seed}/run.json"
        header.write_text(json.dumps(json.loads(header.read_text()) | {"status": "running"}))
    with pytest.raises(WakefulError, match=r"--resume, or choose one that has, .*: =b, c"):
        wakeful.report(folder)
    assert read_comparison(folder, "c").variants == ("c", "=b")
