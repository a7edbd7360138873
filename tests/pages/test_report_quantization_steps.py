"""The next steps of the quantization page: commands that run as they are."""

import dataclasses
import shlex

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
