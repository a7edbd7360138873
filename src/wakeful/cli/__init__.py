"""The command line."""

import contextlib
import errno
import logging
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from rich.markup import escape

import wakeful
from wakeful.cli.console import ERR, LET_IT_SPEAK, OUT, LogRecord, another_speaks, open_streams
from wakeful.errors import Interrupted, WakefulError, WakefulWarning, first_line
from wakeful.guard import lacks_memory
from wakeful.variants.discovery import trusting

SPREAD = ("train", "inherit")
"""Those that train, on all processes of torchrun."""
INTERRUPTED = 130
"""The exit status after Ctrl-C, whatever was saved: the shell's."""
TERMINATED = 143
"""And after SIGTERM, where there was nothing to save."""
_LESS_MEMORY = (
    "lower --batch_size or --length (of training train.batch_size or train.micro_batch_size), load "
    "with --dtype bfloat16, or take a smaller model"
)
_FOR_THE_USER = frozenset(
    (errno.ENAMETOOLONG, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO)
)
"""Errors of the system that no code can prevent."""
_CHATTY = ("torchao", "torch.utils._pytree")
"""Loggers that complain of torchao, which Transformers imports wherever it is installed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; return its exit status."""
    open_streams()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    logging.setLogRecordFactory(LogRecord)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)
    if arguments[:1] == ["help"] and arguments[1:]:
        arguments = [*arguments[1:], "--help"]
    return _status(arguments[0] if arguments else "help", arguments[1:])


def _status(verb: str, rest: list[str]) -> int:
    """Run a verb and return its exit status; say in one line what the user can mend, and whatever
    we warn of.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("default", WakefulWarning)
        warnings.showwarning = partial(_show_warning, warnings.showwarning)
        return _ended(verb, rest)


def _show_warning(others: Callable[..., None], message: Any, category: Any, *rest: Any) -> None:
    """Print a warning of ours as one line."""
    if issubclass(category, WakefulWarning):
        ERR.print(f"warning: {message}", highlight=False, markup=False)
    else:
        others(message, category, *rest)


def _ended(verb: str, rest: list[str]) -> int:
    """Run a verb and return its exit status."""
    try:
        _run(verb, rest)
        sys.stdout.flush()  # here, where a full disk can be told of
    except WakefulError as error:
        _complain(verb, str(error))
        return INTERRUPTED if isinstance(error, Interrupted) else 1
    except BrokenPipeError:
        sys.stderr.close()
        return 141
    except KeyboardInterrupt as error:
        ERR.print("ended by SIGTERM" if isinstance(error, _Terminated) else "interrupted")
        return TERMINATED if isinstance(error, _Terminated) else INTERRUPTED
    except Exception as error:
        if lacks_memory(error):
            _complain(verb, f"memory is full ({first_line(error)}): {_LESS_MEMORY}")
        elif isinstance(error, OSError) and error.errno in _FOR_THE_USER:
            if error.filename is None:
                _drop_output()
            _complain(verb, _of_system(error))
        else:
            raise
        return 1
    return 0


def _run(verb: str, rest: list[str]) -> None:
    if verb in ("--version", "-V"):
        OUT.print(f"wakeful {wakeful.__version__}", highlight=False)
        return
    _check_text([verb, *rest])
    from wakeful.cli.command import HELP, HELP_ALL, asks_for_help, overview, trusted_modules
    from wakeful.cli.verbs import all_verbs, find_verb

    verbs = all_verbs()
    group = any(name.startswith(f"{verb} ") for name in verbs)
    if verb in (*HELP, *HELP_ALL, "help") or (group and asks_for_help(rest[:1])):
        summary = (wakeful.__doc__ or "").split("\n", 1)[0]
        app = overview(verbs, wakeful.__version__, summary)
        app.help_print([verb] if group else [], console=OUT)
        return
    _, chosen, rest = find_verb([verb, *rest])
    rest, modules = trusted_modules(rest)
    with _ended_in_order(), trusting(modules), _processes(verb):
        chosen.run(rest)


def _drop_output() -> None:
    """Let what standard output still holds go nowhere, or Python would fail to write it again."""
    with contextlib.suppress(OSError, ValueError):  # it has no file
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


class _Terminated(KeyboardInterrupt):
    """SIGTERM came: what is half-written is removed on the way out."""


@contextlib.contextmanager
def _ended_in_order() -> Iterator[None]:
    """Let SIGTERM end the work as Ctrl-C does; torchrun's processes end at once, as others wait."""

    def end(number: int, frame: object) -> None:
        raise _Terminated

    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    if not alone or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _of_system(error: OSError) -> str:
    """Return the system's message and the path it is about; standard output has none."""
    if error.errno == errno.ENAMETOOLONG:
        return f"a path is longer than this system takes: {str(error.filename)[:60]}..."
    place = "the output" if error.filename is None else str(error.filename)
    return f"{place} cannot be read or written: {os.strerror(error.errno or 0)}"


def _complain(verb: str, message: str) -> None:
    line = " ".join(message.splitlines())
    verb = verb.encode("utf-8", "backslashreplace").decode()
    ERR.print(f"[bold red]wakeful {escape(verb)}:[/] {escape(line)}", highlight=False)


@contextlib.contextmanager
def _processes(verb: str) -> Iterator[None]:
    """Make one error of many where there are several processes, as `joined` does; refuse them where
    the verb takes one, and let the first alone say so.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        yield
    elif verb in SPREAD:
        from wakeful.runs.distributed import joined

        with joined():
            yield
    elif another_speaks():
        time.sleep(LET_IT_SPEAK)
        sys.exit(1)
    else:
        raise WakefulError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, and {verb} takes one process (several are "
            f"for {', '.join(SPREAD)}); start it without torchrun, or unset WORLD_SIZE"
        )


def _check_text(arguments: list[str]) -> None:
    for argument in arguments:
        try:
            argument.encode("utf-8")
        except UnicodeEncodeError:
            raise WakefulError(f"an argument is not UTF-8: {argument!a}") from None
