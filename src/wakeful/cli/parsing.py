"""Arguments to typed options."""

import contextlib
import io
import sys
import time
from functools import partial
from typing import Any

import tyro

from wakeful.cli.console import LET_IT_SPEAK, another_speaks
from wakeful.config.tables import presets
from wakeful.errors import WakefulError


def leading(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split the names before the first option from the rest."""
    for place, argument in enumerate(arguments):
        if argument.startswith("-"):
            return arguments[:place], arguments[place:]
    return arguments, []


def parse(kind: type, arguments: list[str], prog: str, default: Any) -> Any:
    extra = {} if default is None else {"default": default}
    read = partial(tyro.cli, kind, prog=f"wakeful {prog}", args=arguments, use_underscores=True)
    shown = io.StringIO()
    silent = another_speaks()
    try:
        with contextlib.redirect_stderr(shown), _without_output(silent):
            return read(description=_epilogue(prog), **extra)
    except SystemExit as ended:
        # Tyro frames what a part's own checks object to, and hides it behind this.
        behind = ended.__context__
        while behind is not None and not isinstance(behind, WakefulError):
            behind = behind.__context__
        if behind is not None:
            raise behind from None
        if not silent:
            sys.stderr.write(shown.getvalue())
        elif ended.code:
            time.sleep(LET_IT_SPEAK)
        raise


def _without_output(silent: bool) -> contextlib.AbstractContextManager[object]:
    return contextlib.redirect_stdout(io.StringIO()) if silent else contextlib.nullcontext()


def _epilogue(prog: str) -> str:
    verb = prog.split(maxsplit=1)[0]
    from wakeful.cli import VERBS

    text = VERBS[verb]
    if verb in ("train", "compare"):
        from wakeful.variants import catalogue

        text += f"\n\nPresets: {', '.join(presets())}."
        for folder, option in (
            ("routes", "route"),
            ("normalizers", "normalizer"),
            ("depth", "depth"),
        ):
            names = ", ".join(
                f"{entry.name}({entry.signature})" if entry.signature else entry.name
                for entry in catalogue(folder)
            )
            text += f"\n\n--model.{option}: {names}."
    if verb == "inherit":
        from wakeful.growth.baselines import BASELINES

        names = "; ".join(f"{name}: {entry.summary}" for name, entry in BASELINES.items())
        text += f"\n\n--baseline: {names}."
    return text
