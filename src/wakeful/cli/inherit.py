"""The verb inherit: what its options call."""

import dataclasses

from wakeful.cli.console import OUT, display, tell
from wakeful.cli.parsing import leading, parse
from wakeful.config.verbs import InheritOptions
from wakeful.errors import WakefulError


def run(arguments: list[str]) -> None:
    """REFERENCE [options]: inherit blocks, train, grow until parity, compare with baselines."""
    sources, rest = leading(arguments)
    default = InheritOptions()
    options = parse(InheritOptions, rest, "inherit REFERENCE", default)
    if options.resume:
        if sources or options != dataclasses.replace(default, resume=options.resume):
            raise WakefulError("--resume takes the inheritance's own recipe and no other option")
    elif len(sources) != 1:
        raise WakefulError(
            "name one reference: a run directory, a Transformers folder, a GGUF file, smollm2 "
            "or a hub name"
        )

    from wakeful.verbs.inherit import inherit

    done = inherit(*sources, options=options, shown=display)
    OUT.print(done)
    tell(f"report: {done.page}")
