"""Create a virtual environment and install wakeful into it, never several GB by accident.

Usage: python tools/install.py VENV [--lowest]

`--lowest` installs the oldest versions that pyproject.toml allows of what wakeful itself needs, and
of compressed-tensors; torch and the tests' own tools stay as pinned, and all else is the newest.

The pinned torch is a CPU build on the machines this project is tested on; elsewhere a package
index may offer a build of the same version that pulls in several gigabytes of CUDA libraries. So
pip is asked first what it would install, and a CUDA build is refused unless WAKEFUL_CUDA=1 is set.
A torch that WAKEFUL_TORCH names (a version, a file or a URL) is taken as it is.
"""

import json
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CUDA_PREFIXES = ("nvidia-", "triton", "cuda-")
LM_EVAL = ("lm-eval", "sacrebleu", "lxml", "portalocker", "colorama", "tabulate")
"""lm-eval and what importing it takes. Its other dependencies serve single tasks, are large, or
hold others of ours back, so the tests do without; the extra `eval` brings them all."""


def main() -> int:
    """Install; return the exit status."""
    if sys.version_info < (3, 11):
        print(f"wakeful needs Python 3.11 or later; this is {sys.version.split()[0]}")
        return 1
    folder = Path(sys.argv[1])
    if not (folder / "bin" / "python").exists():
        venv.create(folder, with_pip=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    constraints = ["--constraint", str(ROOT / "constraints.txt")]
    if "--lowest" in sys.argv:
        (folder / "lowest.txt").write_text(lowest())
        constraints = ["--constraint", str(folder / "lowest.txt")]
    torch = os.environ.get("WAKEFUL_TORCH")
    if torch is None:
        torch = next(
            line.strip()
            for line in (ROOT / "constraints.txt").read_text().splitlines()
            if line.startswith("torch==")
        )
        if os.environ.get("WAKEFUL_CUDA") != "1" and (heavy := cuda_packages(pip, torch)):
            print(
                f"'pip install {torch}' would bring {len(heavy)} CUDA packages here "
                f"({', '.join(heavy[:3])} ...), several gigabytes.\n"
                "Set WAKEFUL_CUDA=1 to accept them, or set WAKEFUL_TORCH to a CPU build "
                "(PyTorch's 'Get Started' page gives the command and the index for your system)."
            )
            return 1
        subprocess.run([*pip, "install", "--quiet", torch, *constraints], check=True)
    else:
        subprocess.run([*pip, "install", "--quiet", torch], check=True)
        constraints = constraints if "--lowest" in sys.argv else []
    print("installing wakeful and what it needs ...", flush=True)
    editable = ["install", "--quiet", "--editable", f"{ROOT}[dev,tensorboard]"]
    subprocess.run([*pip, *editable, *constraints], check=True)
    papers = ["install", "--quiet", "--no-deps", "--editable", str(ROOT / "papers")]
    subprocess.run([*pip, *papers], check=True)
    pinned = ["--constraint", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", *LM_EVAL, *pinned], check=True)
    return 0


def lowest() -> str:
    """Return constraints: the oldest versions allowed, and torch and the tests' tools as pinned."""
    import tomllib  # noqa: PLC0415  # Python 3.10 lacks it, and is told that it is too old

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    found = {}
    for requirement in [*project["dependencies"], *extras["compressed-tensors"]]:
        name, _, floor = requirement.partition(">=")
        found[plain(name)] = f"{name}=={floor.partition(',')[0]}"
    tools = {plain(re.split("[<>=[]", requirement)[0]) for requirement in extras["dev"]}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        name = plain(line.partition("==")[0])
        if name == "torch" or name in tools - found.keys():
            found[name] = line
    return "\n".join(found.values()) + "\n"


def plain(name: str) -> str:
    """Return a package's name as pip compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def cuda_packages(pip: list[str], requirement: str) -> list[str]:
    """Return the CUDA packages that installing a requirement would bring."""
    plan = subprocess.run(
        [*pip, "install", "--quiet", "--dry-run", "--report", "-", requirement],
        check=True,
        capture_output=True,
        text=True,
    )
    names = [entry["metadata"]["name"].lower() for entry in json.loads(plan.stdout)["install"]]
    return sorted(name for name in names if name.startswith(CUDA_PREFIXES))


if __name__ == "__main__":
    sys.exit(main())
