"""Where what was made once is kept for next time."""

import os
import secrets
from pathlib import Path


def default_cache_dir() -> Path:
    """`$WAKEFUL_CACHE`, else `$XDG_CACHE_HOME/wakeful`, else `~/.cache/wakeful`."""
    if own := os.environ.get("WAKEFUL_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "wakeful"
    return Path.home() / ".cache" / "wakeful"


def expanded(path: str | Path) -> Path:
    """Return a path with the home folder in the place of `~`; that of a user unknown here stays."""
    return Path(os.path.expanduser(path))


def check_readable(path: Path) -> None:
    """Raise `PermissionError` for a file that may not be read, which safetensors calls missing."""
    path.open("rb").close()


def free_folder(path: str | Path) -> Path:
    """Return the path, or where something has that name the first of -2, -3 … that is free."""
    place = first = Path(path)
    number = 2
    while place.exists():
        place = first.with_name(f"{first.name}-{number}")
        number += 1
    return place


def part_beside(path: Path) -> Path:
    """Return a hidden path beside `path`, free to write what is to take its place.

    No process number is unique: containers that share a disk count from 1.
    """
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")


def moved_in(part: Path, folder: Path, file: str) -> None:
    """Give a finished folder its name in one step, or leave the one that another process made.

    `file` is one that a finished folder has: without it there, the error of the move is raised.
    """
    try:
        part.rename(folder)
    except OSError:
        if not (folder / file).is_file():
            raise
