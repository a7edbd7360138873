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
from wakeful.cli.console import (
    ERR,
    OUT,
    SECONDS_FOR_FIRST,
    LogRecord,
    is_secondary_process,
    open_streams,
)
from wakeful.errors import Interrupted, WakefulError, WakefulWarning, first_line
from wakeful.guard import lacks_memory
from wakeful.variants.discovery import trust_modules

DISTRIBUTED_VERBS = ("train", "inherit")
"""Verbs that run on all processes of torchrun."""
INTERRUPTED = 130
"""Exit status after Ctrl-C, as of a shell, and after SIGTERM where a run was saved."""
TERMINATED = 143
"""Exit status after SIGTERM where nothing was saved."""
BROKEN_PIPE = 141
"""Exit status where nobody reads the output any more, as of a shell after SIGPIPE."""
_LESS_MEMORY = (
    "lower --batch_size or --length (of training train.batch_size or train.micro_batch_size), load "
    "with --dtype bfloat16, or take a smaller model"
)
_FOR_THE_USER = frozenset(
    (errno.ENAMETOOLONG, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO)
)
"""System errors that only the user can resolve."""
_NOISY_LOGGERS = ("torchao", "torch.utils._pytree")
"""Loggers that warn about torchao, which Transformers imports wherever it is installed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `wakeful VERB ...` and return its exit status; None: `sys.argv`."""
    open_streams()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    logging.setLogRecordFactory(LogRecord)
    for name in _NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    if arguments[:1] == ["help"] and arguments[1:]:  # `wakeful help VERB`
        arguments = [*arguments[1:], "--help"]
    return _run_with_warnings(arguments[0] if arguments else "help", arguments[1:])


def _run_with_warnings(verb: str, rest: list[str]) -> int:
    """Run a verb with the arguments `rest`, print each `WakefulWarning` as one line, and return the
    exit status.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("default", WakefulWarning)
        warnings.showwarning = partial(_show_warning, warnings.showwarning)
        return _run_with_errors(verb, rest)


def _show_warning(
    show_other_warning: Callable[..., None], message: Any, category: Any, *rest: Any
) -> None:
    """Print a `WakefulWarning` as one line; pass any other warning to `show_other_warning`."""
    if issubclass(category, WakefulWarning):
        ERR.print(f"warning: {message}", highlight=False, markup=False)
    else:
        show_other_warning(message, category, *rest)


def _run_with_errors(verb: str, rest: list[str]) -> int:
    """Run a verb with the arguments `rest` and return the exit status, 0 where it succeeds.

    An error that the user can resolve (a `WakefulError`, full memory, a full disk) is printed as
    one line; any other exception is raised.
    """
    try:
        _dispatch(verb, rest)
        sys.stdout.flush()  # now, so that the error of a full disk is caught below
    except WakefulError as error:
        _print_error(verb, str(error))
        return INTERRUPTED if isinstance(error, Interrupted) else 1
    except BrokenPipeError:  # the reader of the output, such as `head`, has ended
        sys.stderr.close()  # at exit Python would print an error about unwritten output
        return BROKEN_PIPE
    except KeyboardInterrupt as error:
        ERR.print("ended by SIGTERM" if isinstance(error, _Terminated) else "interrupted")
        return TERMINATED if isinstance(error, _Terminated) else INTERRUPTED
    except Exception as error:
        if lacks_memory(error):
            _print_error(verb, f"memory is full ({first_line(error)}): {_LESS_MEMORY}")
        elif isinstance(error, OSError) and error.errno in _FOR_THE_USER:
            if error.filename is None:  # standard output, which could not be written
                _discard_buffered_output()
            _print_error(verb, _describe_os_error(error))
        else:
            raise
        return 1
    return 0


def _dispatch(verb: str, rest: list[str]) -> None:
    """Print the version or the overview of all verbs, or run `verb` with the arguments `rest`.

    Raises:
        WakefulError: an argument is not UTF-8, the verb is unknown, or the verb fails.
    """
    if verb in ("--version", "-V"):
        OUT.print(f"wakeful {wakeful.__version__}", highlight=False)
        return
    _check_text([verb, *rest])
    from wakeful.cli.command import HELP, HELP_ALL, build_overview, split_imports
    from wakeful.cli.verbs import all_verbs, find_verb

    if verb in (*HELP, *HELP_ALL, "help"):
        summary = (wakeful.__doc__ or "").split("\n", 1)[0]
        build_overview(all_verbs(), wakeful.__version__, summary).help_print([], console=OUT)
        return
    verb_entry = find_verb(verb)
    rest, modules = split_imports(rest)
    with _end_on_sigterm(), trust_modules(modules), _check_processes(verb):
        verb_entry.run(rest)


def _discard_buffered_output() -> None:
    """Redirect standard output to the null device, and with it the text that it has buffered: at
    exit Python would fail again to write that text.
    """
    # Standard output may have no file descriptor.
    with contextlib.suppress(OSError, ValueError):
        null_device = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null_device, sys.stdout.fileno())
        os.close(null_device)


class _Terminated(KeyboardInterrupt):
    """SIGTERM, raised as an exception so that unfinished files are removed."""


@contextlib.contextmanager
def _end_on_sigterm() -> Iterator[None]:
    """Raise `_Terminated` on SIGTERM inside the block, as Ctrl-C raises KeyboardInterrupt.

    The handler stays as it is in one of several processes of torchrun, where `join_processes` sets
    its own, and in threads other than the main one, which cannot set any.
    """

    def raise_terminated(number: int, frame: object) -> None:
        raise _Terminated

    is_only_process = os.environ.get("WORLD_SIZE", "1") == "1"
    is_main_thread = threading.current_thread() is threading.main_thread()
    if not is_only_process or not is_main_thread:
        yield
        return
    previous_handler = signal.signal(signal.SIGTERM, raise_terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous_handler)


def _describe_os_error(error: OSError) -> str:
    """Describe a system error in one line: the file's path, or "the output" if the error names no
    file, and the system's message.
    """
    if error.errno == errno.ENAMETOOLONG:
        return f"a path is longer than this system takes: {str(error.filename)[:60]}..."
    path = "the output" if error.filename is None else str(error.filename)
    return f"{path} cannot be read or written: {os.strerror(error.errno or 0)}"


def _print_error(verb: str, message: str) -> None:
    """Print `wakeful VERB: message` as one line on standard error."""
    line = " ".join(message.splitlines())
    verb = verb.encode("utf-8", "backslashreplace").decode()
    ERR.print(f"[bold red]wakeful {escape(verb)}:[/] {escape(line)}", highlight=False)


@contextlib.contextmanager
def _check_processes(verb: str) -> Iterator[None]:
    """Join the processes of torchrun, if there are several, while the block runs `verb`; an error
    of one process ends all of them.

    Raises:
        WakefulError: there are several processes, and this verb runs on one alone. Only the first
            process raises the error; the others exit.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        yield
    elif verb in DISTRIBUTED_VERBS:
        from wakeful.runs.distributed import join_processes

        with join_processes():
            yield
    elif is_secondary_process():
        time.sleep(SECONDS_FOR_FIRST)  # until the first process has printed its error
        sys.exit(1)
    else:
        raise WakefulError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, and {verb} takes one process (several are "
            f"for {', '.join(DISTRIBUTED_VERBS)}); start it without torchrun, or unset WORLD_SIZE"
        )


def _check_text(arguments: list[str]) -> None:
    """Raise `WakefulError` for an argument of the command line that is not UTF-8."""
    for argument in arguments:
        try:
            argument.encode("utf-8")
        except UnicodeEncodeError:
            raise WakefulError(f"an argument is not UTF-8: {argument!a}") from None
