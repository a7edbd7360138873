"""What an inheritance says: its summary, read with suspicion, and verdicts in plain words."""

from pathlib import Path

from wakeful.estimates import with_error
from wakeful.growth.layers import written
from wakeful.growth.outcome import Arm, Behind, Reference, Sizes, Summary
from wakeful.runs.run import Environment, Run


def read_inheritance(path: str | Path) -> tuple[Summary, Environment]:
    """Return an inheritance's summary and its environment.

    Raises:
        WakefulError: it is none, is not finished, or a field is missing or of another kind.
    """
    run = Run.open(path)
    run.check_kind("inherit", "is not an inheritance")
    return run.read(Summary, "summary.json"), run.read(Environment, "environment.json")


def verdicts(summary: Summary) -> list[str]:
    """Return the outcome in sentences: parity, the baselines, what it saved."""
    heir, reference = summary.heir, summary.reference
    return [
        _parity(summary, heir, reference),
        *_against_baselines(summary, heir),
        _saved(summary.sizes),
    ]


def cost_of_reference(reference: Reference) -> str:
    """Say what the reference's own training took, which no baseline here pays."""
    if reference.tokens is None:
        return (
            f"What training {reference.name} cost is not known: its files do not say. An heir "
            "builds on that cost; a model trained from random does not."
        )
    seconds = reference.seconds or 0.0
    return (
        f"{reference.name} itself was trained on {reference.tokens:,} tokens in "
        f"{seconds:,.0f} s, on which an heir builds and a model trained from random does not."
    )


def choice(summary: Summary) -> str:
    """Say which layers were taken first, and why those."""
    chosen, total = summary.choice, summary.reference.layers
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
    }.get(chosen.rule, chosen.rule)
    layers = written(chosen.layers)
    return f"{len(chosen.layers)} of {total} layers ({layers}): {why}."


def _parity(summary: Summary, heir: Arm, reference: Reference) -> str:
    gap = with_error(abs(heir.minus_reference), _number(heir.minus_reference_error))
    begins = (
        f"{heir.arm}, {heir.depth} of {reference.layers} layers, ends at "
        f"{heir.loss:.4f} nats a token after {heir.tokens:,} tokens; {reference.name} "
        f"itself has {reference.loss:.4f} on the same text"
    )
    if heir.parity:
        return f"{begins}: parity is reached, {gap} under it."
    outlook = summary.outlook
    times, slope = outlook.times_the_tokens, outlook.nats_per_doubling
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


def _against_baselines(summary: Summary, heir: Arm) -> list[str]:
    said = []
    for arm in summary.arms:
        if arm.heir:
            continue
        difference = with_error(arm.minus_heir, _number(arm.minus_heir_error), "+")
        behind = arm.behind or Behind(0, 0)
        every = behind.behind == behind.evaluations
        place = "every one" if every else f"{behind.behind}"
        said.append(
            f"{arm.arm}: {difference} nats against {heir.arm}, behind it at {place} of "
            f"{behind.evaluations} evaluations after the first step."
        )
    return said


def _saved(sizes: Sizes) -> str:
    ours, theirs = sizes.heir, sizes.reference
    return (
        f"It has {ours.parameters / theirs.parameters:.1%} of the reference's parameters, "
        f"{ours.cache_bytes_per_token / theirs.cache_bytes_per_token:.1%} of its key/value "
        f"cache, and writes {ours.tokens_per_second / theirs.tokens_per_second:.2f} times as "
        "fast."
    )


def _number(value: float | None) -> float:
    return float("nan") if value is None else value
