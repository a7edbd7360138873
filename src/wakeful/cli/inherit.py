"""The verb inherit: its options and what they start."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from wakeful.cli.console import display, tell
from wakeful.cli.parsing import leading, parse
from wakeful.errors import WakefulError
from wakeful.growth.wishes import Wishes


@dataclass(frozen=True, kw_only=True)
class InheritOptions:
    """What to inherit, how to train it, and what to compare it with."""

    out: str = ""
    """Folder to create. Empty: runs/inherit-REFERENCE."""
    resume: str = ""
    """Continue the inheritance in this folder; it takes no other option."""
    wishes: Annotated[Wishes, tyro.conf.arg(name="")] = field(default_factory=Wishes)


def run(arguments: list[str]) -> None:
    """REFERENCE [options]: inherit blocks, train, grow until parity, compare with baselines."""
    from wakeful.pages.inheritance.reading import read_inheritance, verdicts
    from wakeful.verbs.inherit import resume_inheritance, run_inheritance

    sources, rest = leading(arguments)
    default = InheritOptions()
    options = parse(InheritOptions, rest, "inherit REFERENCE", default)
    if options.resume:
        if sources or options != dataclasses.replace(default, resume=options.resume):
            raise WakefulError("--resume takes the inheritance's own recipe and no other option")
        done = resume_inheritance(Path(options.resume), shown=display)
    else:
        if len(sources) != 1:
            raise WakefulError(
                "name one reference: a run directory, a Transformers folder, a GGUF file, smollm2 "
                "or a hub name"
            )
        out = Path(options.out or f"runs/inherit-{Path(sources[0]).name}")
        done = run_inheritance(sources[0], out, options.wishes, shown=display)
    for sentence in verdicts(read_inheritance(done.path)[0]):
        tell(sentence)
    tell(f"report: {done.path / 'report.html'}")
