"""The next steps of the quantization page: commands that run as they are."""

import dataclasses
import shlex

import pytest

from pages.synthetic import damage
from wakeful.quantization.options import QuantizeOptions
from wakeful.quantization.report import matrix_report, steps_after_saving, suggest_next_step
from wakeful.quantization.schemes import parse_scheme


def test_the_scheme_that_is_saved_can_be_typed() -> None:
    static = parse_scheme("moderate", "static")
    found = damage("a", lost=0.0)
    name = str(static)
    assert name == "moderate static"
    measurement = dataclasses.replace(
        found.measurement, schemes={name: found.measurement.schemes["fine"]}
    )
    found = dataclasses.replace(
        found, measurement=measurement, schemes={name: static}, bytes={name: 2},
    )  # fmt: skip
    words = shlex.split(suggest_next_step(found, "my models/a/").command)
    assert words[:3] == ["wakeful", "quantize", "my models/a/"]
    assert parse_scheme(words[words.index("--scheme") + 1]) == static
    assert words[words.index("--save") + 1] == "my models/a-quantized"


def test_the_same_text_is_read_after_saving() -> None:
    flags = QuantizeOptions(text="a book.txt").text_flags
    compare = steps_after_saving("a", "b", reading=flags)[1]
    assert compare.command == "wakeful evaluate a b --text 'a book.txt'"


def test_what_is_saved_is_served() -> None:
    assert steps_after_saving("a", "b c")[0].command == "vllm serve 'b c'"


@pytest.mark.parametrize(
    ("expression", "asked"),
    [
        ("moderate", "wakeful cure a --rotate hadamard"),
        ("nvfp4", "wakeful cure a --for nvfp4"),
        ("kv4", "wakeful cure a --for kv4"),
        ("w4", "wakeful quantize a --scheme 'w4(method=gptq)'"),
        ("w4(method=gptq)", "wakeful cure a --for 'w4(method=gptq)'"),
    ],
)
def test_what_helps_follows_from_the_grid(expression: str, asked: str) -> None:
    found = damage("a", lost=0.5, schemes=[expression])
    assert suggest_next_step(found, "a").command == asked


def test_a_command_asks_for_all_that_was_asked_for_but_the_folder() -> None:
    options = QuantizeOptions(
        text="a book.txt", skip=("*head",), num_sequences=2,
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
    options = QuantizeOptions(scheme=("w4",), text="my.txt")
    step = suggest_next_step(damage("a", lost=0.0, schemes=["w4"]), "my a", options)
    assert step.text.endswith(": measure w8a8, which can")
    assert step.command == "wakeful quantize 'my a' --text my.txt --scheme w8a8"
