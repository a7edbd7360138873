"""lm-eval's logs and bars, kept off the terminal where our own progress is."""

import contextlib
import io
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drop logs up to warnings and what is written to standard error; errors are raised still."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(before)
