"""What others may have done to a file: one generator of damage, and what a reader may do then.

A reader of other people's files ends in one of two ways, well within a time and an amount of
memory: it returns, or it raises one `WakefulError` of one line.
"""

import contextlib
import copy
import json
import resource
import signal
from collections.abc import Callable, Iterator
from random import Random
from types import FrameType
from typing import Any

from wakeful.errors import WakefulError

LONGEST_LINE = 2_000
"""Characters of an error; the values it quotes may be of any length."""
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, -(2**63), 2**64, 10**30, 10**400, 0.5, -0.0, 1e308, 1e-320,
    float("nan"), float("inf"), float("-inf"), "", " ", "x", "nan", "\0", "a\nb", "\x1b[2J",
    "\ud800", "é" * 300, "x" * 100_000, "../../x", "/etc/passwd", "..", ".", "a/b", "<i>x",
    "{{7*7}}", "[red]x[/]", "[/]", "%s%n", [], {}, [[]], [None], ["x"] * 2_000, {"": 0}, {"x": {}},
]  # fmt: skip
"""Values that no field expects: of every other kind, huge, negative, no number, no text, paths."""
_PIECES = [b"\xff" * 8, b"\0" * 8, b"\x7f", b"\x01\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\n", b'"',
           b"[" * 3_000, b'{"a":' * 2_000, b"9" * 5_000, b"NaN", b"-1", b"1e999"]  # fmt: skip


class Late(BaseException):
    """Work that is not done in time; no `except Exception` takes it for damage."""


def damaged(content: bytes, random: Random) -> bytes:
    """Return the bytes with a few of them flipped, overwritten, added, cut out or cut off."""
    data = bytearray(content)
    for _ in range(random.randint(1, 4)):
        place = random.randrange(len(data) + 1)
        match random.randrange(7):
            case 0 if data:
                data[place % len(data)] ^= 1 << random.randrange(8)
            case 1:
                del data[place:]
            case 2:
                del data[place : place + random.randint(1, 40)]
            case 3:
                piece = random.choice(_PIECES)[:8]
                data[place : place + len(piece)] = piece
            case 4:
                data[place:place] = random.choice(_PIECES)
            case 5:
                data[place:place] = data[: random.randint(1, 60)]
            case _:
                data[place : place + 8] = random.randbytes(8)
    return bytes(data)


def changed(table: Any, random: Random, *, times: int = 2) -> Any:
    """Return a JSON value in which a few values or names are others, missing, or nested deeper."""
    table = copy.deepcopy(table)
    for _ in range(random.randint(1, times)):
        places = list(_places(table))
        if not places:
            return random.choice(ODD)
        holder, key = random.choice(places)
        match random.randrange(6):
            case 0:
                del holder[key]
            case 1:
                holder[key] = [holder[key]]
            case 2:
                holder[key] = {str(key): holder[key]}
            case 3 if isinstance(holder, dict):
                name = next(value for value in random.sample(ODD, len(ODD)) if type(value) is str)
                holder[name] = holder.pop(key)
            case _:
                holder[key] = copy.deepcopy(random.choice(ODD))
    return table


def changed_json(content: bytes, random: Random) -> bytes:
    """Return JSON that was changed as a value, given a name twice, or damaged as bytes."""
    match random.randrange(6):
        case 0:
            return damaged(content, random)
        case 1:
            text = content.decode()
            return text.replace("{", '{"x": ' + "[" * 500 + "]" * 500 + ", ", 1).encode()
        case 2:
            twice = json.dumps(changed(json.loads(content), random)).encode()
            return content.rstrip()[:-1] + b", " + twice[1:] if twice[:1] == b"{" else twice
        case _:
            return json.dumps(changed(json.loads(content), random)).encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict | list):
        keys = list(value) if isinstance(value, dict) else range(len(value))
        for key in keys:
            yield value, key
            yield from _places(value[key])


@contextlib.contextmanager
def bounded(*, seconds: float = 20.0, megabytes: int = 1024) -> Iterator[None]:
    """Raise where the work inside takes longer, or more memory on top of what there is."""

    def late(_number: int, _frame: FrameType | None) -> None:
        raise Late(f"not done within {seconds} s")

    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + megabytes * 2**20
    before = signal.signal(signal.SIGALRM, late)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def refusal(call: Callable[[], object], *, seconds: float = 20.0, megabytes: int = 1024) -> str:
    """Return what a call is refused with, "" where it is not; anything else it does raises."""
    try:
        with bounded(seconds=seconds, megabytes=megabytes):
            call()
    except WakefulError as error:
        line = str(error)
        assert line, "an error without a word"
        assert line.isprintable(), repr(line[:300])
        assert len(line) <= LONGEST_LINE, repr(line[:300])
        return line
    return ""


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let no file grow past `size` bytes, as a quota would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
