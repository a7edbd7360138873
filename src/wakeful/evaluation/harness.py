"""lm-eval run on a model, its answers as scores.

lm-eval asks the model and judges each answer; the figure is checked against its own, and the
standard error is computed here from the same judged examples, since a paired difference needs them.
Every process runs all of lm-eval alike, so that its figures, their order and what it draws are
those of one process; only the model's work on the questions is shared (`Dealt`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.evaluator import evaluate

from wakeful.errors import WakefulError
from wakeful.evaluation.groups import TaskSet, title_of, with_groups
from wakeful.evaluation.scores import Score
from wakeful.evaluation.tasks import quiet
from wakeful.world import World

_PERPLEXITIES = ("perplexity", "word_perplexity", "byte_perplexity")
_LOWER = (*_PERPLEXITIES, "bits_per_byte")


def run_tasks(name: str, asked: LM, tasks: TaskSet, *, limit: int = 0) -> list[Score]:
    """Return the scores of the model called `name` on the first `limit` examples (0: all).

    A group that aggregates its tasks comes before them. A figure that is not a mean over examples,
    such as a BLEU, is lm-eval's own and has no standard error here.

    Raises:
        WakefulError: lm-eval refuses a task, or a model an example.
    """
    with quiet():
        try:
            given: Any = {"tasks": dict(tasks.tasks), "groups": dict(tasks.groups)}
            results: Any = evaluate(asked, given, limit=limit or None, bootstrap_iters=0)
        except WakefulError:
            raise
        except (ValueError, ArithmeticError, AssertionError, OSError, ImportError) as error:
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise WakefulError(f"lm-eval could not evaluate {name}: {reason}") from error
    scores: list[Score] = []
    for task, samples in results["samples"].items():
        better = results["higher_is_better"].get(task, {})
        for (plain, chosen), own in _figures(results["results"][task]).items():
            rows = [sample for sample in samples if sample["filter"] == chosen]
            rising = better.get(plain)
            values, weights, keys = _examples(plain, rows, own)
            scores.append(
                Score(
                    model=name,
                    task=task,
                    metric=title_of(plain, chosen),
                    keys=keys,
                    values=values,
                    weights=weights,
                    exponential=plain in _PERPLEXITIES and len(keys) == len(rows),
                    higher_is_better=plain not in _LOWER if rising is None else rising,
                    shots=results["n-shot"][task],
                )
            )
    own = {name: _figures(results["results"].get(name, {})) for name in tasks.groups}
    return with_groups(scores, tasks, own)


def _figures(found: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    """Return lm-eval's figures of a task or group, by metric and filter."""
    split = {key: key.partition(",") for key in found}
    return {
        (plain, chosen): found[key]
        for key, (plain, _, chosen) in split.items()
        if chosen and not plain.endswith("_stderr") and isinstance(found[key], float | int)
    }


def _examples(
    metric: str, rows: Sequence[dict[str, Any]], own: float
) -> tuple[np.ndarray, np.ndarray, tuple[str, ...]]:
    """Return values, weights and keys of examples whose ratio is lm-eval's own figure.

    Where no ratio of them is, its figure stands alone.
    """
    pairs = [_pair(metric, row[metric]) for row in rows if metric in row]
    if len(pairs) == len(rows) > 0 and None not in pairs:
        values, weights = np.array(pairs, dtype=np.float64).T
        ratio = values.sum() / weights.sum()
        if math.isclose(own, math.exp(ratio) if metric in _PERPLEXITIES else ratio, rel_tol=1e-6):
            keys = (f"{row['doc_hash'][:12]}-{row['target_hash'][:4]}" for row in rows)
            return values, weights, tuple(keys)
    return np.array([own]), np.ones(1), ("all",)


def _pair(metric: str, value: Any) -> tuple[float, float] | None:
    """Return an example's value and weight, nats for a perplexity; None if it is not a number."""
    pair = value if isinstance(value, tuple | list) else (value, 1.0)
    if len(pair) != 2 or not all(isinstance(each, float | int | np.number) for each in pair):
        return None
    number, weight = map(float, pair)
    if metric == "bits_per_byte":
        return -number / math.log(2), weight
    return (-number if metric in _PERPLEXITIES else number), weight


class Dealt(LM):
    """A model that answers its process's share of the questions and learns the other answers."""

    def __init__(self, name: str, inner: LM, world: World) -> None:
        super().__init__()
        self.name, self.inner, self.world = name, inner, world

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Return each continuation's log-likelihood, and whether greedy decoding writes it."""
        answers = self._answers(requests, self.inner.loglikelihood)
        return [(likelihood, greedy) for likelihood, greedy in answers]

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Return each text's log-likelihood."""
        return self._answers(requests, self.inner.loglikelihood_rolling)

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Return what the model writes after each context."""
        return self._answers(requests, self.inner.generate_until)

    def _answers(
        self, requests: list[Instance], ask: Callable[[list[Instance]], list[Any]]
    ) -> list[Any]:
        self.world.check_same(
            [repr(request.args) for request in requests],
            f"the processes ask {self.name} different questions: give each machine the same files "
            "and the same lm-eval",
        )
        mine = question_places(requests, self.world)
        answers = ask([requests[place] for place in mine]) if mine else []
        self.world.meet()
        parts = self.world.gather(list(zip(mine, answers, strict=True)))
        everywhere = {place: answer for part in parts for place, answer in part}
        return [everywhere[place] for place in range(len(requests))]


def question_places(requests: list[Instance], world: World) -> list[int]:
    """Return the places of the questions that this process answers.

    Questions of one context stay together, as a model may run it once for all of them; contexts
    are dealt out by length, so that each process has as much to do.
    """
    contexts: dict[str, list[int]] = {}
    for place, request in enumerate(requests):
        contexts.setdefault(str(request.args[0]), []).append(place)
    longest = sorted(contexts, key=lambda context: -len(context) * len(contexts[context]))
    mine = longest[world.rank :: world.size]
    return sorted(place for context in mine for place in contexts[context])
