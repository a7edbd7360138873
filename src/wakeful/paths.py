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
"""Name of a temporary path: the final name, and the machine, boot and process that write to it."""

_NAMED = 160
"""Bytes of the final name that a temporary name begins with; systems allow 255 in all."""


def default_cache_dir() -> Path:
    """Return the cache folder: `$WAKEFUL_CACHE`, else `$XDG_CACHE_HOME/wakeful`, else
    `~/.cache/wakeful`.
    """
    cache_folder = os.environ.get("WAKEFUL_CACHE")
    if cache_folder:
        return Path(cache_folder).expanduser()
    shared_folder = os.environ.get("XDG_CACHE_HOME")
    if shared_folder:
        return Path(shared_folder).expanduser() / "wakeful"
    return Path.home() / ".cache" / "wakeful"


def expand_home(path: str | Path) -> Path:
    """Return a path with `~` replaced by the home folder; `~name` of an unknown user stays."""
    return Path(os.path.expanduser(path))


def check_readable(path: Path) -> None:
    """Raise `PermissionError` for a file that this user may not read, which safetensors would
    report as missing.
    """
    path.open("rb").close()


def free_folder(path: str | Path) -> Path:
    """Return `path` if nothing has that name, else the first free one of path-2, path-3 …"""
    candidate = first = Path(path)
    number = 2
    while candidate.exists():
        candidate = first.with_name(f"{first.name}-{number}")
        number += 1
    return candidate


def temporary_path_beside(path: Path) -> Path:
    """Return a free hidden path in the folder of `path`, for a file or folder that is renamed to
    `path` once it is finished.

    Its name identifies the machine, boot and process that write to it. The first call for a folder
    removes the temporary paths in it whose processes no longer run.
    """
    _remove_abandoned(path.absolute().parent)
    owner = f"{_machine_id()}.{_boot_id()}.{os.getpid()}"
    short_name = path.name.encode()[:_NAMED].decode(errors="ignore")  # of at most 160 bytes
    return path.with_name(f".{short_name}.{owner}.{secrets.token_hex(4)}.part")


@functools.cache
def _remove_abandoned(folder: Path) -> None:
    """Remove the temporary paths in a folder whose process, on this machine, no longer runs; of
    several calls for a folder only the first does.
    """
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            match = _PART.fullmatch(path.name)  # groups: machine, boot, process
            if match is None or match[1] != _machine_id():  # another machine's may still run
                continue
            # A process of an earlier boot has ended, even if a new one has its id.
            if match[2] == _boot_id() and _is_running(int(match[3])):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _is_running(process: int) -> bool:
    """Return True if a process of this id runs on this machine, whoever owns it."""
    try:
        os.kill(process, 0)  # signal 0 only checks
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # not known: another user's process may not be asked
        return True
    return True


@functools.cache
def _machine_id() -> str:
    """Return eight hexadecimal digits that identify this machine and container: process ids are
    unique only within one.
    """
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return hashlib.sha256(f"{platform.node()} {namespace}".encode()).hexdigest()[:8]


@functools.cache
def _boot_id() -> str:
    """Return eight hexadecimal digits that identify the machine's last boot, after which process
    ids begin anew.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        boot = ""
    return hashlib.sha256(boot.encode()).hexdigest()[:8]


def install_folder(part: Path, folder: Path, file: str) -> None:
    """Rename a finished temporary folder `part` to `folder`, or leave it if another process has
    finished `folder` meanwhile.

    Raises:
        OSError: `part` cannot be renamed, and `folder` lacks `file`, which a finished folder has.
    """
    try:
        part.rename(folder)
    except OSError:
        if not (folder / file).is_file():
            raise
