"""A prepared folder appears whole or not at all, and never over something else."""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wakeful.data.tokens import PreparedData, is_prepared
from wakeful.errors import WakefulError


def existing_data(folder: Path, settings: dict[str, Any]) -> PreparedData | None:
    """What `folder` holds, if it may be used; None if it is free; WakefulError otherwise."""
    try:
        if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
            return None
    except OSError as error:
        raise WakefulError(
            f"cannot use {folder}: {error.strerror or error}: choose another folder"
        ) from error
    if not is_prepared(folder):
        raise WakefulError(
            f"{folder} exists and is no prepared data: choose another folder or move it away"
        )
    existing = PreparedData.open(folder)
    theirs = existing.info.get("settings")
    if theirs != settings:
        ours = theirs if isinstance(theirs, dict) else {}
        changed = [name for name in settings if ours.get(name) != settings[name]]
        raise WakefulError(
            f"{folder} was prepared with another {' and '.join(changed)}: "
            "delete it or choose another folder"
        )
    return existing


@contextlib.contextmanager
def building_beside(folder: Path) -> Iterator[Path]:
    """A folder beside `folder` that is gone afterwards, whatever happens."""
    name = f".{folder.name}.{os.getpid()}-{secrets.token_hex(4)}.partial"
    building = folder.parent / name
    try:
        building.mkdir(parents=True)
        yield building
    except OSError as error:
        raise WakefulError(
            f"cannot write {folder}: {error.strerror or error}: free some space or choose "
            "another folder (nothing was kept)"
        ) from error
    finally:
        shutil.rmtree(building, ignore_errors=True)


def move_in(building: Path, folder: Path, settings: dict[str, Any]) -> None:
    """Give the built folder its name in one step, once its bytes are on the disk."""
    for path in building.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())  # or a crash could leave the name without the bytes
    try:
        building.rename(folder)
    except OSError:
        # Another process may have prepared the same meanwhile; theirs is as good as ours.
        if existing_data(folder, settings) is None:
            raise
