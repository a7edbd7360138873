"""A run directory: the one place where the verbs meet.

run.json          `Header`
config.toml       every field of the configuration, resolved
environment.json  `Environment`
metrics.jsonl     one row a step or evaluation, as they happen; metrics.parquet at the end
trajectories.jsonl  one row a figure of a layer or head at each diagnosis, where it is asked for
validation.parquet  the loss of every validation window at the end
summary.json      the run's figures
tokenizer.json
checkpoints/step-00000200/

Every file is a dataclass of the package that writes it, read by `Run.read`.
"""

import contextlib
import errno
import json
import os
import platform
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import polars as pl
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from wakeful.config.schema import Config, config_from_table
from wakeful.config.tables import from_table, read_table, to_table
from wakeful.errors import WakefulError, did_you_mean_path, first_line
from wakeful.guard import wrap_errors
from wakeful.paged import Paged, release_pages, to_plain_tensor
from wakeful.paths import temporary_path_beside
from wakeful.version import __version__

try:
    import fcntl
except ImportError:  # Windows has no flock; there a run directory is not guarded.
    fcntl = None

T = TypeVar("T")
RUN_FORMAT = 1
LOGS = ("metrics.jsonl", "trajectories.jsonl")
"""Files that grow by a row."""
RESUMED = ("train", "compare", "inherit")
"""The kinds of run that can be gone on with."""
Columns = Mapping[str, type]
"""The polars type of each column."""
METRICS: Columns = {"kind": pl.String, "step": pl.Int64, "loss": pl.Float64, "tokens": pl.Int64}
TRAJECTORIES: Columns = {
    "step": pl.Int64, "layer": pl.Int64, "head": pl.Int64, "position": pl.String,
    "metric": pl.String, "variant": pl.String, "value": pl.Float64, "standard_error": pl.Float64,
}  # fmt: skip
"""`head` is null in the rows of a layer; errors are over sequences."""
VALIDATION: Columns = {"window": pl.Int64, "loss": pl.Float64, "tokens": pl.Int64}
_LARGEST_LOSS = 1e100
"""Nats per token; the squares of larger losses are not finite."""
_CUT_OFF = re.compile(r"\d+ requested and \d+ written")
"""numpy's only word of a disk that is full."""
_MOST_ROWS = 2**24
"""Of a table; a small file can announce any number."""


@dataclass(frozen=True, kw_only=True)
class Header:
    """run.json: what a run directory is. What only one kind of run says is empty in the others."""

    format: int = RUN_FORMAT
    kind: str = ""
    """train, compare, inherit, diagnose, evaluate, quantize, or a verb of another package."""
    created: str = ""
    status: str = ""
    """running, stopped or done."""
    wakeful: str = ""
    name: str = ""
    initial: dict[str, Any] | None = None
    """Source of a training run's initial weights; None for random ones."""
    baseline: str = ""
    """Of a comparison, as the next three: the variant that differences are taken from."""
    variants: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    layouts: tuple[str, ...] = ()
    """The names of layouts that add to the report."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """environment.json: the versions, the machine and the number of processes a run used."""

    wakeful: str
    python: str
    torch: str
    transformers: str
    tokenizers: str
    safetensors: str
    numpy: str
    polars: str
    platform: str
    device: str
    device_name: str
    threads: int
    processes: int

    @property
    def computer(self) -> str:
        """The device, its processes and their threads in words."""
        processes = "" if self.processes == 1 else f"{self.processes} processes of "
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        return f"{self.device_name}, {processes}{threads}"

    def __str__(self) -> str:
        """Return the computer and the main versions as one line of text."""
        return (
            f"{self.computer}; torch {self.torch}, Transformers {self.transformers}, "
            f"wakeful {self.wakeful}"
        )


class Run:
    """An open run directory."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @classmethod
    @contextlib.contextmanager
    def create(cls, path: str | Path, kind: str, fields: Mapping[str, Any]) -> Iterator["Run"]:
        """Create a run directory, which the context fills under a temporary name; it is renamed to
        `path` when the context ends without an error.

        run.json is written last, with `fields` as further entries. Without it a folder is not a
        run.

        Raises:
            WakefulError: `path` exists and is not an empty folder, or cannot be written.
        """
        final = cls(path)
        final.refuse_existing(kind)
        run = cls(temporary_path_beside(final.path))
        try:
            with disk_errors(final.path):
                run.path.mkdir(parents=True)
                yield run
            now = datetime.now(UTC).isoformat(timespec="seconds")
            run.write_json(
                "run.json",
                {"format": RUN_FORMAT, "kind": kind, "created": now, "status": "running",
                 "wakeful": __version__, **fields},
            )  # fmt: skip
            final.refuse_existing(kind)  # another process may have been faster
            with disk_errors(final.path):
                run.path.rename(final.path)
        finally:
            shutil.rmtree(run.path, ignore_errors=True)

    @classmethod
    def open(cls, path: str | Path) -> "Run":
        """Open an existing run directory.

        Raises:
            WakefulError: it has no run.json, or one that is damaged or of another format version.
        """
        run = cls(path)
        if run.header.format != RUN_FORMAT:
            raise WakefulError(
                f"{path} has run format {run.header.format}; this wakeful reads {RUN_FORMAT}"
            )
        return run

    def make(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Create the run directory with nothing but its run.json."""
        with Run.create(self.path, kind, fields):
            pass

    def refuse_existing(self, kind: str) -> None:
        """Raise `WakefulError` if the path of a new run of this kind exists, unless it is an empty
        folder. If it holds a run that can be resumed, the message says so.
        """
        with disk_errors(self.path):
            if not self.path.exists() or (self.path.is_dir() and not any(self.path.iterdir())):
                return
        existing_kind = ""  # of a folder that holds no run
        with contextlib.suppress(WakefulError):
            existing_kind = self.header.kind
        can_resume = existing_kind == kind and kind in RESUMED
        resume = ", or go on with what is there by --resume" if can_resume else ""
        raise WakefulError(f"{self.path} exists already; choose another folder{resume}")

    @property
    def header(self) -> Header:
        """The contents of run.json; raises `WakefulError` if it is missing or damaged."""
        # Unlike Path.is_file, os.path.isfile accepts a name that is too long.
        if not os.path.isfile(self.path / "run.json"):
            raise WakefulError(
                f"{self.path} is not a run directory{did_you_mean_path(self.path)}: it has no "
                "run.json"
            )
        return self.read(Header, "run.json")

    def check_kind(self, kind: str, message: str) -> None:
        """Raise `WakefulError` with `message` unless the run is of this kind."""
        if self.header.kind != kind:
            raise WakefulError(f"{self.path} {message}: run.json calls it {self.header.kind!r}")

    @property
    def config(self) -> Config:
        """The configuration the run was made with."""
        self.check_kind("train", "holds no trained model")
        return config_from_table(read_table(self.path / "config.toml"))

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"

    def set_status(self, status: str) -> None:
        """Record that the run is running, stopped or done."""
        self.update(status=status)

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        """Record in run.json that the run is running, and at the context's end that it is done, or
        stopped if an error ends the context.
        """
        self.set_status("running")
        try:
            yield
        except BaseException:
            self.set_status("stopped")
            raise
        self.set_status("done")

    def update(self, **fields: object) -> None:
        """Record other values of fields of run.json."""
        self.write_json("run.json", self.read_json("run.json") | fields)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run for this process until the context ends.

        Raises:
            WakefulError: another process holds it, or a path that it writes to is a link.
        """
        self._refuse_links()
        message = f"another process is working in {self.path}; wait for it or end it"
        with lock_file(self.path / ".lock", message):
            yield

    def _refuse_links(self) -> None:
        """Raise `WakefulError` if a path that a run writes to is a device, a pipe or a symbolic
        link: writing through a link would change a file elsewhere.
        """
        for name in (".lock", *LOGS, "checkpoints", "tensorboard", "wandb", "jobs"):
            refuse_link(self.path / name)
            if (self.path / name).exists() and not _is_plain(self.path / name):
                raise WakefulError(f"{self.path / name} is neither a file nor a folder")
        if self.checkpoints.is_dir():
            for entry in self.checkpoints.iterdir():
                refuse_link(entry)

    def append(self, *rows: Mapping[str, Any], log: str = "metrics.jsonl") -> None:
        """Append rows, each as a line of JSON, to a log of the run."""
        lines = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
        with disk_errors(self.path), (self.path / log).open("a") as file:
            file.write(lines)

    def trajectories(self) -> pl.DataFrame:
        """Return the figures of layers and heads that a training run logged at each diagnosis.

        The table has the columns `TRAJECTORIES`. It is empty if the run did not log them, which
        [train.diagnose] heads asks for.

        Raises:
            WakefulError: a row is damaged.
        """
        frame = self.logged(TRAJECTORIES, LOGS[1])
        if frame.drop("head", "standard_error").null_count().sum_horizontal().item():
            raise WakefulError(f"{self.path / LOGS[1]}: a row lacks a field")
        if not frame["value"].is_finite().all():
            raise WakefulError(f"{self.path / LOGS[1]}: a figure is not finite")
        return frame

    def metrics(self, log: str = "metrics.jsonl") -> list[dict[str, Any]]:
        """Return the rows of a JSON Lines file; without a file, no rows. A last line that a crash
        has cut off is left out.

        Raises:
            WakefulError: another line is not a row with a kind and a step.
        """
        path = self.path / log
        if not path.is_file():
            return []
        lines = path.read_bytes().split(b"\n")  # the last one is empty, unless it was cut off
        rows: list[dict[str, Any]] = []
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            row = _parse_metrics_row(line)
            if row is not None:
                rows.append(row)
            elif number < len(lines):
                raise WakefulError(f"{path} line {number} is not a metrics row; remove that line")
        return rows

    def logged(self, columns: Columns | None = None, log: str = "metrics.jsonl") -> pl.DataFrame:
        """Return the rows that `metrics` reads from a log as a table; of `columns` alone if they
        are given.

        Raises:
            WakefulError: a field's values have several types, or not its column's.
        """
        rows = self.metrics(log)
        if columns is not None:
            rows = [{name: row.get(name) for name in columns} for row in rows]
        try:
            return pl.DataFrame(rows, schema=columns, infer_schema_length=None)
        except (pl.exceptions.PolarsError, TypeError, OverflowError):
            raise WakefulError(
                f"{self.path / log} is not a table: a row lacks a field, or a field has values of "
                "several types"
            ) from None

    def drop_metrics_after(self, last_step: int, *, end: int) -> None:
        """Drop from all logs the rows that a resumed run writes again: those after `last_step`, and
        the validation at `end`, the run's last step. That one is left by a run that was killed
        while it finished.
        """
        for log in LOGS:
            if (self.path / log).is_file():
                rows = [row for row in self.metrics(log) if row["step"] <= last_step]
                rows = [row for row in rows if (row["kind"], row["step"]) != ("validation", end)]
                self.write_text(log, "".join(json.dumps(row) + "\n" for row in rows))

    def read_json(self, name: str) -> dict[str, Any]:
        """Return a JSON file of the run."""
        return read_json(self.path / name)

    def read(self, kind: type[T], name: str) -> T:
        """Return a JSON file of the run, every field of its type."""
        return read_record(kind, self.path / name)

    def write_json(self, name: str, value: object) -> None:
        """Write a table or a dataclass as a JSON file of the run, whole or not at all."""
        self.write_text(name, json.dumps(to_table(value), indent=2, allow_nan=False) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Write a text file of the run, whole or not at all."""
        with replace_atomically(self.path / name) as temporary:
            temporary.write_text(text, "utf-8")

    def remove(self, name: str) -> None:
        """Remove a file of the run, if it is there."""
        with disk_errors(self.path):
            (self.path / name).unlink(missing_ok=True)

    def write_frame(self, name: str, frame: pl.DataFrame) -> None:
        """Write a parquet file of the run, whole or not at all."""
        with replace_atomically(self.path / name) as temporary:
            frame.write_parquet(temporary)


def read_json(path: Path) -> dict[str, Any]:
    """Return the table that a JSON file holds.

    Raises:
        WakefulError: it is missing, not a file, not a JSON object, or has a number that is not
            finite.
    """
    if path.exists() and not _is_plain(path):  # reading a pipe could wait forever
        raise WakefulError(f"{path} is not a file")
    try:
        value = json.loads(path.read_text("utf-8"))
        # Refuse half a surrogate pair, which is not text, and NaN and infinity.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except FileNotFoundError:
        raise WakefulError(f"{path} is missing; is the run finished?") from None
    except OSError as error:
        raise WakefulError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise WakefulError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise WakefulError(f"{path} holds no JSON object")
    return value


def read_record(kind: Any, path: Path) -> Any:
    """Return a JSON file as a value of this type.

    Raises:
        WakefulError: what `read_json` raises, or a field is missing or of another type.
    """
    return from_table(kind, read_json(path), record=str(path))


def read_frame(path: Path, columns: Columns, *, optional: Columns | None = None) -> pl.DataFrame:
    """Return these columns of a parquet file, cast to their types; `optional` ones may be missing.

    Raises:
        WakefulError: the file is missing, damaged or too long, lacks a column, or cannot be cast.
    """
    if not path.is_file():
        raise WakefulError(f"{path} is missing: is the run finished?")
    import pyarrow.parquet  # noqa: PLC0415 - not every command reads a table

    with wrap_errors(f"{path} cannot be read"), pyarrow.parquet.ParquetFile(path) as table:
        num_rows, schema = table.metadata.num_rows, table.schema_arrow
        if num_rows > _MOST_ROWS:
            raise WakefulError(
                f"{path} cannot be read: it has {num_rows:,} rows, and at most {_MOST_ROWS:,} are "
                "read"
            )
        optional_columns = {
            name: kind for name, kind in (optional or {}).items() if name in schema.names
        }
        columns = {**columns, **optional_columns}
        for name in columns:
            if name not in schema.names:
                raise WakefulError(f"{path} has no column {name!r}")
            kind = schema.field(name).type
            if kind.num_fields:  # a nested type, such as a list
                raise WakefulError(f"{path} holds other types: {name} is {kind}")
        frame = pl.DataFrame(table.read(list(columns)))
    try:
        return frame.with_columns(pl.col(name).cast(kind) for name, kind in columns.items())
    except pl.exceptions.PolarsError as error:
        raise WakefulError(f"{path} holds other types: {first_line(error)}") from None


def read_windows(path: Path) -> pl.DataFrame:
    """Return the losses of validation windows from a parquet file: a table with the columns
    `VALIDATION`, and `domain` too for a mixture.

    Raises:
        WakefulError: there is no window, or one twice, or one without a finite loss or tokens.
    """
    frame = read_frame(path, VALIDATION, optional={"domain": pl.String})
    if frame.is_empty():
        raise WakefulError(f"{path} has no validation windows")
    # Standard errors need the loss's square, which is not finite for a larger loss.
    has_sound_loss = pl.col("loss").is_finite() & (pl.col("loss").abs() < _LARGEST_LOSS)
    is_sound = frame.select(has_sound_loss & (pl.col("tokens") > 0)).to_series()
    if frame.null_count().sum_horizontal().item() or not is_sound.all():
        raise WakefulError(f"{path}: a validation window has no finite loss or no tokens")
    if frame["window"].is_duplicated().any():
        raise WakefulError(f"{path} has a validation window twice")
    return frame


class SharedRun(Run):
    """A run directory that another process of the same run writes: here it is only read."""

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        yield

    def _nothing(self, *_: Any, **__: Any) -> None: ...

    update = append = write_text = write_frame = remove = drop_metrics_after = _nothing


def run_at(path: Path | None) -> Run | None:
    """Return the run in a folder; None where there is no run or no folder."""
    return Run.open(path) if path is not None and (path / "run.json").is_file() else None


def is_done(path: Path) -> bool:
    """Tell whether a folder holds a finished run."""
    run = run_at(path)
    return run is not None and run.header.status == "done"


def refuse_link(path: Path) -> None:
    """Raise `WakefulError` where the path of a new run is a symbolic link."""
    if path.is_symlink():
        raise WakefulError(
            f"{path} is a symbolic link, and a run writes only inside its own folder: put what it "
            "links to in its place"
        )


def _is_plain(path: Path) -> bool:
    return path.is_file() or path.is_dir()


@contextlib.contextmanager
def replace_atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary path; the file that the context writes there replaces `path` at the end.
    If the context fails, `path` stays as it was.
    """
    temporary = temporary_path_beside(path.absolute())
    try:
        with disk_errors(path):
            yield temporary
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def save_tensors(
    tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file, with `metadata` in its header.

    The file gets the permissions of an ordinary file, those that the user's umask gives; the
    library would leave it readable by its owner alone. Weights that stay in a file (`Paged`) give
    back the memory that reading them took.
    """
    is_new = not path.exists()
    path.touch()  # an ordinary file, to learn the permissions from
    mode = path.stat().st_mode
    if is_new:  # when a file replaces another, some file systems first write all pending data
        path.unlink()
    save_file(_separate_tensors(tensors), path, metadata)
    for tensor in tensors.values():
        if isinstance(tensor, Paged):
            release_pages(tensor.stored)
    path.chmod(mode)


def _separate_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors as plain contiguous ones that share no memory, which safetensors refuses
    to write: a tensor that overlaps an earlier one is copied.
    """
    separate: dict[str, Tensor] = {}
    # Addresses [begin, end) of the earlier tensors in each storage.
    spans_by_storage: dict[int, list[tuple[int, int]]] = {}
    for name, any_tensor in tensors.items():
        tensor = to_plain_tensor(any_tensor).contiguous()
        begin = tensor.data_ptr()
        end = begin + tensor.nbytes
        spans = spans_by_storage.setdefault(tensor.untyped_storage().data_ptr(), [])
        overlaps = any(begin < other_end and other_begin < end for other_begin, other_end in spans)
        separate[name] = tensor.clone() if overlaps else tensor
        spans.append((begin, end))
    return separate


@contextlib.contextmanager
def lock_file(path: Path, message: str) -> Iterator[None]:
    """Hold a lock on a file, which is created if it is missing, until the context or this process
    ends. Where the system has no such locks, on Windows, nothing is locked.

    Raises:
        WakefulError: another process holds the lock, with the text `message`; or the file cannot be
            written.
    """
    with contextlib.ExitStack() as stack:
        with disk_errors(path.parent):
            file = stack.enter_context(path.open("w"))
            if fcntl is not None:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    held_by_another = error.errno in (errno.EWOULDBLOCK, errno.EACCES)
                    if not held_by_another:
                        raise
                    raise WakefulError(message) from None
        yield


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Raise `WakefulError` in place of the operating system's errors on writing `path`, also where
    a library reports them in errors of its own. Other errors are raised as they are.
    """
    try:
        yield
    except (OSError, SafetensorError, pl.exceptions.PolarsError) as error:
        number = error.errno if isinstance(error, OSError) else None
        if number is None:  # libraries written in Rust have the number in their text
            match = re.search(r"\(os error (\d+)\)", str(error))
            if match is not None:
                number = int(match[1])
            elif _CUT_OFF.search(str(error)):  # numpy wrote less than it was given: a full disk
                number = errno.ENOSPC
            else:
                raise
        if number in (errno.ENOSPC, errno.EDQUOT):
            raise WakefulError(
                f"the disk is full: {path} could not be written and what was there is kept; "
                "free some space, then resume or give the command again"
            ) from error
        raise WakefulError(f"{path} cannot be written: {os.strerror(number)}") from error


def _parse_metrics_row(line: bytes) -> dict[str, Any] | None:
    """Parse a line of a JSON Lines file into a row; return None unless it is a flat JSON object
    with a `kind` (text) and a `step` (an integer from 0 to 2⁶³ − 1).
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or type(row.get("kind")) is not str:
        return None
    if any(isinstance(value, dict | list) for value in row.values()):
        return None
    step = row.get("step")
    return row if type(step) is int and 0 <= step < 2**63 else None


def environment(device: torch.device, processes: int = 1) -> Environment:
    """Describe the machine, the versions and the number of processes a run uses."""
    on_gpu = device.type == "cuda"
    packages = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "polars")
    return Environment(
        wakeful=__version__,
        python=platform.python_version(),
        **{package: metadata.version(package) for package in packages},
        platform=platform.platform(),
        device=str(device),
        device_name=torch.cuda.get_device_name(device) if on_gpu else _processor_name(),
        threads=torch.get_num_threads(),
        processes=processes,
    )


def _processor_name() -> str:
    """Return the processor's name: on Linux from a file, elsewhere from Python."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
