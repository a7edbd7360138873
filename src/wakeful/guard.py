"""Errors of other libraries, raised as one line that names the file being read."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from wakeful.errors import WakefulError, first_line

_TOO_LARGE = ("allocate memory", "out of memory", "Overflow when unpacking", "invalid size")
"""Parts of messages, in errors of no special type, of torch and the system where memory ends."""


@contextmanager
def wrap_errors(problem: str, then: str = "") -> Iterator[None]:
    """Turn whatever is raised into a `WakefulError`: `what` is wrong, the library's line, and what
    to do `then`. One that is raised already goes through.

    Libraries in Rust panic by an exception that is none of `Exception`.
    """
    try:
        yield
    except WakefulError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = "it does not fit into memory" if lacks_memory(error) else first_line(error)
        raise WakefulError(f"{problem}: {' '.join(reason.split())[:200]}{then}") from None


def lacks_memory(error: BaseException) -> bool:
    """Return True if an error says that memory was not enough."""
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    return isinstance(error, RuntimeError | OSError) and any(
        sign in str(error) for sign in _TOO_LARGE
    )
