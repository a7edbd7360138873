"""Training code of others with our parts: few lines changed, the loss falls, resuming is exact."""

import difflib
import importlib.util
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples" / "own_loop"
NEEDS = {"lightning_loop": "lightning", "litgpt_model": "litgpt", "torchtitan_model": "torchtitan"}
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
runnable = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.skipif(
        find_spec(NEEDS.get(name, "torch")) is None, reason=f"needs {NEEDS.get(name)}"))
     for name in NAMES],
)  # fmt: skip


def main_of(name: str) -> Callable[..., list[float]]:
    spec = importlib.util.spec_from_file_location(f"own_loop_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where dynamo looks
    spec.loader.exec_module(module)
    return module.main


@pytest.mark.parametrize("name", NAMES)
def test_at_most_twenty_lines_differ_from_the_plain_loop(name: str) -> None:
    plain, changed = (
        (folder / f"{name}.py").read_text("utf-8").splitlines()
        for folder in (FOLDER / "plain", FOLDER)
    )
    marks = [line[0] for line in difflib.unified_diff(plain, changed, n=0, lineterm="")][3:]
    assert 0 < marks.count("+") <= 20
    assert marks.count("-") <= 20
    text = "\n".join(changed)
    assert "OrthoAdam(" in text
    assert "softmax1" in text
    assert "alueResidual" in text or "add_value_residuals" in text


@pytest.mark.slow
@runnable
@pytest.mark.filterwarnings("ignore")  # theirs
def test_the_loss_falls_and_resuming_is_exact(name: str, tmp_path: Path) -> None:
    main = main_of(name)
    whole = main(20, str(tmp_path / "whole"))
    assert whole[-1] < whole[0] - 1
    first = main(10, str(tmp_path / "parts"))
    rest = main(20, str(tmp_path / "parts"))
    assert first == whole[:10]
    assert rest[-10:] == whole[10:]


@pytest.mark.slow
@runnable
@pytest.mark.filterwarnings("ignore")
def test_one_graph_holds_the_model(name: str, tmp_path: Path) -> None:
    main = main_of(name)
    compiled = main(2, str(tmp_path / "compiled"), compiled=True)
    assert compiled == pytest.approx(main(2, str(tmp_path / "plain")), abs=1e-4)
