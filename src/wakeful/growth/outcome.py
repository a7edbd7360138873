"""What a recipe came to, as the figures of summary.json."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from wakeful.estimates import finite, paired_ratio
from wakeful.growth.baselines import BASELINES
from wakeful.growth.layermap import written
from wakeful.growth.recipe import Finished, Outcome
from wakeful.runs import records

_ROWS: Mapping[str, records.Fields] = {
    "train": {"tokens": int},
    "validation": {"loss": (int, float), "standard_error": (int, float, type(None))},
}
_MOST_DOUBLINGS = 10.0
"""A straight line that is longer than this says nothing."""


def arms(outcome: Outcome) -> list[tuple[str, list[Finished]]]:
    """Return the comparison's lines, heirs first, each with its stages in order."""
    found: dict[str, list[Finished]] = {}
    for finished in (*outcome.rounds, *outcome.baselines):
        found.setdefault(finished.stage.arm, []).append(finished)
    return list(found.items())


def curve(stages: Sequence[Finished]) -> list[dict[str, Any]]:
    """Return an arm's evaluations: step, tokens and loss, counted from the arm's beginning.

    Where one stage ends and the next begins there are two rows of one step, before and after.
    """
    rows: list[dict[str, Any]] = []
    tokens = 0
    for finished in stages:
        metrics = finished.run.metrics()
        for row in metrics:
            fields = _ROWS.get(row["kind"], {})
            records.check_fields(finished.run.path / "metrics.jsonl", row, fields)
        seen = {row["step"]: row["tokens"] for row in metrics if row["kind"] == "train"}
        rows += [
            {
                "run": finished.stage.name,
                "step": finished.stage.offset + row["step"],
                "tokens": tokens + seen.get(row["step"], 0),
                "loss": row["loss"],
                "standard_error": row["standard_error"],
            }
            for row in metrics
            if row["kind"] == "validation"
        ]
        tokens += max(seen.values(), default=0)
    return rows


def figures(outcome: Outcome, reference: pl.DataFrame, reference_loss: float) -> dict[str, Any]:
    """Return rounds, baselines and how they compare with each other and with the reference."""
    last = outcome.rounds[-1]
    heir_arm = next(stages for arm, stages in arms(outcome) if arm == last.stage.arm)
    heir_curve = curve(heir_arm)
    lines = []
    for arm, stages in arms(outcome):
        final, points = stages[-1], curve(stages)
        summary = final.summary
        to_heir, to_heir_error = _difference(final, last)
        to_reference, to_reference_error = _against(final, reference)
        lines.append(
            {
                "arm": arm,
                "heir": any(stage is finished for stage in stages for finished in outcome.rounds),
                "summary": BASELINES[arm].summary if arm in BASELINES else _described(final),
                "runs": [finished.stage.name for finished in stages],
                "depth": final.run.config.model.num_layers,
                "layers": list(final.stage.layers),
                "steps": final.stage.offset + final.stage.steps,
                "tokens": sum(finished.summary["tokens"] for finished in stages),
                "seconds": sum(finished.summary["seconds"] for finished in stages),
                "parameters": summary["parameters"]["total"],
                "loss": summary["validation"]["loss"],
                "standard_error": summary["validation"]["standard_error"],
                "start_loss": points[0]["loss"],
                "minus_heir": to_heir,
                "minus_heir_error": to_heir_error,
                "minus_reference": to_reference,
                "minus_reference_error": to_reference_error,
                "parity": summary["validation"]["loss"] <= reference_loss,
                "behind": _behind(points, heir_curve) if final is not last else None,
                "curve": points,
            }
        )
    return {"final": last.stage.arm, "arms": lines, "outlook": outlook(heir_curve, reference_loss)}


def outlook(points: Sequence[dict[str, Any]], target: float) -> dict[str, Any]:
    """Return the gap to the reference and how many times the tokens a straight line would take.

    The line goes through the last two evaluations, loss over the logarithm of tokens: a crude
    guess, for it is drawn where the learning rate has fallen, and curves flatten.
    """
    gap = points[-1]["loss"] - target
    trained = [row for row in points if row["tokens"] > 0]
    found: dict[str, Any] = {"gap": gap, "nats_per_doubling": None, "times_the_tokens": None}
    if len(trained) < 2 or trained[-1]["tokens"] <= trained[-2]["tokens"]:
        return found
    before, now = trained[-2:]
    doublings = math.log2(now["tokens"] / before["tokens"])
    slope = (before["loss"] - now["loss"]) / doublings
    found["nats_per_doubling"] = slope
    if gap > 0 and slope > 0 and gap / slope < _MOST_DOUBLINGS:
        found["times_the_tokens"] = 2.0 ** (gap / slope)
    return found


def _behind(points: Sequence[dict[str, Any]], heir: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Count the evaluations, at steps that both have, where an arm's loss is above the heir's.

    Those before the first step are left out: nothing has been trained yet.
    """
    best = {row["step"]: row["loss"] for row in heir if row["step"] > 0}
    shared = [row for row in points if row["step"] in best]
    behind = [row for row in shared if row["loss"] > best[row["step"]]]
    return {"evaluations": len(shared), "behind": len(behind)}


def _described(finished: Finished) -> str:
    return f"the reference's layers {written(finished.stage.layers)}"


def _difference(one: Finished, other: Finished) -> tuple[float, float | None]:
    if one is other:
        return 0.0, None
    return _against(one, _windows(other))


def _against(finished: Finished, other: pl.DataFrame) -> tuple[float, float | None]:
    """Return the loss minus another's over the same windows, with its paired standard error."""
    ours = _windows(finished)
    both = ours.select("window", "tokens", "loss").join(
        other.select("window", theirs="loss"), on="window", maintain_order="left"
    )
    loss, error = paired_ratio(both["loss"], both["theirs"], both["tokens"])
    return loss, finite(error)


def _windows(finished: Finished) -> pl.DataFrame:
    place = finished.run.path / "validation.parquet"
    frame = records.read_frame(place, records.VALIDATION)
    records.check_windows(place, frame)
    return frame
