"""What an inheritance says: its summary, read with suspicion, and verdicts in plain words."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wakeful.errors import WakefulError
from wakeful.estimates import with_error
from wakeful.growth.layermap import written
from wakeful.runs import records
from wakeful.runs.run import Run

_NUMBER = (int, float)
_MAYBE = (int, float, type(None))
_FIELDS: records.Fields = {
    "reference.name": str,
    "reference.layers": int,
    "reference.loss": _NUMBER,
    "reference.tokens": _MAYBE,
    "reference.seconds": _MAYBE,
    "final": str,
    "arms": list,
    "outlook.gap": _NUMBER,
    "outlook.nats_per_doubling": _MAYBE,
    "outlook.times_the_tokens": _MAYBE,
    "choice.rule": str,
    "choice.layers": list,
    "choice.figures": dict,
    "recipe.baselines": list,
    "recipe.copy": str,
    "recipe.route": str,
    "recipe.normalizer": str,
    **{f"recipe.train.{name}": int for name in ("steps", "batch_size", "length", "seed")},
    "recipe.train.dtype": str,
    **{f"recipe.optimizer.{name}": _NUMBER for name in ("lr", "final_lr", "weight_decay")},
    "recipe.optimizer.name": str,
    "recipe.optimizer.warmup_steps": int,
    "planned_by_time": bool,
    "departures": list,
    "sizes.reference": dict,
    "sizes.heir": dict,
    "data.source": (str, list),
    "data.validation_tokens": int,
    "data.train_tokens": int,
    "data.dropped_documents": int,
    "data.dropped_tokens": int,
}
_ARM: records.Fields = {
    "arm": str, "heir": bool, "summary": str, "runs": list, "depth": int, "layers": list,
    "steps": int, "tokens": int, "seconds": _NUMBER, "parameters": int, "loss": _NUMBER,
    "standard_error": _MAYBE, "start_loss": _NUMBER, "minus_heir": _NUMBER,
    "minus_heir_error": _MAYBE, "minus_reference": _NUMBER, "minus_reference_error": _MAYBE,
    "parity": bool, "curve": list,
}  # fmt: skip
_POINT: records.Fields = {"run": str, "step": int, "tokens": int, "loss": _NUMBER}
_SIZE: records.Fields = {
    "parameters": int, "weight_bytes": int, "cache_bytes_per_token": int, "cache_bytes": int,
    "context": int, "tokens_per_second": _NUMBER,
}  # fmt: skip


def read_inheritance(path: str | Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return an inheritance's summary and its environment.

    Raises:
        WakefulError: it is none, is not finished, or a field is missing or of another kind.
    """
    run = Run.open(path)
    if run.header.get("kind") != "inherit":
        raise WakefulError(
            f"{path} is not an inheritance: run.json calls it {run.header.get('kind')}"
        )
    place = run.path / "summary.json"
    summary = run.read_json("summary.json")
    records.check_fields(place, summary, _FIELDS)
    check_figures(place, summary["choice"]["figures"])
    records.check_items(place, summary["choice"], {"layers": int})
    records.check_items(place, summary, {"departures": str})
    for arm in summary["arms"]:
        records.check_fields(place, _table(place, arm), _ARM)
        records.check_items(place, arm, {"runs": str, "layers": int})
        if arm.get("behind") is not None:
            records.check_fields(place, arm, {"behind.evaluations": int, "behind.behind": int})
        for point in arm["curve"]:
            records.check_fields(place, _table(place, point), _POINT)
    for size in (summary["sizes"]["reference"], summary["sizes"]["heir"]):
        records.check_fields(place, size, _SIZE)
    if summary["final"] not in {arm["arm"] for arm in summary["arms"]}:
        raise WakefulError(f"{place}: final names no arm")
    environment = run.read_json("environment.json")
    records.check_fields(run.path / "environment.json", environment, records.ENVIRONMENT)
    return summary, environment


def check_figures(place: Path, figures: Mapping[str, Any]) -> None:
    """Raise `WakefulError` unless the figures that layers are chosen by are lists of numbers."""
    for name, values in figures.items():
        if not isinstance(values, list):
            raise WakefulError(f"{place}: the figures {name!r} are no list")
        records.check_items(place, figures, {name: _NUMBER})


def final_heir(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arm of the last heir."""
    return next(arm for arm in summary["arms"] if arm["arm"] == summary["final"])


def verdicts(summary: Mapping[str, Any]) -> list[str]:
    """Return the outcome in sentences: parity, the baselines, what it saved."""
    heir, reference = final_heir(summary), summary["reference"]
    return [
        _parity(summary, heir, reference),
        *_against_baselines(summary, heir),
        _saved(summary["sizes"]),
    ]


def cost_of_reference(reference: Mapping[str, Any]) -> str:
    """Say what the reference's own training took, which no baseline here pays."""
    if reference["tokens"] is None:
        return (
            f"What training {reference['name']} cost is not known: its files do not say. An heir "
            "builds on that cost; a model trained from random does not."
        )
    seconds = reference["seconds"] or 0.0
    return (
        f"{reference['name']} itself was trained on {reference['tokens']:,} tokens in "
        f"{seconds:,.0f} s, on which an heir builds and a model trained from random does not."
    )


def choice(summary: Mapping[str, Any]) -> str:
    """Say which layers were taken first, and why those."""
    chosen, total = summary["choice"], summary["reference"]["layers"]
    why = {
        "first": "the first layers, as the paper does by default",
        "middle": "layers around the middle",
        "last": "the last layers",
        "alternate": "every second layer, as DistilBERT does",
        "stacked": "the first layers, twice",
        "named": "the layers that were named",
        "rank": "the layers whose heads have the highest rank",
        "mass": "the layers whose attention is spread over the most columns",
        "influence": "the layers that change the stream most, 1 − cos(x_in, x_out)",
        "angle": "all but the neighboring layers over which the stream turns least",
        "lazy": "the neighboring layers of the lowest mean rank",
    }.get(chosen["rule"], chosen["rule"])
    layers = written(chosen["layers"])
    return f"{len(chosen['layers'])} of {total} layers ({layers}): {why}."


def _parity(
    summary: Mapping[str, Any], heir: Mapping[str, Any], reference: Mapping[str, Any]
) -> str:
    gap = with_error(abs(heir["minus_reference"]), _number(heir["minus_reference_error"]))
    begins = (
        f"{heir['arm']}, {heir['depth']} of {reference['layers']} layers, ends at "
        f"{heir['loss']:.4f} nats a token after {heir['tokens']:,} tokens; {reference['name']} "
        f"itself has {reference['loss']:.4f} on the same text"
    )
    if heir["parity"]:
        return f"{begins}: parity is reached, {gap} under it."
    outlook = summary["outlook"]
    times, slope = outlook["times_the_tokens"], outlook["nats_per_doubling"]
    if times is not None:
        rest = (
            f" At the pace of its last evaluations ({slope:.3f} nats a doubling of the tokens) a "
            f"straight line reaches it at {times:,.1f} times the tokens; curves flatten, so more."
        )
    elif slope is not None and slope > 0:
        rest = (
            f" Its last evaluations gain {slope:.3f} nats a doubling of the tokens: at that pace "
            "more than a thousand times the tokens."
        )
    else:
        rest = " Its last evaluations do not say what more training would bring."
    return f"{begins}: it is {gap} short of parity.{rest}"


def _against_baselines(summary: Mapping[str, Any], heir: Mapping[str, Any]) -> list[str]:
    said = []
    for arm in summary["arms"]:
        if arm["heir"]:
            continue
        difference = with_error(arm["minus_heir"], _number(arm["minus_heir_error"]), "+")
        behind = arm.get("behind") or {"evaluations": 0, "behind": 0}
        every = behind["behind"] == behind["evaluations"]
        place = "every one" if every else f"{behind['behind']}"
        said.append(
            f"{arm['arm']}: {difference} nats against {heir['arm']}, behind it at {place} of "
            f"{behind['evaluations']} evaluations after the first step."
        )
    return said


def _saved(sizes: Mapping[str, Any]) -> str:
    ours, theirs = sizes["heir"], sizes["reference"]
    return (
        f"It has {ours['parameters'] / theirs['parameters']:.1%} of the reference's parameters, "
        f"{ours['cache_bytes_per_token'] / theirs['cache_bytes_per_token']:.1%} of its key/value "
        f"cache, and writes {ours['tokens_per_second'] / theirs['tokens_per_second']:.2f} times as "
        "fast."
    )


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def _table(place: Path, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise WakefulError(f"{place}: an arm or a point of a curve is not a table")
    return value
