"""The verb data: what its options call."""

from wakeful.cli.console import display, tell
from wakeful.cli.parsing import leading, parse
from wakeful.config.verbs import PrepareOptions
from wakeful.errors import WakefulError


def run(arguments: list[str]) -> None:
    """prepare SOURCE... --out DIR: turn text into memory-mapped tokens."""
    if arguments[:1] in (["--help"], ["-h"]):
        arguments = ["prepare", "--help"]
    if not arguments or arguments[0] != "prepare":
        raise WakefulError("write: wakeful data prepare SOURCE... --out DIR")
    sources, rest = leading(arguments[1:])
    options = parse(PrepareOptions, rest, "data prepare SOURCE...")
    if not sources:
        raise WakefulError("name a source: python-stdlib, a file, folder or glob, or hf:NAME")
    options.check()

    from wakeful.data.preparing import preparation, prepare

    with display("prepare") as show:
        data = prepare(
            sources,
            options.out,
            progress=show.stage,
            **preparation(options),
        )
    tell(
        f"{data.train.num_tokens:,} training and {data.validation.num_tokens:,} validation tokens "
        f"of a vocabulary of {data.vocab_size:,} are in {options.out}; use them with "
        f"--data.source {options.out}"
    )
