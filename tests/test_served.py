"""The pages about engines say what exports are, and what was measured in each engine."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from helpers import since
from wakeful.config.model import VARIANTS, ModelConfig
from wakeful.hf.weights_out import stock_architecture
from wakeful.variants import variants_by_name

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import served  # noqa: E402

LLAMA = ModelConfig(num_layers=4, num_heads=4, num_kv_heads=2, width=32, mlp_width=48)
ROW = re.compile(r"\| (?P<cure>[^|]*`(?P<field>\w+)( = |`)[^|]*) \| (?P<form>[^|]+) \|")


def rows() -> list[tuple[str, bool, set[str], str]]:
    """Return the page's rows: the field, whether all but the names are meant, names and form."""
    page = (ROOT / "docs" / "routes.md").read_text("utf-8")
    table = page.partition("## Which engine serves an export")[2].partition("\n## ")[0]
    found = []
    for line in table.splitlines():
        match = ROW.match(line)
        if match and match["field"] in VARIANTS:
            names = {name.partition("(")[0] for name in re.findall(r'"([^"]+)"', match["cure"])}
            found.append(
                (match["field"], match["cure"].startswith("any"), names, match["form"].strip())
            )
    return found


TABLE = rows()
EXAMPLES = [
    (field, example)
    for field, folder in VARIANTS.items()
    if any(row[0] == field for row in TABLE)
    for kind in variants_by_name(folder).values()
    for example in kind.examples
]


@since("5.15", "it has Granite SWA")
@pytest.mark.parametrize(("field", "example"), EXAMPLES)
def test_the_page_says_what_a_variant_is_exported_as(field: str, example: str) -> None:
    name = example.partition("(")[0]
    of_field = [row for row in TABLE if row[0] == field]
    named = [form for _, others, names, form in of_field if not others and name in names]
    others = [form for _, others, names, form in of_field if others and name not in names]
    kind = stock_architecture(ModelConfig(**{**vars(LLAMA), field: example}))[0]
    if not named and not others:
        if field == "norm":
            return  # it makes the architecture
        named = ["stock"]
    said = (named or others)[0]
    assert said.startswith("stock" if kind != "wakeful" else "our class"), (example, kind)
    if "Granite" in said:
        assert kind.startswith("granite")


@since("5.15", "it has Granite SWA")
def test_the_table_is_that_of_what_was_measured() -> None:
    page = served.PAGE.read_text("utf-8")
    table = page.partition(served.FROM)[2].partition(served.TO)[0]
    assert table.strip() == served.drawn().strip()
    found = json.loads(served.MEASURED.read_text("utf-8"))["rows"]
    assert [name for name in found if not name.startswith("`")] == list(served.TRAINED)
    for name, parts in served.TRAINED.items():
        config = ModelConfig(vocab_size=512, **{**served.SMALL, **parts})
        assert found[name]["written as"] == stock_architecture(config)[0], name


@pytest.mark.long
@pytest.mark.parametrize("reader", ["transformers", "vllm", "llama.cpp"])
def test_an_engine_computes_what_was_trained(
    reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "WAKEFUL_" + reader.upper().replace(".", "_")
    python = os.environ.get(name)
    if not python:
        pytest.skip(f"{name} names no interpreter of an environment with {reader}")
    chosen = ('normalizer = "softmax1(learned=True)"', 'route = "svformer"')
    every = list(served.decoders())
    monkeypatch.setattr(served, "decoders", lambda: [row for row in every if row[0] in chosen])
    served.export(tmp_path)
    jobs = json.loads((tmp_path / "jobs.json").read_text("utf-8"))
    answers, _ = served.read(reader, python, tmp_path / "jobs.json", "float32")
    for job, answer in zip(jobs, answers, strict=True):
        cell = served.cell(job, answer)
        if reader == "llama.cpp" and job["kind"] == "wakeful":
            assert "is a wakeful" in cell["refused"]
        else:
            assert cell["difference"] < 1e-4
            assert cell["same text"]
