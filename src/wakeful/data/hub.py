"""A Hugging Face dataset, row by row, through the optional `datasets` package."""

from collections.abc import Iterator

from wakeful.data.document import Document
from wakeful.data.readers import checked_text
from wakeful.errors import WakefulError

PREFIX = "hf:"
SPLITS = frozenset({"train", "validation", "valid", "dev", "test"})


def parse(source: str) -> tuple[str, str | None, str]:
    """`hf:owner/name[:config][:split]` as (name, config or None, split).

    The split is "train" unless given. Where only one of the two is there it is a split if it is
    called like one (train, validation, valid, dev, test), and a config otherwise;
    `hf:owner/name::split` says split whatever its name.
    """
    name, *rest = source.removeprefix(PREFIX).split(":")
    if not name or len(rest) > 2:
        raise WakefulError(f"{source!r} is no dataset: write hf:owner/name[:config][:split]")
    if len(rest) == 1 and rest[0] in SPLITS:
        rest = ["", *rest]
    config, split = [*rest, "", ""][:2]
    return name, config or None, split or "train"


def read_hub(source: str, *, text_field: str) -> Iterator[Document]:
    """The documents of a dataset, streamed, without those that are empty.

    Raises WakefulError where `datasets` is not installed, or the dataset, its text column or the
    hub cannot be reached.
    """
    name, config, split = parse(source)
    try:
        from datasets import load_dataset  # noqa: PLC0415 - optional, and slow to import
    except ImportError as error:
        raise WakefulError(
            f"{source} needs the datasets package: pip install 'wakeful[datasets]'"
        ) from error
    label = ":".join([name, config or "", split])
    try:
        rows = load_dataset(name, config, split=split, streaming=True)
        for number, row in enumerate(rows):
            if not isinstance(row, dict) or text_field not in row:
                columns = ", ".join(map(repr, list(row)[:8])) if isinstance(row, dict) else "none"
                raise WakefulError(
                    f"{source}: no column {text_field!r} (columns: {columns}): "
                    "name the one with the text"
                )
            value = row[text_field]
            text = (
                "" if value is None else checked_text(value, f"{source}, row {number}", text_field)
            )
            if text and not text.isspace():
                yield Document(f"{label}:{number}", text)
    except WakefulError:
        raise
    except Exception as error:  # the package has no one exception for "cannot be reached"
        reason = " ".join(str(error).split())[:200]
        raise WakefulError(
            f"cannot read {source} ({type(error).__name__}: {reason}): check its name and the "
            "connection, or download it and pass its files"
        ) from error
