"""The next steps of the quantization page: commands that run as they are."""

import dataclasses
import shlex

import polars as pl
import pytest

from pages.synthetic import damage
from wakeful.quant.schemes import parse_scheme
from wakeful.reports.quantization import after_saving, next_step


def test_the_scheme_that_is_saved_can_be_typed() -> None:
    static = parse_scheme("coarse", "static")
    found = damage("a", lost=0.0)
    name = str(static)
    assert name == "coarse static"
    measurement = dataclasses.replace(
        found.measurement, schemes={name: found.measurement.schemes["fine"]}
    )
    found = dataclasses.replace(
        found, measurement=measurement, schemes={name: static}, bytes={name: 2}, seconds={name: 1.0}
    )
    words = shlex.split(next_step(found, "my models/a/").command)
    assert words[:3] == ["wakeful", "quantize", "my models/a/"]
    assert parse_scheme(words[words.index("--scheme") + 1]) == static
    assert words[words.index("--save") + 1] == "my models/a-quantized"


def test_speed_is_asked_for_where_the_context_has_room() -> None:
    asked = [after_saving("a", "b", context, stock=False)[0].command for context in (4096, 128, 32)]
    assert [command.partition(" --")[2] for command in asked] == ["speed 512", "speed 96", ""]


def test_a_stock_folder_is_served() -> None:
    first, second, *_ = after_saving("a", "b c", 4096, stock=True)
    assert first.command == "vllm serve 'b c'"
    assert second.command.startswith("wakeful evaluate a 'b c'")


@pytest.mark.parametrize(
    ("expression", "kurtosis", "asked"),
    [
        ("moderate", 90.0, "wakeful cure a --rotate hadamard"),
        ("moderate", 3.1, "wakeful quantize a --scheme fine"),
        ("nvfp4", 90.0, "wakeful cure a --for nvfp4"),
    ],
)
def test_what_helps_follows_from_the_outliers_and_the_grid(
    expression: str, kurtosis: float, asked: str
) -> None:
    scheme, found = parse_scheme(expression), damage("a", lost=0.5)
    layers = found.measurement.layers.with_columns(
        scheme=pl.when(pl.col("scheme") == "fine").then(pl.lit(str(scheme))).otherwise("scheme"),
        value=pl.when(metric="input_kurtosis").then(kurtosis).otherwise("value"),
    )
    measurement = dataclasses.replace(
        found.measurement, schemes={str(scheme): found.measurement.schemes["fine"]}, layers=layers
    )
    found = dataclasses.replace(
        found, measurement=measurement, schemes={str(scheme): scheme}, bytes={str(scheme): 2},
        seconds={str(scheme): 1.0},
    )  # fmt: skip
    assert next_step(found, "a").command == asked
