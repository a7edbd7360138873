"""The verb train: its options and what they call."""

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated

import tyro

from wakeful.cli.console import OUT, another_speaks, display
from wakeful.cli.parsing import leading, parse
from wakeful.config.schema import Config, config_from
from wakeful.config.tables import presets
from wakeful.errors import WakefulError


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Where the run goes; every field of the configuration is an option too."""

    out: str = ""
    """Run directory to create. Empty: runs/NAME."""
    resume: str = ""
    """Continue the run in this directory with its own configuration; --train.steps lengthens it."""
    config: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)


def run(arguments: list[str]) -> None:
    """CONFIG [options]: train one model."""
    sources, rest = leading(arguments)
    if len(sources) > 1:
        raise WakefulError(f"train takes one configuration, not {len(sources)}: {sources}")
    if not sources and not {"--resume", "--help", "-h"} & set(rest):
        raise WakefulError(f"name a configuration: a TOML file or one of {', '.join(presets())}")
    default = TrainOptions(config=config_from(sources[0] if sources else {}))
    options = parse(TrainOptions, rest, "train CONFIG", default)

    from wakeful.verbs.train import train

    if options.resume:
        steps = _new_length(sources, rest, options.resume)
        done = train(resume=options.resume, steps=steps, shown=display)
    else:
        done = train(options.config, out=options.out, shown=display)
    if not another_speaks():
        OUT.print(done, highlight=False)


def _new_length(sources: list[str], arguments: list[str], path: str) -> int:
    """Return the steps that --train.steps gives the run at `path`, beside which nothing may be."""
    from wakeful.runs.run import Run

    own = TrainOptions(resume=path, config=Run.open(path).config)
    asked = parse(TrainOptions, arguments, "train --resume RUN", own)
    steps = asked.config.train.steps
    train = dataclasses.replace(own.config.train, steps=steps)
    if sources or asked != dataclasses.replace(
        own, config=dataclasses.replace(own.config, train=train)
    ):
        raise WakefulError(
            "--resume takes the run's own configuration and no other option but --train.steps, "
            "which lengthens the run"
        )
    return steps
