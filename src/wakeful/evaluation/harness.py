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
        """Wrap a model for lm-eval.

        Texts run `batch_size` at a time, or one by one if padding would change a quantized layer's
        scale. With `bos`, BOS stands before every context. `progress` is called with the number of
        texts that were run.
        """
        quantized = quantized_layers(loaded.module).values()
        padding_matters = any(layer.depends_on_padding for layer in quantized)
        model: Any = loaded.module
        decoder = as_decoder(loaded.module)
        if decoder is not None:  # ours, which HFLM cannot run
            model = as_transformers(decoder)
            model.generation_config.eos_token_id = sorted(loaded.ends)
        with quiet(), _keep_head_untied(model):
            super().__init__(
                pretrained=model,
                tokenizer=_tokenizer_of(loaded),
                backend="causal",
                batch_size=1 if padding_matters else batch_size,
                max_length=loaded.context,
                softmax_dtype=torch.float32,
                add_bos_token=False,
                prefix_token_id=loaded.bos,
            )
        self._loaded = loaded
        self._bos_tokens = [loaded.bos] if bos and loaded.bos is not None else []
        self._progress = progress
        self._num_rows_run = 0

    def tok_encode(self, string: str, *_: object, **__: object) -> list[int]:
        """Return a text's own tokens. lm-eval's further arguments are ignored: they ask for special
        tokens around the text or cut it, which `tok_batch_encode` does.
        """
        return self._loaded.encode_plain(string)

    def tok_batch_encode(
        self, strings: Sequence[str], *_: object, left_truncate_len: int, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Return the token ids of prompts, padded on the left to one length, and a mask that is 0
        at padding.

        A prompt begins with BOS if that is on. Of one longer than `left_truncate_len` tokens only
        the end is kept. An empty one becomes the model's BOS.
        """
        encoded = [[*self._bos_tokens, *self.tok_encode(text)] for text in strings]
        rows = [(row or [self.prefix_token_id])[-left_truncate_len:] for row in encoded]
        padded = self.tokenizer.pad({"input_ids": rows}, padding_side="left", return_tensors="pt")
        return padded["input_ids"], padded["attention_mask"]

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return the tokens of a context, after BOS if it is on, and those of its continuation."""
        context_tokens, continuation_tokens = super()._encode_pair(context, continuation)
        return [*self._bos_tokens, *context_tokens], continuation_tokens

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], *rest: Any, **named: Any
    ) -> list[tuple[float, bool]]:
        """Check each request, (texts, context's tokens, answer's tokens), and have lm-eval return
        the answer's log-likelihood and whether greedy decoding gives the answer.

        Raises:
            WakefulError: an answer does not fit the model's context, or has no token before it.
        """
        for _, context, answer in requests:
            if not context or not 0 < len(answer) <= self.max_length:
                raise WakefulError(
                    f"an example's answer is {len(answer)} of {self._loaded.name}'s tokens, and "
                    f"its context holds {self.max_length}"
                )
        return super()._loglikelihood_tokens(requests, *rest, **named)

    def _model_call(self, inps: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return the logits of token ids; raise `WakefulError` if one is NaN or infinite."""
        with torch.inference_mode():
            logits = check_logits(logits_of(self._loaded.module, inps))
        self._num_rows_run += len(inps)
        self._progress(self._num_rows_run, 0)  # 0: lm-eval does not tell how many there will be
        return logits


@contextlib.contextmanager
def _keep_head_untied(model: Any) -> Iterator[None]:
    """Keep `model.tie_weights`, which lm-eval calls, from tying the head to the embedding inside
    the context: a checkpoint may hold a head of its own.
    """
    model.tie_weights = lambda: None
    try:
        yield
    finally:
        del model.tie_weights


def _tokenizer_of(loaded: Model) -> PreTrainedTokenizerBase:
    """Return a model's tokenizer as one of Transformers: a copy, because lm-eval may change it."""
    if isinstance(loaded.tokenizer, PreTrainedTokenizerBase):
        return copy.deepcopy(loaded.tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        loaded.save_tokenizer(Path(folder))
        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)


def run_tasks(name: str, harness: LM, tasks: TaskSet, *, limit: int = 0) -> list[Score]:
    """Return the scores of the model called `name` on the first `limit` examples of each task (0:
    all).

    The scores of groups come first. A figure that is not a mean over examples, such as a BLEU, is
    lm-eval's own and has no standard error here.

    Raises:
        WakefulError: lm-eval cannot run a task, or the model cannot score an example.
    """
    with quiet(), wrap_errors(f"lm-eval could not evaluate {name}"):
        requested: Any = {"tasks": dict(tasks.tasks), "groups": dict(tasks.groups)}
        results: Any = evaluate(harness, requested, limit=limit or None, bootstrap_iters=0)
    scores: list[Score] = []
    for task, samples in results["samples"].items():
        directions = results["higher_is_better"].get(task, {})
        for (metric, filter_name), figure in _read_figures(results["results"][task]).items():
            rows = [sample for sample in samples if sample["filter"] == filter_name]
            higher_is_better = directions.get(metric)
            if higher_is_better is None:  # the task does not say it: judge by the metric's name
                higher_is_better = metric not in _LOWER
            values, weights, keys = _example_values(metric, rows, figure)
            per_example = len(keys) == len(rows)  # otherwise the figure is lm-eval's own
            scores.append(
                Score(
                    model=name,
                    task=task,
                    metric=_metric_title(metric, filter_name),
                    keys=keys,
                    values=values,
                    weights=weights,
                    exponential=metric in _PERPLEXITIES and per_example,
                    higher_is_better=higher_is_better,
                    shots=results["n-shot"][task],
                )
            )
    group_scores: list[Score] = []
    for group in tasks.groups.values():
        figures = _read_figures(results["results"].get(group.name, {}))
        group_scores += _group_scores(group, figures, scores)
    return _assign_to_groups([*group_scores, *scores], tasks)


def _metric_title(metric: str, filter_name: str) -> str:
    """Return the title of a metric whose answers lm-eval passed through a filter; the filter "none"
    is left out.
    """
    return metric if filter_name == "none" else f"{metric} ({filter_name})"


def _read_figures(metrics: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    """Return lm-eval's figures of a task or group, by (metric, filter).

    In `metrics` their keys are "METRIC,FILTER". Standard errors and other facts, which are there
    too, are left out.
    """
    figures: dict[tuple[str, str], float] = {}
    for key, value in metrics.items():
        metric, _, filter_name = key.partition(",")
        is_error = metric.endswith("_stderr")
        if filter_name and not is_error and isinstance(value, float | int):
            figures[metric, filter_name] = value
    return figures


def _example_values(
    metric: str, rows: Sequence[dict[str, Any]], figure: float
) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Return the values, weights and keys of examples, such that Σ values / Σ weights is lm-eval's
    own `figure`; of a perplexity, exp(Σ values / Σ weights).

    If lm-eval computes the figure in another way, return it as the value of a single example "all".
    """
    pairs = [_value_and_weight(metric, row[metric]) for row in rows if metric in row]
    if len(pairs) == len(rows) > 0 and None not in pairs:
        values, weights = np.array(pairs, dtype=np.float64).T
        ratio = values.sum() / weights.sum()
        computed = math.exp(ratio) if metric in _PERPLEXITIES else ratio
        if math.isclose(figure, computed, rel_tol=1e-6):
            keys = (f"{row['doc_hash'][:12]}-{row['target_hash'][:4]}" for row in rows)
            return values, weights, tuple(keys)
    return np.array([figure]), np.ones(1), ("all",)


def _value_and_weight(metric: str, value: Any) -> tuple[float, float] | None:
    """Return an example's value and weight from lm-eval's number, of weight 1, or pair (number,
    weight); None for anything else.

    For a perplexity or bits per byte, lm-eval's number is a log-likelihood: the value is the loss,
    in nats or in bits.
    """
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
    """Yield a group's score for each of `figures`, which are lm-eval's, by metric and filter.

    A score is the mean over the group's tasks, weighted by their numbers of examples or equally, as
    the group says. Where the tasks' `scores` cannot be combined, or their mean is not lm-eval's
    figure, that figure is the score's only value.
    """
    task_names = {task.task_name for task in group.get_all_tasks()}
    for (metric, filter_name), figure in figures.items():
        title = _metric_title(metric, filter_name)
        parts = [score for score in scores if score.task in task_names and score.metric == title]
        weights_by_size = [
            aggregation.weight_by_size
            for aggregation in group.aggregate_metric_list or ()
            if aggregation.metric == metric
            and filter_name in (aggregation.filter_list or [filter_name])
        ]
        by_size = weights_by_size[-1]  # the last that is listed counts
        sizes = [len(score.keys) if by_size else 1 for score in parts]
        shares = [size / sum(sizes) for size in sizes]
        score = combine_scores(parts, shares, group.name) if can_combine(parts) else None
        if score is None or not math.isclose(figure, score.figure, rel_tol=1e-6):
            score = dataclasses.replace(
                parts[0], task=group.name, keys=("all",), values=np.array([figure]),
                weights=np.ones(1), exponential=False, shots=same_shots(parts),
            )  # fmt: skip
        yield score


def _assign_to_groups(scores: Sequence[Score], tasks: TaskSet) -> list[Score]:
    """Return copies of the scores in which `part_of` names the group that a task was run for.

    It stays empty for a task that was requested by name, and for one whose group has no score.
    """
    scored_names = {score.task for score in scores}
    group_by_part: dict[str, str] = {}
    for name, group in tasks.groups.items():
        if name not in scored_names:
            continue
        parts = {task.task_name for task in group.get_all_tasks()}
        parts |= {subgroup.name for subgroup in group.get_all_groups()}
        for part in parts - tasks.named:
            group_by_part.setdefault(part, name)  # of several groups the first
    return [
        dataclasses.replace(score, part_of=group_by_part.get(score.task, "")) for score in scores
    ]
