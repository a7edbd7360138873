"""Every example runs as a visitor would run it, with the model and text that come along."""

import ast
import json
import runpy
import sys
from pathlib import Path

import pytest

from training.runs import write_text

EXAMPLES = Path(__file__).parents[1] / "examples"
SAID = {
    "diagnose_any_model.py": ("Attention sinks", "shape: (5, 4)"),
    "softmax1_on_a_stock_llama.py": ("sdpa: loss", "wakeful_softmax1: loss"),
    "orthoadam_in_the_trainer.py": ("family llama", "'train_loss'"),
    "train_resformer_on_your_text.py": ("validation loss", "runs/my-resformer/report.html"),
    "cure_and_quantize.py": ("Rotation: ", "tiny-llama cured"),
    "inherit.py": ("parity", "runs/heir"),
    "one_billion.py": (
        "% of their original size",
        "of random weights, the page: runs/one-billion/report.html",
    ),
    "what_a_drained_value_pays.py": ("runs/ill: loss ", "first value at zero "),
}
ARGUMENTS = {
    "softmax1_on_a_stock_llama.py": ["--text", "text", "--steps", "3"],
    "orthoadam_in_the_trainer.py": ["--text", "text", "--steps", "3"],
    "train_resformer_on_your_text.py": [
        "--text", "text", "--steps", "3", "--vocabulary", "300", "--layers", "2", "--width", "16",
    ],
    "cure_and_quantize.py": ["--text", "text", "--length", "16", "--schemes", "w4"],
    "inherit.py": ["--text", "text", "--steps", "2", "--length", "16"],
    "one_billion.py": [
        "--text", "text", "--layers", "1", "--vocab_size", "512", "--length", "16", "--schemes",
        "w8a8",
    ],
}  # fmt: skip
"""One reads the standard library, as all of them do without arguments; little text is quicker."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the folder that all of them run in, so that the tiny model is made once."""
    folder = tmp_path_factory.mktemp("examples")
    write_text(folder / "text")
    return folder


def test_every_example_is_run_here() -> None:
    scripts = {path.name for path in EXAMPLES.glob("*.py")} - {"stand_in.py"}
    assert scripts == set(SAID)
    for name in SAID:
        text = (EXAMPLES / name).read_text("utf-8")
        code = text.removeprefix(f'"""{ast.get_docstring(ast.parse(text), clean=False)}"""')
        assert len(code.strip().splitlines()) <= 40, name


@pytest.mark.slow
@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize("name", SAID)
def test_it_runs_offline(
    name: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv("WAKEFUL_CACHE", str(place / "cache"))
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", [name, *ARGUMENTS.get(name, [])])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    said = capsys.readouterr().out
    for words in SAID[name]:
        assert words in said, said


@pytest.mark.slow
@pytest.mark.usefixtures("as_users_run_it")
def test_the_notebook_runs_from_its_first_cell_to_its_last(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cells hold nothing but Python, so they need no kernel: nbclient would bring 30 packages.

    They need nothing beside them but the package.

    What a notebook would show of a cell's last expression is made, too.
    """
    monkeypatch.chdir(place)
    notebook = json.loads((EXAMPLES / "tour.ipynb").read_text("utf-8"))
    assert all(not cell.get("outputs") for cell in notebook["cells"]), "clear the outputs"
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(cells) > 5
    names: dict[str, object] = {}
    for number, cell in enumerate(cells):
        *steps, last = ast.parse(cell, f"cell {number}").body
        if isinstance(last, ast.Expr):
            exec(compile(ast.Module(steps, []), f"cell {number}", "exec"), names)
            value = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names)
            getattr(value, "_repr_html_", value.__repr__)()
        else:
            exec(compile(cell, f"cell {number}", "exec"), names)
