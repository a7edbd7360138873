"""Records of a training run: its data, its steps and its end."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from wakeful.config.tables import from_table, to_table
from wakeful.data.base import Data
from wakeful.data.mixture import describe_source
from wakeful.errors import WakefulError
from wakeful.runs.run import Run


@dataclass(frozen=True, kw_only=True)
class DroppedDocuments:
    """Held-out documents that partly occur in the training text and were left out."""

    documents: int
    tokens: int
    passage: int = 0
    """Tokens of the passages that were looked for; 0 where there is no text to look through."""


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """data.json: what names the text, its split and its tokenizer."""

    source: str | tuple[str, ...]
    corpus_sha256: str
    tokenizer: str
    """Its fingerprint."""
    train_tokens: int
    """0 where they are drawn without end."""
    validation_tokens: int
    vocab_size: int
    overlap: DroppedDocuments | None = None
    """None where what overlaps was kept."""
    train_sha256: str
    validation_sha256: str

    @property
    def text(self) -> str:
        """The source in words."""
        return describe_source(self.source)

    @property
    def trained(self) -> str:
        """The training tokens in words."""
        return f"{self.train_tokens:,}" if self.train_tokens else "endless"

    @property
    def without_source(self) -> "DataFacts":
        """The facts that are the same wherever the text lies."""
        return dataclasses.replace(self, source="")


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """A row of metrics.jsonl: one step of the optimizer."""

    kind: ClassVar = "train"
    log: ClassVar = "metrics.jsonl"
    step: int
    loss: float
    """Nats per token of the batch, before the step."""
    lr: float | None = None
    grad_norm: float | None = None
    """Before clipping."""
    tokens: int
    """Trained on so far."""
    seconds: float
    """Of training so far."""
    tokens_per_second: float
    excess_loss: float | None = None
    """Of a task: the loss above the task's own on the same tokens."""


@dataclass(frozen=True, kw_only=True)
class ValidationLoss:
    """A loss on the validation set, in nats per token."""

    loss: float
    standard_error: float | None
    num_windows: int
    num_tokens: int
    optimal_loss: float | None = None
    """Of a task, as the next two: its own loss on the same targets."""
    excess_loss: float | None = None
    excess_standard_error: float | None = None
    domains: Mapping[str, float] | None = None
    """Of a mixture: the loss on what is held out of each part."""


@dataclass(frozen=True, kw_only=True)
class ValidationRow(ValidationLoss):
    """A row of metrics.jsonl: the loss on the validation set after a step."""

    kind: ClassVar = "validation"
    log: ClassVar = "metrics.jsonl"
    step: int


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Numbers of parameters."""

    total: int
    embedding: int
    non_embedding: int


@dataclass(frozen=True, kw_only=True)
class AtTheEnd(ValidationLoss):
    """A run's loss on the validation set when it ends."""

    perplexity: float
    length: int


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """summary.json: the figures of a finished run."""

    steps: int
    tokens: int
    seconds: float
    tokens_per_second: float
    """The median of all steps."""
    parameters: Parameters
    kv_cache_bytes_per_token: int | float
    kv_cache_dtype: str
    validation: AtTheEnd
    diagnosis: Mapping[str, float | None]
    quantization: Mapping[str, Mapping[str, float | None]]
    bytes: Mapping[str, int]
    """Of weights and optimizer, and on a GPU the peak of all."""
    data: DataFacts


MetricsRow = TypeVar("MetricsRow", StepRow, ValidationRow)


def data_facts(data: Data) -> DataFacts:
    """Return the facts that tell a run's data from others: the source, numbers of tokens, and
    hashes of the text, the splits and the tokenizer.
    """
    facts = {
        "source": data.info.get("source"),
        "corpus_sha256": data.corpus_sha256,
        "tokenizer": data.tokenizer.fingerprint,
        "train_tokens": data.info["splits"]["train"]["tokens"],
        "validation_tokens": data.validation.num_tokens,
        "vocab_size": data.vocab_size,
        "overlap": data.info.get("overlap"),
        "train_sha256": data.info["splits"]["train"]["sha256"],
        "validation_sha256": data.info["splits"]["validation"]["sha256"],
    }
    return from_table(DataFacts, facts, record="the data")


def check_same_data(run: Run, data: Data) -> None:
    """Raise `WakefulError` if the data is not that on which the run was begun; the folder in which
    it lies may differ.
    """
    if run.read(DataFacts, "data.json").without_source != data_facts(data).without_source:
        raise WakefulError(
            f"{run.path} was trained on other data than data.source gives now: the text, what is "
            "held out of it or the tokenizer has changed; restore it, or start a new run"
        )


def record(run: Run, row: StepRow | ValidationRow) -> dict[str, Any]:
    """Append a row to its log, without optional fields that are None; return it as a table.

    The losses on the parts of a mixture become entries of their own: loss_NAME.
    """
    table = {"kind": row.kind, **to_table(row)}
    domains = table.pop("domains", None) or {}
    table |= {f"loss_{name}": loss for name, loss in domains.items()}
    for entry in dataclasses.fields(row):
        is_empty = entry.name in table and table[entry.name] is None
        if is_empty and entry.default is None:
            del table[entry.name]
    run.append(table, log=row.log)
    return table


def logged_rows(run: Run, kind: type[MetricsRow]) -> list[MetricsRow]:
    """Return the rows that a run has logged as `kind`, a dataclass, in the order of the log.

    Raises:
        WakefulError: a row lacks a figure.
    """
    location = str(run.path / kind.log)
    table_rows = [row for row in run.metrics(kind.log) if row["kind"] == kind.kind]
    return [from_table(kind, row, record=location) for row in table_rows]


def check_step_rows(run: Run, *, done: bool = False) -> None:
    """Raise `WakefulError` if a training step in metrics.jsonl lacks a figure. With `done`, for a
    run that has taken its last step, raise it also if there is no step.
    """
    steps = logged_rows(run, StepRow)
    if done and not steps:
        raise WakefulError(
            f"{run.path / 'metrics.jsonl'} has no training steps, although the run is finished: "
            "restore it"
        )


@dataclass(frozen=True)
class Gap:
    """Layers that an heir drops, from `first` to `last`, after its own layer `after`."""

    after: int
    first: int
    last: int


@dataclass(frozen=True)
class BridgeGap(Gap):
    """A gap and how far the heir's stream was from the reference's behind it.

    Errors are Σ w ‖x − y‖² / Σ w ‖y‖² over the tokens that were solved on.
    """

    plain: float
    """Without a bridge."""
    error: float
