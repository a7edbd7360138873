"""A model asked by lm-eval: its class for models of Transformers, and its answers as scores.

lm-eval asks the model and judges each answer; the figure is checked against its own, and the
standard error is computed here from the same judged examples, since a paired difference needs them.
"""

import contextlib
import copy
import dataclasses
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lm_eval.api.group import Group
from lm_eval.api.model import LM
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from wakeful.errors import WakefulError
from wakeful.evaluation.examples import TaskSet
from wakeful.evaluation.tasks import quiet
from wakeful.guard import wrap_errors
from wakeful.hf.modeling import as_transformers
from wakeful.loading.model import Model
from wakeful.model.finite import check_logits
from wakeful.probes.running import as_decoder, logits_of
from wakeful.quantization import quantized_layers
from wakeful.scores import Score, can_combine, combine_scores, same_shots
from wakeful.terminal.display import OnProgress, ignore_progress

_PERPLEXITIES = ("perplexity", "word_perplexity", "byte_perplexity")
_LOWER = (*_PERPLEXITIES, "bits_per_byte")

_HFLM: Any = HFLM  # Its registering decorator hides its type.


class HarnessModel(_HFLM):
    """lm-eval's own class for Transformers models, with our tokens of a text, BOS and progress.

    BOS stands before every context or nowhere; HFLM alone would leave that to the tokenizer's
    template, which may also add an end, and would read special tokens that a text spells.
    """

    def __init__(
        self,
        loaded: Model,
        *,
        bos: bool = False,
        batch_size: int = 4,
        progress: OnProgress = ignore_progress,
    ) -> None:
        """Make lm-eval's adapter of a model.

        Rows run one by one where padding would change a quantized layer's scale, else `batch_size`
        at a time.
        """
        alone = any(layer.depends_on_padding for layer in quantized_layers(loaded.module).values())
        model: Any = loaded.module
        if (decoder := as_decoder(loaded.module)) is not None:
            model = as_transformers(decoder)
            model.generation_config.eos_token_id = sorted(loaded.ends)
        with quiet(), _keep_head_untied(model):
            super().__init__(
                pretrained=model,
                tokenizer=_tokenizer_of(loaded),
                backend="causal",
                batch_size=1 if alone else batch_size,
                max_length=loaded.context,
                softmax_dtype=torch.float32,
                add_bos_token=False,
                prefix_token_id=loaded.bos,
            )
        self._loaded = loaded
        self._first = [loaded.bos] if bos and loaded.bos is not None else []
        self._progress = progress
        self._rows = 0

    def tok_encode(self, string: str, *_: object, **__: object) -> list[int]:
        """Return a text's own tokens."""
        return self._loaded.encode_plain(string)

    def tok_batch_encode(
        self, strings: Sequence[str], *_: object, left_truncate_len: int, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Return prompts' tokens after BOS, padded on the left, and where they are."""
        encoded = [[*self._first, *self.tok_encode(text)] for text in strings]
        rows = [(row or [self.prefix_token_id])[-left_truncate_len:] for row in encoded]
        padded = self.tokenizer.pad({"input_ids": rows}, padding_side="left", return_tensors="pt")
        return padded["input_ids"], padded["attention_mask"]

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        before, after = super()._encode_pair(context, continuation)
        return [*self._first, *before], after

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], *rest: Any, **named: Any
    ) -> list[tuple[float, bool]]:
        """Check that every answer fits the context; then as lm-eval does."""
        for _, context, answer in requests:
            if not context or not 0 < len(answer) <= self.max_length:
                raise WakefulError(
                    f"an example's answer is {len(answer)} of {self._loaded.name}'s tokens, and "
                    f"its context holds {self.max_length}"
                )
        return super()._loglikelihood_tokens(requests, *rest, **named)

    def _model_call(self, inps: Tensor, *_: Any, **__: Any) -> Tensor:
        with torch.inference_mode():
            logits = check_logits(logits_of(self._loaded.module, inps))
        self._rows += len(inps)
        self._progress(self._rows, 0)
        return logits


@contextlib.contextmanager
def _keep_head_untied(model: Any) -> Iterator[None]:
    """Keep lm-eval from tying a head to the embedding: a checkpoint may hold a head of its own."""
    model.tie_weights = lambda: None
    try:
        yield
    finally:
        del model.tie_weights


def _tokenizer_of(loaded: Model) -> PreTrainedTokenizerBase:
    """Return a copy of a model's tokenizer as one of Transformers, which lm-eval may change."""
    if isinstance(loaded.tokenizer, PreTrainedTokenizerBase):
        return copy.deepcopy(loaded.tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        loaded.save_tokenizer(Path(folder))
        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)


def run_tasks(name: str, harness: LM, tasks: TaskSet, *, limit: int = 0) -> list[Score]:
    """Return the scores of the model called `name` on the first `limit` examples (0: all).

    Groups that aggregate their tasks come first. A figure that is not a mean over examples, such as
    a BLEU, is lm-eval's own and has no standard error here.

    Raises:
        WakefulError: lm-eval cannot run a task, or the model cannot score an example.
    """
    with quiet(), wrap_errors(f"lm-eval could not evaluate {name}"):
        requested: Any = {"tasks": dict(tasks.tasks), "groups": dict(tasks.groups)}
        results: Any = evaluate(harness, requested, limit=limit or None, bootstrap_iters=0)
    scores: list[Score] = []
    for task, samples in results["samples"].items():
        better = results["higher_is_better"].get(task, {})
        for (metric, filtered), figure in _figures(results["results"][task]).items():
            rows = [sample for sample in samples if sample["filter"] == filtered]
            rising = better.get(metric)
            values, weights, keys = _examples(metric, rows, figure)
            per_example = len(keys) == len(rows)  # otherwise the figure is lm-eval's own
            scores.append(
                Score(
                    model=name,
                    task=task,
                    metric=_title(metric, filtered),
                    keys=keys,
                    values=values,
                    weights=weights,
                    exponential=metric in _PERPLEXITIES and per_example,
                    higher_is_better=metric not in _LOWER if rising is None else rising,
                    shots=results["n-shot"][task],
                )
            )
    groups = [
        score
        for group in tasks.groups.values()
        for score in _group_scores(group, _figures(results["results"].get(group.name, {})), scores)
    ]
    return _with_groups([*groups, *scores], tasks)


def _title(metric: str, filtered: str) -> str:
    """Return what a metric of lm-eval after one of its filters is called."""
    return metric if filtered == "none" else f"{metric} ({filtered})"


def _figures(metrics: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    """Return lm-eval's figures of a task or group, by metric and filter."""
    split = {key: key.partition(",") for key in metrics}
    return {
        (metric, filtered): metrics[key]
        for key, (metric, _, filtered) in split.items()
        if filtered and not metric.endswith("_stderr") and isinstance(metrics[key], float | int)
    }


def _examples(
    metric: str, rows: Sequence[dict[str, Any]], figure: float
) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Return values, weights and keys of examples whose ratio is lm-eval's own figure.

    Where no ratio of them is, its figure stands alone.
    """
    pairs = [_pair(metric, row[metric]) for row in rows if metric in row]
    if len(pairs) == len(rows) > 0 and None not in pairs:
        values, weights = np.array(pairs, dtype=np.float64).T
        ratio = values.sum() / weights.sum()
        value = math.exp(ratio) if metric in _PERPLEXITIES else ratio
        if math.isclose(figure, value, rel_tol=1e-6):
            keys = (f"{row['doc_hash'][:12]}-{row['target_hash'][:4]}" for row in rows)
            return values, weights, tuple(keys)
    return np.array([figure]), np.ones(1), ("all",)


def _pair(metric: str, value: Any) -> tuple[float, float] | None:
    """Return an example's value and weight, nats for a perplexity; None if it is not a number."""
    pair = value if isinstance(value, tuple | list) else (value, 1.0)
    if len(pair) != 2 or not all(isinstance(part, float | int | np.number) for part in pair):
        return None
    number, weight = map(float, pair)
    if metric == "bits_per_byte":
        return -number / math.log(2), weight
    return (-number if metric in _PERPLEXITIES else number), weight


def _group_scores(
    group: Group, figures: Mapping[tuple[str, str], float], scores: Sequence[Score]
) -> Iterator[Score]:
    """Yield a group's figures as lm-eval aggregates them, over all examples of its tasks.

    Where the weighted mean of the tasks' figures is not lm-eval's, its figure stands alone.
    """
    names = {task.task_name for task in group.get_all_tasks()}
    for (metric, filtered), figure in figures.items():
        title = _title(metric, filtered)
        parts = [score for score in scores if score.task in names and score.metric == title]
        by_size = [
            listed.weight_by_size
            for listed in group.aggregate_metric_list or ()
            if listed.metric == metric and filtered in (listed.filter_list or [filtered])
        ][-1]
        sizes = [len(score.keys) if by_size else 1 for score in parts]
        shares = [size / sum(sizes) for size in sizes]
        score = combine_scores(parts, shares, group.name) if can_combine(parts) else None
        if score is None or not math.isclose(figure, score.figure, rel_tol=1e-6):
            score = dataclasses.replace(
                parts[0], task=group.name, keys=("all",), values=np.array([figure]),
                weights=np.ones(1), exponential=False, shots=same_shots(parts),
            )  # fmt: skip
        yield score


def _with_groups(scores: Sequence[Score], tasks: TaskSet) -> list[Score]:
    """Return the scores, with `part_of` set for tasks that were not requested by name and belong to
    a group with a score of its own.
    """
    aggregated = {score.task for score in scores} & tasks.groups.keys()
    part_of: dict[str, str] = {}
    for name in (name for name in tasks.groups if name in aggregated):
        group = tasks.groups[name]
        inside = [task.task_name for task in group.get_all_tasks()]
        for part in {
            *inside,
            *(group_part.name for group_part in group.get_all_groups()),
        } - tasks.named:
            part_of.setdefault(part, name)
    return [dataclasses.replace(score, part_of=part_of.get(score.task, "")) for score in scores]
