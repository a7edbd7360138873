"""Build wheel and sdist into dist/, and a wheel of papers/; check them and install the wheels.

A wheel must hold every file of its package (presets, exhibits, templates, py.typed). The core's
must import in an environment that has only `BARE` of its dependencies; both must import whole in
one with those that they declare. The sdist must hold what the tests need.
"""

import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
PAPERS = ROOT / "papers"
PACKAGES = {"wakeful": ROOT / "src", "wakeful_papers": PAPERS / "src"}
"""The packages, each of a wheel of its own, and where the checkout has them."""
NEEDED = (
    "wakeful/py.typed", "wakeful/presets/demo.toml", "wakeful/reports/templates/",
    "wakeful_papers/papers/", "wakeful_papers/presets/",
)  # fmt: skip
"""Files and folders of which the wheel must hold something, whatever the checkout has."""
BESIDE = ("LICENSE", "README.md", "pyproject.toml", "tests/conftest.py", "docs/decisions.md")
BARE = ("lazy-loader", "packaging")
"""What an import of wakeful needs before a name of it is used."""
INSTALLED = """
import sys
from importlib import metadata, resources
import wakeful

names = {each.metadata["Name"].replace("_", "-") for each in metadata.distributions()}
names -= {"pip", "setuptools"}
assert names == {"wakeful", "lazy-loader", "packaging"}, names
assert metadata.version("wakeful") == wakeful.__version__
assert sys.prefix in wakeful.__file__, wakeful.__file__
assert '[model]' in (resources.files("wakeful") / "presets" / "demo.toml").read_text("utf-8")
"""
EVERY_MODULE = """
import importlib, pkgutil
import wakeful, wakeful_papers

for module in (
    *pkgutil.walk_packages(wakeful.__path__, "wakeful."),
    *pkgutil.walk_packages(wakeful_papers.__path__, "wakeful_papers."),
):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            assert error.name.partition(".")[0] == "lm_eval", f"{module.name} needs {error.name}"
"""


def main() -> int:
    """Do all of it; return the exit status."""
    shutil.rmtree(DIST, ignore_errors=True)
    run("-m", "build", "--outdir", str(DIST), str(ROOT))
    run("-m", "build", "--wheel", "--outdir", str(DIST), str(PAPERS))
    (wheel,), (sdist,) = DIST.glob("wakeful-*.whl"), DIST.glob("*.tar.gz")
    (papers,) = DIST.glob("wakeful_papers-*.whl")
    run("-m", "twine", "check", "--strict", str(wheel), str(papers), str(sdist))
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    if missing := [name for name in BESIDE if name not in held]:
        return fail(f"{sdist.name} lacks {', '.join(missing)}")
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder) / "bin" / "python")
        run("-m", "pip", "install", "--quiet", "--no-deps", str(wheel), *BARE, python=python)
        run("-I", "-c", INSTALLED, python=python, at=folder)
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder) / "bin" / "python")
        constraints = ["--constraint", str(ROOT / "constraints.txt")]
        run("-m", "pip", "install", "--quiet", *constraints, str(wheel), str(papers), python=python)
        run("-I", "-c", EVERY_MODULE, python=python, at=folder)
        run("-I", "-m", "wakeful", "presets", "demo", python=python, at=folder)
        run("-I", "-m", "wakeful", "reproduce", "--help", python=python, at=folder)
        (place,) = Path(folder).glob("lib/*/site-packages")
        ours = {name for source in PACKAGES.values() for name in files(source)}
        theirs = files(place)
    for name in NEEDED:
        if not any(each == name or each.startswith(name) for each in theirs):
            return fail(f"the wheels lack {name}")
    if ours != theirs:
        return fail(f"the wheels and the checkout differ in {', '.join(sorted(ours ^ theirs))}")
    sizes = (f"{each.name} ({each.stat().st_size / 1e6:.2f} MB)" for each in (wheel, papers))
    print(f"{', '.join(sizes)}: {len(theirs)} files; {sdist.name}")
    return 0


def run(*arguments: str, python: str = sys.executable, at: str | Path = ROOT) -> None:
    subprocess.run([python, *arguments], check=True, cwd=at)


def files(folder: Path) -> set[str]:
    found = (path for each in PACKAGES for path in (folder / each).rglob("*") if path.is_file())
    names = {path.relative_to(folder).as_posix() for path in found}
    return {name for name in names if "__pycache__" not in name}


def fail(why: str) -> int:
    print(why, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
