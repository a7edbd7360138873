"""The routes of CONTRIBUTING, added to a copy of the package as the page says, pass its tests."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text("utf-8")


@pytest.mark.long
def test_the_routes_of_the_page_pass_the_tests_that_it_names(tmp_path: Path) -> None:
    for name in ("src", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    routes = tmp_path / "src" / "wakeful" / "routes"
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    files = [block.partition("\n\n\ndecoder = ")[0] for block in blocks if "\nclass " in block]
    names = [re.findall(r"^class (\w+)\(ValueRoute\)", code, re.M)[0] for code in files]
    assert names == ["Ramp", "LearnedRamp"]
    for code, name in zip(files, names, strict=True):
        (routes / f"{name.lower()}.py").write_text(f"{code}\n", "utf-8")
        with (routes / "__init__.py").open("a", encoding="utf-8") as file:
            file.write(f"from wakeful.routes.{name.lower()} import {name}\n")
    lines = re.findall(r'^    ("(?:learned)?ramp.*": .*,)$', PAGE, re.M)
    reference = tmp_path / "tests" / "routes" / "reference.py"
    before, start, after = reference.read_text("utf-8").partition(
        "ROUTES: dict[str, Callable] = {\n"
    )
    reference.write_text("\n".join([before + start, *lines, after]), "utf-8")
    (command,) = re.findall(r"^    \.venv/bin/python (-m pytest .* -k ramp.*)$", PAGE, re.M)
    done = subprocess.run(
        [sys.executable, *shlex.split(command)], cwd=tmp_path, capture_output=True, text=True,
        check=False, env=os.environ | {"PYTHONPATH": str(tmp_path / "src")},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    passed = int(re.findall(r"(\d+) passed", done.stdout)[-1])
    assert passed > 100
    assert "failed" not in done.stdout
