"""The running Python's own standard library as a corpus: always there, nothing to download."""

import io
import os
import sysconfig
import tokenize
from pathlib import Path

from wakeful.errors import WakefulError

SKIPPED_FOLDERS = frozenset(
    {
        "__pycache__",
        "_bundled",  # ensurepip's wheels
        "dist-packages",
        "idle_test",
        "lib-dynload",
        "site-packages",
        "test",
        "tests",
    }
)
# What the machine that built Python wrote: not the library's text, and different everywhere.
GENERATED_FOLDER, GENERATED_FILE = "config-", "_sysconfigdata"


def stdlib_files() -> list[tuple[str, Path]]:
    """The library's `.py` files, tests left out, as (relative POSIX path, path), sorted by name."""
    root = Path(sysconfig.get_path("stdlib"))
    files: list[tuple[str, Path]] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [
            name
            for name in folders
            if name not in SKIPPED_FOLDERS and not name.startswith(GENERATED_FOLDER)
        ]
        for name in names:
            if name.endswith(".py") and not name.startswith(GENERATED_FILE):
                path = Path(folder, name)
                files.append((path.relative_to(root).as_posix(), path))
    if not files:
        raise WakefulError(
            f"this Python keeps no standard library sources in {root}: pass a file or a folder"
        )
    return sorted(files)


def read_python(path: Path) -> str | None:
    """The text of a Python file in its declared encoding (PEP 263), or None if it cannot be read.

    Newlines become `\\n`, as `tokenize.open` has it. A file that does not decode is left out
    everywhere alike, since the declaration stands in the file.
    """
    try:
        data = path.read_bytes()
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        text = data.decode(encoding)
        text.encode("utf-8")
    except (OSError, SyntaxError, UnicodeError, LookupError):
        return None
    return text.replace("\r\n", "\n").replace("\r", "\n")
