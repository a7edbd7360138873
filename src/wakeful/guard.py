"""Errors of other libraries, turned into `WakefulError`s that name the file being read."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from wakeful.errors import WakefulError, first_line

_TOO_LARGE = ("allocate memory", "out of memory", "Overflow when unpacking", "invalid size")
"""Parts of the messages of torch and the system when memory is exhausted."""


@contextmanager
def wrap_errors(problem: str, advice: str = "") -> Iterator[None]:
    """Within a context, turn any `Exception` into a `WakefulError` "problem: message", followed by
    `advice`; a `WakefulError` is passed on.

    A panic of a library in Rust is turned into one too, although it is no `Exception`.
    """
    try:
        yield
    except WakefulError:
        raise
    except BaseException as error:
        is_panic = type(error).__name__ == "PanicException"
        if not isinstance(error, Exception) and not is_panic:  # such as KeyboardInterrupt
            raise
        reason = "it does not fit into memory" if lacks_memory(error) else first_line(error)
        raise WakefulError(f"{problem}: {' '.join(reason.split())[:200]}{advice}") from None


def lacks_memory(error: BaseException) -> bool:
    """Tell whether an error's type, number or message says that memory was exhausted."""
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    return isinstance(error, RuntimeError | OSError) and any(
        sign in str(error) for sign in _TOO_LARGE
    )
