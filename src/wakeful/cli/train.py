"""The verb train: its options and what they start."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from wakeful.cli.console import display, tell
from wakeful.cli.parsing import leading, parse
from wakeful.config.schema import Config, config_from_table
from wakeful.config.tables import presets, read_table
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
    from wakeful.world import joined

    with joined() as world:
        _train(arguments, speaks=world.first)


def _train(arguments: list[str], *, speaks: bool) -> None:
    from wakeful.training.comparison import OWN_KEYS
    from wakeful.training.loop import train

    source, rest = leading(arguments)
    if len(source) > 1:
        raise WakefulError(f"train takes one configuration, not {len(source)}: {source}")
    if not source and not {"--resume", "--help", "-h"} & set(rest):
        raise WakefulError(f"name a configuration: a TOML file or one of {', '.join(presets())}")
    table = read_table(source[0]) if source else {}
    if "variants" in table:
        raise WakefulError(f"{source[0]} has variants: use wakeful compare {source[0]}")
    table = {key: value for key, value in table.items() if key not in OWN_KEYS}
    default = TrainOptions(config=config_from_table(table))
    options = parse(TrainOptions, rest, "train CONFIG", default)
    if options.resume:
        steps = _new_length(source, rest, options.resume)
        with display(Path(options.resume).name, speaks=speaks) as show:
            run = train(options.config, options.resume, resume=True, steps=steps, show=show)
    else:
        out = options.out or f"runs/{options.config.name}"
        with display(options.config.name, speaks=speaks) as show:
            run = train(options.config, out, show=show)
    if not speaks:
        return
    validation = run.read_json("summary.json")["validation"]
    tell(
        f"validation loss {validation['loss']:.4f} ± {validation['standard_error'] or 0:.4f} nats "
        f"a token over {validation['num_tokens']:,} tokens; the run is in {run.path}"
    )


def _new_length(source: list[str], arguments: list[str], path: str) -> int:
    """Return the steps that --train.steps gives the run at `path`, beside which nothing may be."""
    from wakeful.runs.run import Run

    own = TrainOptions(resume=path, config=Run.open(path).config)
    asked = parse(TrainOptions, arguments, "train --resume RUN", own)
    steps = asked.config.train.steps
    train = dataclasses.replace(own.config.train, steps=steps)
    if source or asked != dataclasses.replace(
        own, config=dataclasses.replace(own.config, train=train)
    ):
        raise WakefulError(
            "--resume takes the run's own configuration and no other option but --train.steps, "
            "which lengthens the run"
        )
    return steps
