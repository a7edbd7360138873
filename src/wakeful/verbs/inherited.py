"""The models of an inheritance's folder: its reference, last heirs and baselines, of every seed."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from wakeful.heirs.baselines import folder_of
from wakeful.heirs.outcome import REFERENCE, Summary, read_inheritance
from wakeful.runs.run import Run
from wakeful.verbs.sources import Source


def with_heirs(sources: Sequence[Source]) -> list[Source]:
    """Return the models, in the place of an inheritance's folder those in it, none of them twice.

    Raises:
        WakefulError: an inheritance is not finished.
    """
    found: list[Source] = []
    for source in sources:
        if not (isinstance(source, str | Path) and _is_inheritance(Path(source))):
            found.append(source)
            continue
        there = [str(each) for each in found if isinstance(each, str | Path)]
        found += [each for each in _models(Path(source)) if each not in there]
    return found


def _is_inheritance(place: Path) -> bool:
    return (place / "run.json").is_file() and Run.open(place).header.kind == "inherit"


def _models(place: Path) -> Iterator[str]:
    summary, _ = read_inheritance(place)
    exported = place / REFERENCE
    yield str(exported) if exported.is_dir() else summary.recipe.reference
    for seed, _ in summary.recipe.of_seeds():
        heir = summary.heir.runs[-1] if not seed else _last_heir(summary, place / seed)
        yield str(place / seed / heir)
        for baseline in summary.recipe.baselines:
            yield str(place / seed / folder_of(baseline))


def _last_heir(summary: Summary, place: Path) -> str:
    """Return the folder of a later seed's last heir, which parity may have come to elsewhere."""
    depths = [int(each.name.removeprefix("heir-")) for each in place.glob("heir-*")]
    return f"heir-{(min if summary.recipe.drops > 1 else max)(depths)}"
