"""Cache folders and temporary files."""

import contextlib
import functools
import hashlib
import os
import platform
import re
import secrets
import shutil
from pathlib import Path

_PART = re.compile(r"\..*\.([0-9a-f]{8})\.([0-9a-f]{8})\.(\d{1,10})\.[0-9a-f]{8}\.part", re.DOTALL)
"""The name of a part: of what, and the machine, the boot and the process that write it."""

_NAMED = 160
"""Bytes of a name that the name of its part begins with; systems take 255 in all."""


def default_cache_dir() -> Path:
    """`$WAKEFUL_CACHE`, else `$XDG_CACHE_HOME/wakeful`, else `~/.cache/wakeful`."""
    if own := os.environ.get("WAKEFUL_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "wakeful"
    return Path.home() / ".cache" / "wakeful"


def expand_home(path: str | Path) -> Path:
    """Return a path with `~` replaced by the home folder; that of an unknown user stays."""
    return Path(os.path.expanduser(path))


def check_readable(path: Path) -> None:
    """Raise `PermissionError` for a file that may not be read, which safetensors calls missing."""
    path.open("rb").close()


def free_folder(path: str | Path) -> Path:
    """Return the path, or where something has that name the first of -2, -3 … that is free."""
    candidate = first = Path(path)
    number = 2
    while candidate.exists():
        candidate = first.with_name(f"{first.name}-{number}")
        number += 1
    return candidate


def temporary_path_beside(path: Path) -> Path:
    """Return a hidden path beside `path`, free to write what is to take its place.

    Its name says whose it is, and what a process that is gone left beside it is removed, once for
    each folder. A number of a process is unique on one machine, in one boot and container only.
    """
    _sweep(path.absolute().parent)
    owner = f"{_machine()}.{_boot()}.{os.getpid()}"
    short = path.name.encode()[:_NAMED].decode(errors="ignore")
    return path.with_name(f".{short}.{owner}.{secrets.token_hex(4)}.part")


@functools.cache
def _sweep(folder: Path) -> None:
    """Remove the parts in a folder whose process, of this machine, is gone."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            match = _PART.fullmatch(path.name)
            if match is None or match[1] != _machine():
                continue
            if match[2] == _boot() and _lives(int(match[3])):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # another user's
        return True
    return True


@functools.cache
def _machine() -> str:
    """Return what tells a machine from others, and a container on it."""
    try:
        numbers = os.readlink("/proc/self/ns/pid")
    except OSError:
        numbers = ""
    return hashlib.sha256(f"{platform.node()} {numbers}".encode()).hexdigest()[:8]


@functools.cache
def _boot() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        boot = ""
    return hashlib.sha256(boot.encode()).hexdigest()[:8]


def install_folder(part: Path, folder: Path, file: str) -> None:
    """Give a finished folder its name in one step, or leave the one that another process made.

    `file` is one that a finished folder has: without it there, the error of the move is raised.
    """
    try:
        part.rename(folder)
    except OSError:
        if not (folder / file).is_file():
            raise
