"""SHA-256 of files and of values."""

import hashlib
import json
from pathlib import Path


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def joined_sha256(*parts: object) -> str:
    """Return the SHA-256 of several values as text, joined by colons."""
    return hashlib.sha256(":".join(map(str, parts)).encode()).hexdigest()


def json_digest(value: object) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of a value's JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
