"""The verb compare: its options and what they call."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from wakeful.cli.console import OUT, display, tell
from wakeful.cli.parsing import asks_for_help, leading, parse
from wakeful.config.schema import Config, config_from_table, layouts_of, seeds_of, variants_of
from wakeful.config.tables import read_table
from wakeful.errors import WakefulError


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Where the comparison goes; every field of the configuration sets all variants alike."""

    out: str = ""
    """Folder to create. Empty: runs/compare-NAME."""
    seeds: tuple[int, ...] = ()
    """Seeds to train each variant with. Empty: those of the file, or 0."""
    resume: bool = False
    """Go on with an interrupted comparison in the same folder."""
    config: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


def run(arguments: list[str]) -> None:
    """CONFIG... [options]: train variants with several seeds and report their differences."""
    sources, rest = leading(arguments)
    if not sources:
        if asks_for_help(rest):
            parse(CompareOptions, ["--help"], "compare CONFIG...", CompareOptions())
        raise WakefulError("name one configuration with a [variants] table, or several")
    variants: dict[str, Config] = {}
    asked: set[tuple[int, ...]] = set()
    layouts: list[str] = []
    options = CompareOptions()
    for source in sources:
        table = read_table(source)
        seeds = tuple(seeds_of(table))
        layouts += [name for name in layouts_of(table) if name not in layouts]
        for name, entry in variants_of(Path(source).stem, table).items():
            default = CompareOptions(seeds=seeds, config=config_from_table(entry))
            options = parse(CompareOptions, rest, "compare CONFIG...", default)
            if name in variants:
                raise WakefulError(f"two variants are called {name!r}; rename one")
            variants[name] = options.config
            asked.add(options.seeds)
    if len(asked) > 1:
        raise WakefulError("the configurations ask for different seeds: use --seeds")

    from wakeful.verbs.compare import compare_variants

    out = Path(options.out or f"runs/compare-{Path(sources[0]).stem}")
    done = compare_variants(
        variants, options.seeds, out, layouts=layouts, resume=options.resume, shown=display
    )
    OUT.print(done)
    tell(f"report: {done.page}")
