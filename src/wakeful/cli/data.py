"""The verb data: its options and what they start."""

from dataclasses import dataclass

from wakeful.cli.console import display, tell
from wakeful.cli.parsing import leading, parse
from wakeful.errors import WakefulError


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """How to turn text into memory-mapped tokens."""

    out: str
    """Folder to create."""
    vocab_size: int = 4096
    """Tokens of the byte-level BPE that is trained on the text."""
    tokenizer: str = ""
    """Use this tokenizer.json, or folder with one, instead of training one."""
    validation_source: str = ""
    """Text to validate on. Empty: a share of the documents is held out."""
    validation_fraction: float = 0.02
    """That share."""
    keep_overlap: bool = False
    """Validate even on documents that stand in the training text in part."""
    text_field: str = "text"
    """Field of JSONL and parquet rows that holds the text."""
    max_bytes: int = 0
    """Read no more text than this, in bytes. 0 means all."""


def run(arguments: list[str]) -> None:
    """prepare SOURCE... --out DIR: turn text into memory-mapped tokens."""
    from wakeful.data.preparing import prepare

    if arguments[:1] in (["--help"], ["-h"]):
        arguments = ["prepare", "--help"]
    if not arguments or arguments[0] != "prepare":
        raise WakefulError("write: wakeful data prepare SOURCE... --out DIR")
    sources, rest = leading(arguments[1:])
    options = parse(PrepareOptions, rest, "data prepare SOURCE...", None)
    if not sources:
        raise WakefulError("name a source: python-stdlib, a file, folder or glob, or hf:NAME")
    with display("prepare") as show:
        data = prepare(
            sources,
            options.out,
            tokenizer=options.tokenizer or None,
            vocab_size=None if options.tokenizer else options.vocab_size,
            validation_source=options.validation_source or None,
            validation_fraction=options.validation_fraction,
            max_bytes=options.max_bytes or None,
            text_field=options.text_field,
            keep_overlap=options.keep_overlap,
            progress=show.stage,
        )
    tell(
        f"{data.train.num_tokens:,} training and {data.validation.num_tokens:,} validation tokens "
        f"of a vocabulary of {data.vocab_size:,} are in {options.out}; use them with "
        f"--data.source {options.out}"
    )
