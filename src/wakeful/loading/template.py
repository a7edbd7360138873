"""Chat templates, rendered in a process with limits: they are programs that came with a model.

Jinja's sandbox keeps it from Python's objects; the system ends a process that takes more time or
memory than any conversation needs. This file is that process's program too.
"""

import contextlib
import json
import subprocess
import sys
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

try:
    import resource
except ImportError:  # Windows has none; there the waiting alone is limited.
    resource = None

_SECONDS = 4
"""Most processor time of a rendering."""
_WAITING = 120
"""Most seconds that it may take on a busy machine."""
_MEMORY = 2**29
"""Most bytes of its address space."""
_LONGEST = 2**22
"""Most characters of a template, and of its text."""


def render_template(source: str, messages: list[dict[str, str]], **variables: Any) -> str:
    """Return the text of a conversation in a chat template.

    Raises:
        ValueError: the template is wrong, refuses the conversation, or takes too much.
    """
    if len(source) > _LONGEST:
        raise ValueError(f"it has {len(source):,} characters; {_LONGEST:,} are read")
    task = json.dumps([source, {"messages": messages, **variables}])
    try:
        done = subprocess.run(
            [sys.executable, "-P", __file__], input=task.encode(), capture_output=True,
            timeout=_WAITING, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ValueError(f"it takes more than {_WAITING} s") from None
    if done.returncode == 0:
        return json.loads(done.stdout)
    *_, reason = ["", *done.stderr.decode("utf-8", "replace").splitlines()]
    raise ValueError(reason or f"it takes more than {_SECONDS} s or {_MEMORY // 2**20} MiB")


class _Generation(Extension):
    """`{% generation %}`, which marks what a model writes: here its content alone."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _to_json(value: object, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _render_task(task: str) -> str:
    """Return the text of a template with its variables, in the environment of Transformers."""
    source, variables = json.loads(task)
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now}
    text = environment.from_string(source).render(tools=None, documents=None, **variables)
    if len(text) > _LONGEST:
        raise ValueError(f"it writes {len(text):,} characters, more than {_LONGEST:,}")
    return text


def _main() -> None:
    if resource is not None:
        for limit, most in ((resource.RLIMIT_CPU, _SECONDS), (resource.RLIMIT_AS, _MEMORY)):
            _, hard = resource.getrlimit(limit)
            # macOS reserves more addresses than any limit, and refuses to set one.
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(limit, (most if hard < 0 else min(most, hard), hard))
    try:
        text = _render_task(sys.stdin.read())
    except Exception as error:
        sys.exit(" ".join(str(error).split()))
    json.dump(text, sys.stdout)


if __name__ == "__main__":
    _main()
