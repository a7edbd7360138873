"""What a run records of its data, and whether it is still the same."""

from typing import Any

from wakeful.data.tokens import Data
from wakeful.errors import WakefulError
from wakeful.runs import records
from wakeful.runs.run import Run

_ROW: records.Fields = {
    "loss": (int, float), "tokens": int, "seconds": (int, float), "tokens_per_second": (int, float),
}  # fmt: skip


def data_facts(data: Data) -> dict[str, Any]:
    """Return what names the text, its split and its tokenizer."""
    return {
        "source": data.info["source"],
        "corpus_sha256": data.corpus_sha256,
        "tokenizer": data.tokenizer.fingerprint,
        "train_tokens": data.info["splits"]["train"]["tokens"],  # 0: drawn without end
        "validation_tokens": data.validation.num_tokens,
        "vocab_size": data.vocab_size,
        "overlap": data.info.get("overlap"),  # None where it was kept
        "train_sha256": data.info["splits"]["train"]["sha256"],
        "validation_sha256": data.info["splits"]["validation"]["sha256"],
    }


def check_same_data(run: Run, data: Data) -> None:
    """Raise `WakefulError` unless the data is what the run was begun with."""
    before, now = run.read_json("data.json"), data_facts(data)
    if any(before.get(key) != now[key] for key in now if key != "source"):
        raise WakefulError(
            f"{run.path} was trained on other data than data.source gives now: the text, what is "
            "held out of it or the tokenizer has changed; restore it, or start a new run"
        )


def check_rows(run: Run, *, done: bool = False) -> None:
    """Raise `WakefulError` unless every step that metrics.jsonl tells of has its figures.

    Of a run whose last step is `done` it must tell of one at least.
    """
    path = run.path / "metrics.jsonl"
    rows = [row for row in run.metrics() if row["kind"] == "train"]
    for row in rows:
        records.check_fields(path, row, _ROW)
    if done and not rows:
        raise WakefulError(f"{path} does not tell of a single step, and all are done: restore it")
