"""A run directory: the one place where the verbs meet.

run.json          format, kind ("train" or "compare"), name, status ("running", "stopped", "done")
config.toml       every field of the configuration, resolved
environment.json  versions, machine, threads
metrics.jsonl     one row a step or evaluation, as they happen; metrics.parquet at the end
validation.parquet  the loss of every validation window at the end
summary.json      the run's figures
tokenizer.json
checkpoints/step-00000200/
"""

import contextlib
import errno
import json
import os
import platform
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import polars as pl
import torch

import wakeful
from wakeful.config import Config, config_from_table, config_to_toml, read_table
from wakeful.errors import WakefulError

try:
    import fcntl
except ImportError:  # Windows has no flock; there a run directory is not guarded.
    fcntl = None

FORMAT = 1


class Run:
    """An open run directory."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @classmethod
    def create(cls, path: str | Path, config: Config, environment: Mapping[str, Any]) -> "Run":
        """Make a new run directory; one that exists already is refused."""
        run = cls(path)
        run.make("train", {"name": config.name})
        run.write_text("config.toml", config_to_toml(config))
        run.write_json("environment.json", environment)
        return run

    @classmethod
    def open(cls, path: str | Path) -> "Run":
        """Open an existing run directory."""
        run = cls(path)
        header = run.header
        if header.get("format") != FORMAT:
            raise WakefulError(
                f"{path} has run format {header.get('format')!r}; this wakeful reads {FORMAT}"
            )
        return run

    def make(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Create the folder with its run.json."""
        self.refuse_existing()
        with disk_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self.write_json(
            "run.json",
            {"format": FORMAT, "kind": kind, "created": now, "status": "running",
             "wakeful": wakeful.__version__, **fields},
        )  # fmt: skip

    def refuse_existing(self) -> None:
        """Raise `WakefulError` if there is anything at the run's path."""
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise WakefulError(
                f"{self.path} exists already; choose another folder, or continue it with --resume"
            )

    @property
    def header(self) -> dict[str, Any]:
        """What run.json says."""
        if not (self.path / "run.json").is_file():
            raise WakefulError(f"{self.path} is no run directory: it has no run.json")
        return self.read_json("run.json")

    @property
    def config(self) -> Config:
        """The configuration the run was made with."""
        return config_from_table(read_table(self.path / "config.toml"))

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"

    def set_status(self, status: str) -> None:
        """Record that the run is running, stopped or done."""
        self.write_json("run.json", {**self.header, "status": status})

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run for this process; a second process is refused until it is released."""
        with disk_errors(self.path), (self.path / ".lock").open("w") as file:
            if fcntl is not None:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError as error:
                    if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                        raise
                    raise WakefulError(
                        f"another process is working in {self.path}; wait for it or end it"
                    ) from None
            yield

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one row to metrics.jsonl."""
        line = json.dumps(row, allow_nan=False) + "\n"
        with disk_errors(self.path), (self.path / "metrics.jsonl").open("a") as file:
            file.write(line)

    def metrics(self) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl; a last line cut off by a crash is left out."""
        path = self.path / "metrics.jsonl"
        if not path.is_file():
            return []
        lines = path.read_bytes().split(b"\n")
        rows: list[dict[str, Any]] = []
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                rows.append(json.loads(line))
            except ValueError:
                if number == len(lines):
                    break
                raise WakefulError(f"{path} line {number} is not JSON; remove that line") from None
        return rows

    def keep_metrics(self, last_step: int) -> None:
        """Drop the rows after a step, which a resumed run is about to write again."""
        self._rewrite([row for row in self.metrics() if row["step"] <= last_step])

    def keep_metrics_before_final(self, last_step: int) -> None:
        """Drop an evaluation at the last step, left by a run that ended while finishing."""
        rows = self.metrics()
        self._rewrite(
            [row for row in rows if (row["kind"], row["step"]) != ("validation", last_step)]
        )

    def finish_metrics(self) -> None:
        """Write metrics.parquet from metrics.jsonl."""
        rows = self.metrics()
        self.write_frame("metrics.parquet", pl.DataFrame(rows, infer_schema_length=None))

    def _rewrite(self, rows: list[dict[str, Any]]) -> None:
        self.write_text("metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))

    def read_json(self, name: str) -> dict[str, Any]:
        """Return a JSON file of the run."""
        path = self.path / name
        try:
            value = json.loads(path.read_text("utf-8"))
        except FileNotFoundError:
            raise WakefulError(f"{path} is missing; is the run finished?") from None
        except (ValueError, RecursionError) as error:
            raise WakefulError(f"{path} is not JSON: {error}") from None
        if not isinstance(value, dict):
            raise WakefulError(f"{path} holds no JSON object")
        return value

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Write a JSON file of the run, whole or not at all."""
        self.write_text(name, json.dumps(value, indent=2, allow_nan=False) + "\n")

    def write_text(self, name: str, text: str) -> None:
        """Write a text file of the run, whole or not at all."""
        with replaced(self.path / name) as temporary:
            temporary.write_text(text, "utf-8")

    def write_frame(self, name: str, frame: pl.DataFrame) -> None:
        """Write a parquet file of the run, whole or not at all."""
        with replaced(self.path / name) as temporary:
            frame.write_parquet(temporary)


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Give a temporary path beside `path` and move what was written there into its place."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with disk_errors(path):
            yield temporary
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a full disk or a forbidden folder into a `WakefulError` that names it."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise WakefulError(
                f"the disk is full: {path} could not be written and what was there is kept; "
                "free some space and resume"
            ) from error
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            raise WakefulError(f"{path} cannot be written: {error.strerror}") from error
        raise


def environment(device: torch.device) -> dict[str, Any]:
    """Describe the machine and the versions a run used."""
    on_gpu = device.type == "cuda"
    packages = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "polars")
    return {
        "wakeful": wakeful.__version__,
        "python": platform.python_version(),
        **{package: metadata.version(package) for package in packages},
        "platform": platform.platform(),
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if on_gpu else _processor_name(),
        "threads": torch.get_num_threads(),
    }


def _processor_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
