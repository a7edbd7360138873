"""Chat templates, rendered in a process with limits: a template is a program of a model's author.

Jinja's sandbox keeps a template from Python's objects; the system ends a process that takes more
time or memory than any conversation needs. This file is also the program of that process.
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
"""Most bytes of the process's address space."""
_LONGEST = 2**22
"""Most characters of a template, and of its text."""


def render_template(source: str, messages: list[dict[str, str]], **variables: Any) -> str:
    """Render a conversation by a chat template in a process of its own; return the text.

    Args:
        source: the template, in Jinja.
        messages: the turns, each with "role" and "content".
        **variables: further variables of the template, such as bos_token.

    Raises:
        ValueError: the template fails, refuses the conversation, or exceeds its time or memory.
    """
    if len(source) > _LONGEST:
        raise ValueError(f"it has {len(source):,} characters; {_LONGEST:,} are read")
    task = json.dumps([source, {"messages": messages, **variables}])
    try:
        process = subprocess.run(
            [sys.executable, "-P", __file__], input=task.encode(), capture_output=True,
            timeout=_WAITING, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ValueError(f"it takes more than {_WAITING} s") from None
    if process.returncode == 0:
        return json.loads(process.stdout)
    # A process that the system ended for its time or memory has written no error.
    error = process.stderr.decode("utf-8", "replace").strip()
    if not error:
        raise ValueError(f"it takes more than {_SECONDS} s or {_MEMORY // 2**20} MiB")
    raise ValueError(error.splitlines()[-1])


class _Generation(Extension):
    """Jinja extension for `{% generation %}` blocks, which mark the model's answer for training:
    only their content is rendered.
    """

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_template_error(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _to_json(value: object, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _render_task(task: str) -> str:
    """Render a JSON pair of a template and its variables in Transformers' Jinja environment."""
    source, variables = json.loads(task)
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _raise_template_error, "strftime_now": _strftime_now,
    }  # fmt: skip
    text = environment.from_string(source).render(tools=None, documents=None, **variables)
    if len(text) > _LONGEST:
        raise ValueError(f"it writes {len(text):,} characters, more than {_LONGEST:,}")
    return text


def _main() -> None:
    """Limit this process's time and memory, then render the task on standard input and write the
    text, as JSON, to standard output. An error goes to standard error, on one line.
    """
    if resource is not None:
        for limit, most in ((resource.RLIMIT_CPU, _SECONDS), (resource.RLIMIT_AS, _MEMORY)):
            _, hard = resource.getrlimit(limit)  # the system's own limit; negative for none
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
