"""The recipe for mergekit: slices that are the heir's layers, and what it cannot read."""

from pathlib import Path

import pytest
import yaml

from heirs.references import reference, text, trained
from helpers import tiny_config
from wakeful.errors import WakefulError
from wakeful.heirs.mergekit import check_mergeable, merged_from, passthrough
from wakeful.runs.run import Run

__all__ = ["reference", "text", "trained"]


@pytest.mark.parametrize("layers", [(0, 1, 2, 18, 19), (0,), (0, 1, 0, 1), (5, 3, 4)])
@pytest.mark.parametrize("model", ["org/name", 'a folder: "odd"\n', "x # y"])
def test_its_slices_are_the_layers(layers: tuple[int, ...], model: str) -> None:
    recipe = yaml.safe_load(passthrough(model, layers))
    assert recipe["merge_method"] == "passthrough"
    found = []
    for part in recipe["slices"]:
        (source,) = part["sources"]
        assert source["model"] == model
        found += range(*source["layer_range"])
    assert tuple(found) == layers
    assert "bridges" in passthrough(model, layers, bridged=True).splitlines()[0]
    assert yaml.safe_load(passthrough(model, layers, bridged=True)) == recipe


def test_what_mergekit_cannot_read_is_refused(reference: Run, tmp_path: Path) -> None:
    with pytest.raises(WakefulError, match="is a run directory: inherit from an export"):
        merged_from(str(reference.path))
    gguf = tmp_path / "x.gguf"
    gguf.touch()
    with pytest.raises(WakefulError, match="is a GGUF file: inherit from an export"):
        merged_from(str(gguf))
    assert merged_from("some-org/some-model") == "some-org/some-model"
    (tmp_path / "config.json").write_text("{}")
    assert merged_from(str(tmp_path)) == str(tmp_path.resolve())


def test_what_transformers_reads_by_our_own_class_is_refused(tmp_path: Path) -> None:
    check_mergeable(tiny_config())
    with pytest.raises(WakefulError, match=r"no stock architecture.*leave out --recipe"):
        check_mergeable(tiny_config(route='resformer(mode="learnable")'))
    (tmp_path / "config.json").write_text('{"model_type": "wakeful"}')
    with pytest.raises(WakefulError, match=r"no stock architecture.*leave out --recipe") as refused:
        merged_from(str(tmp_path))
    assert "\n" not in str(refused.value)
