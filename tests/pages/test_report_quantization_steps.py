"""The next steps of the quantization page: commands that run as they are."""

import dataclasses
import shlex

import polars as pl
import pytest

from pages.synthetic import damage
from wakeful.quantization.matrix_report import matrix_report
from wakeful.quantization.options import QuantizeOptions
from wakeful.quantization.report import steps_after_saving, suggest_next_step
from wakeful.quantization.schemes import parse_scheme


def test_the_scheme_that_is_saved_can_be_typed() -> None:
    static = parse_scheme("coarse", "static")
    found = damage("a", lost=0.0)
    name = str(static)
    assert name == "coarse static"
    measurement = dataclasses.replace(
        found.measurement, schemes={name: found.measurement.schemes["fine"]}
    )
    found = dataclasses.replace(
        found, measurement=measurement, schemes={name: static}, bytes={name: 2},
        seconds={name: 1.0}, savable=(name,),
    )  # fmt: skip
    words = shlex.split(suggest_next_step(found, "my models/a/").command)
    assert words[:3] == ["wakeful", "quantize", "my models/a/"]
    assert parse_scheme(words[words.index("--scheme") + 1]) == static
    assert words[words.index("--save") + 1] == "my models/a-quantized"


def test_speed_is_asked_for_where_the_context_has_room() -> None:
    contexts = {4096: " --speed 512", 128: " --speed 95", 34: " --speed 1", 33: ""}
    for context, speed in contexts.items():
        _, compare, write = steps_after_saving("a", "b", context)
        assert compare.command == f"wakeful evaluate a b{speed}"
        fewer = {4096: "", 128: " --num_tokens 64"}.get(context, " --num_tokens ")
        assert write.command.partition('time"')[2].startswith(fewer)


def test_the_same_text_is_read_after_saving() -> None:
    flags = QuantizeOptions(text="a book.txt").text_flags
    compare = steps_after_saving("a", "b", 4096, reading=flags)[1]
    assert compare.command == "wakeful evaluate a b --text 'a book.txt' --speed 512"


def test_what_is_saved_is_served() -> None:
    first, second, *_ = steps_after_saving("a", "b c", 4096)
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
    assert suggest_next_step(found, "a").command == asked


@pytest.mark.parametrize(
    ("measured", "asked"),
    [
        (["kv4"], "wakeful quantize a --scheme kv8"),
        (["kv8"], "wakeful cure a --for kv8"),
        (["fine"], "wakeful cure a --for fine"),
        (["w4"], """wakeful quantize a --scheme 'w4(method=gptq)' 'w4(weights=zeropoint(bits=4, """
         """per="channel", group=32), method=gptq)'"""),
        (["scheme(weights=zeropoint(bits=4, per='channel', group=32), method=gptq)"],
         "wakeful quantize a --scheme fine"),
        (["scheme(weights=zeropoint(bits=4, per='channel', group=32), method=gptq)", "fine"],
         "wakeful cure a --for"),
    ],
)  # fmt: skip
def test_what_was_measured_is_not_proposed_again(measured: list[str], asked: str) -> None:
    found = damage("a", lost=0.5, schemes=measured)  # inputs with a kurtosis near 5
    told = suggest_next_step(found, "a")
    proposed = [parse_scheme(each) for each in shlex.split(asked.partition("--scheme ")[2])]
    assert [parse_scheme(each) for each in shlex.split(told.command.partition("--scheme ")[2])] == (
        proposed
    )
    assert told.command.startswith(asked.partition("'")[0])
    assert ("GPTQ" in told.text) == (measured == ["w4"])


def test_a_command_asks_for_all_that_was_asked_for_but_the_folder() -> None:
    options = QuantizeOptions(
        text="a book.txt", skip=("*head",), scales=("dynamic", "static"), num_sequences=2,
        out="runs/quantize-a",
    )  # fmt: skip
    begin = ["wakeful", "quantize", "x/a", "--text", "a book.txt", "--scheme", "fine"]
    end = ["--skip", "*head"]
    found = damage("a", lost=0.0)
    words = shlex.split(suggest_next_step(found, "x/a", options).command)
    assert words == [*begin, "--num_sequences", "2", "--save", "x/a-quantized", *end]
    assert (matrix_report([found], sources=["x/a"], options=options).steps[0].command) == (
        shlex.join(words)
    )
    totals = dataclasses.replace(found.measurement.schemes["fine"], nll=[3.3, 3.8])
    measurement = dataclasses.replace(found.measurement, schemes={"fine": totals})
    unsure = suggest_next_step(dataclasses.replace(found, measurement=measurement), "x/a", options)
    assert unsure.text == "the text is too short to tell: measure on more of it"
    assert shlex.split(unsure.command) == [*begin, *end]  # 8, the usual number, and not 2


def test_what_no_folder_holds_is_not_to_be_saved() -> None:
    options = QuantizeOptions(scheme=("w4",), text="my.txt", layer_schemes=("*head=w8a8",))
    found = dataclasses.replace(damage("a", lost=0.0, schemes=["w4"]), savable=("w8a8",))
    step = suggest_next_step(found, "my a", options)
    assert step.text.endswith(": measure w8a8, which can")
    assert step.command == "wakeful quantize 'my a' --text my.txt --scheme w8a8"
    none = suggest_next_step(dataclasses.replace(found, savable=()), "my a", options)
    assert none.command == "wakeful evaluate 'my a' --text my.txt"


def test_what_no_folder_holds_is_measured_and_another_scheme_saved() -> None:
    options = QuantizeOptions(scheme=("w4a16",))
    found = damage("a", lost=0.5, schemes=("w4a16",))
    harmless = dataclasses.replace(
        found.measurement.schemes["w4a16"], nll=found.measurement.full.nll
    )
    other = "w4a16 custom"
    measurement = dataclasses.replace(
        found.measurement, schemes=found.measurement.schemes | {other: harmless}
    )
    scheme = parse_scheme("w4a16")
    found = dataclasses.replace(
        found, measurement=measurement, schemes={"w4a16": scheme, other: scheme},
        bytes={"w4a16": 2, other: 3}, seconds={"w4a16": 1.0, other: 1.0},
        savable=("w4a16", "w8a8"),
    )  # fmt: skip
    assert suggest_next_step(found, "a", options).command == "wakeful quantize a --scheme w8a8"
    both = dataclasses.replace(measurement, schemes=dict.fromkeys(["w4a16", other], harmless))
    plain = suggest_next_step(dataclasses.replace(found, measurement=both), "a", options)
    assert plain.command == "wakeful quantize a --scheme w4a16 --save a-quantized"
