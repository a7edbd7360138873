"""lm-eval's groups of tasks: a group's own figure, weighted over its tasks as it is defined.

A group (`mmlu`) holds tasks and other groups (`mmlu_stem`). Its definition may name metrics to
aggregate over all tasks below it, with weights by their numbers of examples or equal ones.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from wakeful.evaluation.scores import Score, can_combine, combined, same_shots

if TYPE_CHECKING:
    from lm_eval.api.group import Group
    from lm_eval.api.task import Task


@dataclass(frozen=True)
class TaskSet:
    """What a model is asked through lm-eval."""

    tasks: "Mapping[str, Task]" = field(default_factory=dict)
    groups: "Mapping[str, Group]" = field(default_factory=dict)
    """The groups that were asked for, and those inside them."""
    named: frozenset[str] = frozenset()
    """What was asked for by its own name, or as a tag's, and not as a part of a group."""


def title_of(metric: str, chosen: str) -> str:
    """Return what a metric of lm-eval after one of its filters is called."""
    return metric if chosen == "none" else f"{metric} ({chosen})"


def with_groups(
    scores: Sequence[Score], tasks: TaskSet, own: Mapping[str, Mapping[tuple[str, str], float]]
) -> list[Score]:
    """Return one model's scores of tasks with each group's own before those of its parts.

    A part names the group that was asked for, and is hidden unless it was asked for by name too.
    The parts of a group that aggregates nothing stay as they are. `own` are lm-eval's figures of
    each group, by metric and filter.
    """
    found: dict[str, list[Score]] = {}
    for score in scores:
        found.setdefault(score.task, []).append(score)
    names = list(found)
    for name, group in tasks.groups.items():
        made = [_of_group(group, *key, figure, found) for key, figure in own[name].items()]
        found[name] = [score for score in made if score is not None]
    above: dict[str, str] = {}
    for name, group in tasks.groups.items():
        for child in group.child_names:
            above.setdefault(child, name)
    placed: dict[str, list[Score]] = {}

    def place(name: str, part_of: str) -> None:
        if name in placed:
            return
        hidden = bool(part_of) and name not in tasks.named
        placed[name] = [
            dataclasses.replace(score, part_of=part_of, hidden=hidden)
            for score in found.get(name, [])
        ]
        group = tasks.groups.get(name)
        for child in group.child_names if group else []:
            place(child, part_of or (name if placed[name] else ""))

    for name in (*names, *tasks.groups):
        outermost = name
        while outermost in above:
            outermost = above[outermost]
        place(outermost, "")
    return [score for each in placed.values() for score in each]


def _of_group(
    group: "Group", metric: str, chosen: str, own: float, found: Mapping[str, Sequence[Score]]
) -> Score | None:
    """Return a group's score over all examples of its tasks; None where none has the metric.

    Where the weighted mean of their figures is not lm-eval's own, its figure stands alone.
    """
    title = title_of(metric, chosen)
    names = [task.task_name for task in group.get_all_tasks()]
    parts = [score for name in names for score in found.get(name, ()) if score.metric == title]
    if not parts:
        return None
    by_size = [
        each.weight_by_size
        for each in group.aggregate_metric_list or ()
        if each.metric == metric and (each.filter_list is None or chosen in each.filter_list)
    ][-1]
    sizes = [len(score.keys) if by_size else 1 for score in parts]
    shares = [size / sum(sizes) for size in sizes]
    weighted = sum(share * score.figure for share, score in zip(shares, parts, strict=True))
    if not can_combine(parts) or not math.isclose(own, weighted, rel_tol=1e-6):
        return dataclasses.replace(
            parts[0], task=group.name, keys=("all",), values=np.array([own]), weights=np.ones(1),
            exponential=False, shots=same_shots(parts), made_of="an aggregate of its own",
        )  # fmt: skip
    how = "weighted by their numbers of examples" if by_size else "with equal weights"
    made_of = f"the mean of {len(parts)} tasks {how}"
    return dataclasses.replace(combined(parts, shares, group.name), made_of=made_of)
