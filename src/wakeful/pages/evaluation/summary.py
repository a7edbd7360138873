"""How an evaluation was done, in words, and its figures for summary.json."""

from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from wakeful.config.verbs import EvaluateOptions
from wakeful.estimates import finite
from wakeful.evaluation.scores import Score, difference
from wakeful.runs.run import machine_line


def method_of(
    names: Mapping[str, str],
    scores: Sequence[Score],
    options: EvaluateOptions,
    machine: Mapping[str, Any],
    *,
    bos: str,
    dtype: str,
    windows: str,
) -> dict[str, str]:
    """Return what a reader needs to judge and repeat the figures."""
    method = {
        "Models": ", ".join(f"{name} ({kind})" for name, kind in names.items()),
        "BOS": bos,
        "Arithmetic": f"model in {dtype}, log-likelihoods in float32 or better",
    }
    if options.source:
        counts = "; ".join(
            f"{score.model} {len(score.keys)} windows, {score.weights.sum():,.0f} tokens counted"
            for score in scores
            if (score.task, score.metric) == ("text", "perplexity")
        )
        part = f"at most {options.windows} windows" if options.windows else "all of it"
        method["Text"] = (
            f"{options.source}, {part}, windows of {windows}, each token (but the first where "
            f"there is no BOS) counted once: {counts}"
        )
    for task in dict.fromkeys(score.task for score in scores if score.task != "text"):
        count = max(len(score.keys) for score in scores if score.task == task)
        files = {"lambada": options.lambada, "choices": options.choices}
        source = files.get(task)
        method[f"Task {task}"] = (
            f"{source}, {count} examples, none shown before"
            if source
            else f"lm-eval's own definition, {count} examples"
        )
    if options.asks:
        method["lm-eval"] = metadata.version("lm-eval")
    method["Errors"] = (
        "one standard error over windows or examples; differences are paired where both models "
        "had the same ones"
    )
    method["Machine"] = machine_line(machine)
    return method


def summary(
    names: Mapping[str, str], scores: Sequence[Score], method: Mapping[str, str]
) -> dict[str, Any]:
    """Return every model's scores, and every paired difference to the first model's."""
    first = next(iter(names))
    baseline = {(s.task, s.metric): s for s in scores if s.model == first}
    differences = []
    for score in scores:
        other = baseline.get((score.task, score.metric))
        paired = difference(score, other) if other and other is not score else None
        if paired is not None:
            differences.append(
                {"model": score.model, "baseline": first, "task": score.task,
                 "metric": score.metric, "difference": finite(paired[0]),
                 "standard_error": finite(paired[1])}
            )  # fmt: skip
    return {
        "models": [
            {
                "model": name,
                "architecture": kind,
                "scores": [
                    {"task": s.task, "metric": s.metric, "value": finite(s.figure),
                     "standard_error": finite(s.error), "examples": len(s.keys),
                     "higher_is_better": s.higher_is_better}
                    for s in scores if s.model == name
                ],
            }
            for name, kind in names.items()
        ],
        "differences": differences,
        "method": dict(method),
    }  # fmt: skip
