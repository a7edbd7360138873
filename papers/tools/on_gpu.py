"""The headline claims on one GPU: seven jobs of at most nine minutes, the most valuable first.

    python papers/tools/on_gpu.py pack SOURCE... --out text.tar.xz   # where the text is
    python papers/tools/on_gpu.py unpack text.tar.xz --out text      # on the machine with the GPU
    python papers/tools/on_gpu.py plan                               # jobs, tokens, seconds
    python papers/tools/on_gpu.py run values --text text             # one job

`pack` trains a tokenizer of 8,192 tokens, prepares the text and compresses the token ids, so that
the GPU does not wait for a tokenizer. `run` trains the rows of a job, seed by seed. After each run
it writes the job's figures to OUT/figures/JOB.json and prints the paired differences. It stops
after `--seconds` and saves the run under way; the same command goes on. Other `--seeds` are added.

Rates are fixed in advance. The softmax and Adam row of Table 2 begins at 1e-3; if its first token's
kurtosis is below 10 after 50M tokens, every row of the table is trained at 3e-3. `--smoke` does all
of it with a thousandth of the tokens and a model of no size on the CPU.
"""

import argparse
import contextlib
import json
import lzma
import math
import os
import signal
import sys
import tarfile
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import wakeful
import wakeful_papers.routes  # noqa: F401  # rows of jobs name its classes
from wakeful.config.schema import Config, config_from_table, config_to_table
from wakeful.config.tables import merge_over_preset, merge_tables
from wakeful.data.preparing import prepare
from wakeful.errors import Interrupted, WakefulError
from wakeful.estimates import confidence_interval, format_interval, mean_and_error
from wakeful.inheritance.outcome import read_inheritance
from wakeful.runs.run import Run, is_done
from wakeful.training.watching import logged_diagnosis
from wakeful_papers.exhibits.size import H100, run_size

TOKENS_PER_STEP = 65_536
VOCABULARY = 8_192
MOST_BYTES = 55 * 2**20
"""Largest size of a packed text."""
SECONDS = 540.0
"""Time of one command."""
RATES = (1e-3, 3e-3)
"""Rates of Table 2's rows: the first, and the one in its place without outliers."""
OUTLIERS, OUTLIERS_AT = 10.0, 50_000_000
"""Least kurtosis of the first token that counts as an outlier, and the tokens after which it is
looked at."""
SMOKE = 1 / 1000
"""Share of the tokens that a smoke test trains on."""
SMOKE_LENGTH, SMOKE_TOKENS_PER_STEP = 32, 256
FIGURES = ("loss", "kurtosis_first", "kurtosis_rest", "increase_moderate", "increase_w4")

Kind = Literal["values", "outliers", "heirs"]


@dataclass(frozen=True)
class Job:
    """Rows that one command trains."""

    kind: Kind
    rows: tuple[str, ...]
    seeds: tuple[int, ...]
    tokens: float
    """Of each run."""


JOBS = {
    "values": Job("values", ("vanilla", "resformer"), (0, 1, 2, 3), 75e6),
    "dense": Job("values", ("denseformer", "neutreno"), (0, 1, 2, 3), 75e6),
    "cache": Job("values", ("svformer", "gqa"), (0, 1, 2, 3), 75e6),
    "sources": Job("values", ("previous", "all"), (0, 1, 2, 3), 75e6),
    "outliers": Job("outliers", ("vanilla", "softmax1", "orthoadam", "cured"), (0,), 130e6),
    "outliers-seeds": Job("outliers", ("vanilla", "cured"), (1, 2), 130e6),
    "heirs": Job("heirs", ("reference",), (0, 1), 60e6),
}
"""In the order of what they settle. "heirs" trains a reference of 24 layers, and beside its heir of
16 layers a random start and the reference itself for as many steps again."""
BODIES: dict[Kind, dict[str, Any]] = {
    "values": {"preset": "value-residual-82m", "train": {"length": 2048}},
    "outliers": {
        "preset": "activation-gpt2-60m",
        "train": {"length": 512, "quantize": {"schemes": ["moderate", "w4"], "num_sequences": 64}},
    },
    "heirs": {
        "preset": "gpt2-small",
        "model": {"num_layers": 24, "num_heads": 6, "width": 384, "mlp_width": 1536},
        "train": {"length": 1024},
    },
}
_TABLE_2: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "softmax1": {"model": {"normalizer": "softmax1"}},
    "orthoadam": {"optimizer": {"name": "orthoadam"}},
    "cured": {"model": {"normalizer": "softmax1"}, "optimizer": {"name": "orthoadam"}},
}
_SMALL = {
    "model": {"num_layers": 4, "num_heads": 2, "num_kv_heads": 0, "width": 16, "mlp_width": 32},
    "train": {"device": "cpu", "dtype": "float32", "compile": False},
}  # fmt: skip


class _TimeIsUpError(Exception):
    """The time of this command is over, outside of training."""


def row_table(kind: Kind, row: str) -> Mapping[str, Any]:
    """Return the fields of a row: those of headline/values from the exhibit's own file."""
    if kind != "values":
        return _TABLE_2[row] if kind == "outliers" else {}
    text = resources.files("wakeful_papers").joinpath("papers/headline/values.toml").read_text()
    compared = tomllib.loads(text)["compare"]
    return merge_tables({"data": compared["data"]}, compared["variants"][row])


def config_of(job: Job, row: str, seed: int, text: str, *, rate: float, smoke: bool) -> Config:
    """Return the configuration of one run; a rate of 0 is the preset's."""
    body = BODIES[job.kind]
    length = SMOKE_LENGTH if smoke else body["train"]["length"]
    tokens_per_step, tokens = TOKENS_PER_STEP, job.tokens
    if smoke:
        tokens_per_step, tokens = SMOKE_TOKENS_PER_STEP, tokens * SMOKE
    sequences, steps = tokens_per_step // length, round(tokens / tokens_per_step)
    shared: dict[str, Any] = {
        "name": row,
        "model": {"vocab_size": Config().model.vocab_size, "max_length": length},
        "data": {"source": text, "tokenizer": "", "validation_source": "", "max_bytes": 0},
        "optimizer": {"warmup_steps": steps // 20},
        "train": {
            "length": length, "steps": steps, "seed": seed,
            "batch_size": sequences, "micro_batch_size": sequences,
            "eval_every": 0, "checkpoint_every": max(1, steps // 4), "keep_checkpoints": 1,
            "device": "cuda", "dtype": "bfloat16", "compile": True,
            "diagnose": {"every": look_step(steps, job.tokens), "num_sequences": 16},
        },
    }  # fmt: skip
    table = merge_tables(merge_tables(body, shared), row_table(job.kind, row))
    if rate:
        table = merge_tables(table, {"optimizer": {"lr": rate}})
    if smoke:
        heads = table["model"].get("num_kv_heads", 0)
        table = merge_tables(table, _SMALL)
        table["model"]["num_kv_heads"] = 1 if heads else 0
    return config_from_table(merge_over_preset(table, row))


def look_step(steps: int, tokens: float) -> int:
    """Return the step after which a run of `tokens` has seen 50M, or its last."""
    return max(1, min(steps, round(steps * OUTLIERS_AT / tokens)))


def seconds_of(job: Job) -> float:
    """Return the time of a job's runs on an H100 at two fifths of its peak, from its operations."""
    total = 0.0
    for row in job.rows:
        config = config_of(job, row, 0, "text", rate=0.0, smoke=False)
        config = config_from_table(
            merge_tables(config_to_table(config), {"data": {"vocab_size": VOCABULARY}})
        )
        total += run_size(config).operations * job.tokens / H100
    if (
        job.kind == "heirs"
    ):  # an heir and a random start of two thirds of the layers, and the reference
        total *= 1 + 2 * 2 / 3 + 1
    return total * len(job.seeds)


def pack(sources: Sequence[str], out: Path, *, vocabulary: int = VOCABULARY) -> int:
    """Prepare text and write its folder as a compressed archive; return its bytes.

    Raises:
        WakefulError: the archive is larger than 55 MiB; none is written.
    """
    folder, part = out.with_suffix(".prepared"), out.with_name(out.name + ".part")
    prepare(list(sources), folder, vocab_size=vocabulary, validation_fraction=0.01)
    # Ids have two bytes: lp and pb tell the compressor.
    filters = [{"id": 0x21, "preset": 9, "lc": 0, "lp": 1, "pb": 1, "dict_size": 2**27}]
    with lzma.open(part, "wb", filters=filters) as stream, tarfile.open(None, "w", stream) as tar:
        for file in sorted(folder.iterdir()):
            tar.add(file, file.name)
    size = part.stat().st_size
    if size > MOST_BYTES:
        part.unlink()
        raise WakefulError(
            f"the packed text has {size / 2**20:.1f} MiB, above {MOST_BYTES / 2**20:.0f}: name "
            f"about {MOST_BYTES / size:.0%} of the sources (its tokens stay in {folder})"
        )
    part.rename(out)
    return size


def unpack(archive: Path, out: Path) -> None:
    """Write the folder of prepared data that `pack` packed."""
    with tarfile.open(archive, "r:xz") as tar:
        tar.extractall(out, filter="data")


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Save the run under way and stop after so many seconds; return without an error."""

    def end(number: int, frame: object) -> None:
        raise _TimeIsUpError

    before = signal.signal(signal.SIGTERM, end)
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGTERM))
    timer.daemon = True
    timer.start()
    try:
        yield
    except (_TimeIsUpError, Interrupted):
        print("time is up: the same command goes on", flush=True)
    finally:
        timer.cancel()
        signal.signal(signal.SIGTERM, before)


def train_row(config: Config, folder: Path) -> None:
    """Train one run, or what is left of it."""
    if not is_done(folder):
        begun = (folder / "run.json").is_file()
        wakeful.train(None if begun else config, out="" if begun else folder,
                      resume=folder if begun else "")  # fmt: skip


def run_job(
    name: str, text: str, out: Path, *, seeds: Sequence[int] = (), smoke: bool = False,
    seconds: float = SECONDS,
) -> list[dict[str, Any]]:  # fmt: skip
    """Train a job's runs while there is time; return the figures of all that have ended."""
    job, runs = JOBS[name], out / "runs"
    with time_limit(seconds):
        rate = table_2_rate(text, runs, smoke=smoke) if job.kind == "outliers" else 0.0
        for seed in seeds or job.seeds:
            for row in job.rows:
                folder = run_folder(runs, job.kind, row, seed, rate)
                config = config_of(job, row, seed, text, rate=rate, smoke=smoke)
                train_row(config, folder)
                if job.kind == "heirs":
                    train_heirs(config, folder)
                write_figures(out, name, job, runs)
    return write_figures(out, name, job, runs)


def run_folder(runs: Path, kind: Kind, row: str, seed: int, rate: float) -> Path:
    """Return the folder of a run; rows of Table 2 have one for each rate."""
    return runs / kind / (f"{row}-{rate:g}" if rate else row) / f"seed-{seed}"


def table_2_rate(text: str, runs: Path, *, smoke: bool) -> float:
    """Train seed 0's softmax and Adam at the first rate and return the rate of the whole table: the
    first, if the first token has outliers after 50M tokens, else the second.

    The decision is kept in a file, so that it is made once. A run without outliers is not finished.
    """
    decision = runs / "outliers" / "rate.json"
    if decision.is_file():
        return float(json.loads(decision.read_text())["rate"])
    job, first = JOBS["outliers"], RATES[0]
    folder = run_folder(runs, "outliers", "vanilla", 0, first)
    config = config_of(job, "vanilla", 0, text, rate=first, smoke=smoke)
    step = config.train.diagnose.every
    watcher = _KurtosisWatcher(folder, step)
    with contextlib.suppress(Interrupted), watcher:
        train_row(config, folder)
    if watcher.kurtosis is None:
        raise _TimeIsUpError
    rate = first if watcher.kurtosis >= OUTLIERS else RATES[1]
    decision.write_text(
        json.dumps({"kurtosis_first": watcher.kurtosis, "step": step, "rate": rate})
    )
    print(
        f"first token's kurtosis {watcher.kurtosis:.1f} at step {step}: rate {rate:g}", flush=True
    )
    return rate


class _KurtosisWatcher:
    """Reads a run's log while it trains, and ends the run if its first token has no outliers."""

    def __init__(self, folder: Path, step: int) -> None:
        self.folder, self.step = folder, step
        self.kurtosis: float | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "_KurtosisWatcher":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        self.kurtosis = self.kurtosis or kurtosis_at(self.folder, self.step)

    def _watch(self) -> None:
        while not self._over.wait(0.5):
            self.kurtosis = kurtosis_at(self.folder, self.step)
            if self.kurtosis is not None:
                if self.kurtosis < OUTLIERS and not is_done(self.folder):
                    os.kill(os.getpid(), signal.SIGTERM)
                return


def kurtosis_at(folder: Path, step: int) -> float | None:
    """Return the first token's kurtosis that a run's log has at a step; None where it has none."""
    return logged_diagnosis(Run(folder), step).get("kurtosis_first")


def train_heirs(config: Config, reference: Path) -> None:
    """Train the heir of the first two thirds of a reference's layers, a random start of its shape
    and the reference itself, for as many steps again.
    """
    out = reference.with_name(f"{reference.name}-heirs")
    if is_done(out):
        return
    if (out / "run.json").is_file():
        wakeful.inherit(resume=str(out))
        return
    train = config.train
    wakeful.inherit(
        str(reference), out=str(out), keep=2 / 3, choose="first", bridge={"map": "none"},
        heal={"by": "text"}, baseline=("random", "reference"),
        data={"source": config.data.source},
        optimizer={"lr": config.optimizer.lr, "final_lr": config.optimizer.final_lr},
        train={
            "steps": train.steps, "seed": train.seed, "batch_size": train.batch_size,
            "micro_batch_size": train.micro_batch_size, "length": train.length,
            "device": train.device, "dtype": train.dtype, "compile": train.compile,
            "checkpoint_every": train.checkpoint_every,
        },
    )  # fmt: skip


def write_figures(out: Path, name: str, job: Job, runs: Path) -> list[dict[str, Any]]:
    """Write the figures of a job's ended runs of every seed and rate; return them."""
    rows: list[dict[str, Any]] = []
    for folder in sorted((runs / job.kind).glob("*/seed-*")):
        row = folder.parent.name
        if folder.name.endswith("-heirs"):
            if is_done(folder):
                seed = folder.name.removeprefix("seed-").removesuffix("-heirs")
                rows += _heir_rows(folder, int(seed))
        elif is_done(folder) and row.split("-")[0] in (*job.rows, "vanilla"):
            rows.append(
                {"row": row, "seed": int(folder.name.removeprefix("seed-")), **_read(folder)}
            )
    path = out / "figures" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows, indent=2, default=str) + "\n", encoding="utf-8")
    return rows


def _heir_rows(folder: Path, seed: int) -> list[dict[str, Any]]:
    """Return the losses of an inheritance's heirs and baselines, with the 95% intervals of their
    differences from the reference, a run with this seed.
    """
    summary, _ = read_inheritance(folder)
    windows = 1 + (summary.data.validation_tokens - 2) // summary.recipe.train.length
    rows: list[dict[str, Any]] = []
    for arm in summary.arms:
        error = math.nan if arm.minus_reference_error is None else arm.minus_reference_error
        low, high = confidence_interval(arm.minus_reference, error, windows)
        rows.append({
            "row": f"heirs: {arm.arm}", "reference_seed": seed, "layers": arm.depth,
            "parameters": arm.parameters, "loss": arm.loss,
            "minus_reference": arm.minus_reference, "minus_reference_low": low,
            "minus_reference_high": high,
        })  # fmt: skip
    return rows


def _read(folder: Path) -> dict[str, Any]:
    """Return the figures of a finished run."""
    summary = Run(folder).read_json("summary.json")
    config = Run(folder).config
    increases = {
        f"increase_{scheme}": values["increase"]
        for scheme, values in summary.get("quantization", {}).items()
    }
    return {
        "loss": summary["validation"]["loss"], **summary.get("diagnosis", {}), **increases,
        "tokens": summary["tokens"], "seconds": summary["seconds"],
        "tokens_per_second": summary["tokens_per_second"], "lr": config.optimizer.lr,
    }  # fmt: skip


def differences(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each figure of each row against vanilla, paired over seeds, and for the
    loss of each heir against its reference.
    """
    values = {(str(row["row"]), row["seed"]): row for row in rows if "seed" in row}
    lines = [
        f"{row['row']}, seed {row['reference_seed']}: loss {row['loss']:.4f}, less the reference's "
        f"[{row['minus_reference_low']:+.4f}, {row['minus_reference_high']:+.4f}]"
        for row in rows
        if row.get("minus_reference_low") is not None
    ]
    for name in dict.fromkeys(row for row, _ in values):
        baseline = name.replace(name.split("-")[0], "vanilla", 1)
        seeds = [seed for row, seed in values if row == name and (baseline, seed) in values]
        if name == baseline or not seeds:
            continue
        for figure in FIGURES:
            pairs = [(values[name, s].get(figure), values[baseline, s].get(figure)) for s in seeds]
            moves = [a - b for a, b in pairs if a is not None and b is not None]
            if moves:
                mean, error = mean_and_error(moves)
                change = format_interval(mean, error, len(moves), sign="+")
                lines.append(f"{name} against {baseline}, {figure}: {change}, {len(moves)} seeds")
    return lines


def main(arguments: Sequence[str]) -> int:
    """Carry out one command; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="on_gpu.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="text to a packed file")
    packing.add_argument("sources", nargs="+")
    packing.add_argument("--out", type=Path, default=Path("text.tar.xz"))
    unpacking = commands.add_parser("unpack", help="a packed file to prepared data")
    unpacking.add_argument("archive", type=Path)
    unpacking.add_argument("--out", type=Path, default=Path("text"))
    commands.add_parser("plan", help="the jobs and their estimated time")
    running = commands.add_parser("run", help="one job")
    running.add_argument("job", choices=JOBS)
    running.add_argument("--text", default="text", help="prepared data (default: text)")
    running.add_argument("--out", type=Path, default=Path("runs/gpu"))
    running.add_argument("--seeds", type=int, nargs="+", default=[])
    running.add_argument("--seconds", type=float, default=SECONDS)
    running.add_argument("--smoke", action="store_true", help="a thousandth, on the CPU")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    try:
        if options.command == "plan":
            for name, job in JOBS.items():
                print(
                    f"{name:15} {', '.join(job.rows):40} seeds {', '.join(map(str, job.seeds)):11} "
                    f"{job.tokens / 1e6:.0f}M tokens each, {seconds_of(job):4.0f} s"
                )
        elif options.command == "pack":
            size = pack(options.sources, options.out)
            print(f"{options.out}: {size / 2**20:.1f} MiB")
        elif options.command == "unpack":
            unpack(options.archive, options.out)
            print(f"{options.out}: {time.monotonic() - began:.1f} s")
        else:
            rows = run_job(
                options.job, options.text, options.out, seeds=options.seeds, smoke=options.smoke,
                seconds=options.seconds,
            )  # fmt: skip
            print("\n".join(differences(rows)))
            print(f"figures: {options.out / 'figures' / options.job}.json")
    except WakefulError as error:
        print(f"on_gpu.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
