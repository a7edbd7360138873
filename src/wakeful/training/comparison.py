"""Several variants, several seeds, one folder."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from wakeful.config.schema import Config
from wakeful.config.tables import Table, merged
from wakeful.display import Display
from wakeful.errors import Interrupted, WakefulError
from wakeful.runs.run import Run, refuse_link
from wakeful.training.loop import train

Shown = Callable[[str], AbstractContextManager[Display]]

_OWN_FILES = ("run.json", "report.html")
"""What a comparison's folder holds beside its variants."""


OWN_KEYS = ("variants", "seeds", "layouts")
"""What a table says of a comparison and not of a run."""


def variants_of(name: str, table: Table) -> dict[str, Table]:
    """Return the configurations in a table: itself, or one for each entry of `[variants]`."""
    rest = {key: value for key, value in table.items() if key not in OWN_KEYS}
    entries = table.get("variants", {name: {}})
    if not isinstance(entries, Mapping) or not entries:
        raise WakefulError("variants must be a table with one table for each variant")
    for key, entry in entries.items():
        if not isinstance(entry, Mapping):
            raise WakefulError(f"variants.{key!r} must be a table, got {entry!r}")
        if not key or key.startswith(".") or set(key) & set("/\\\0") or key in _OWN_FILES:
            raise WakefulError(f"variants.{key!r}: a variant's name is also its folder's")
    return {key: merged(merged(rest, entry), {"name": key}) for key, entry in entries.items()}


def seeds_of(table: Table) -> list[int]:
    """Return the seeds a table asks for, one if it says nothing."""
    seeds = table.get("seeds", [0])
    if not isinstance(seeds, list) or not seeds or any(type(seed) is not int for seed in seeds):
        raise WakefulError(f"seeds must be a list of whole numbers, got {seeds!r}")
    return seeds


def layouts_of(table: Table) -> list[str]:
    """Return the published tables that a table asks the report to be laid out as."""
    layouts = table.get("layouts", [])
    if not isinstance(layouts, list) or any(not isinstance(name, str) for name in layouts):
        raise WakefulError(f"layouts must be a list of names, got {layouts!r}")
    return layouts


def compare(
    variants: Mapping[str, Config],
    path: str | Path,
    *,
    seeds: Sequence[int],
    shown: Shown,
    layouts: Sequence[str] = (),
    resume: bool = False,
) -> Run:
    """Train every variant with every seed below `path`; the first variant is the baseline.

    `layouts` names the published tables that the report sets the figures beside.

    The seed sets the initial weights, equal wherever names and shapes agree, and the data order,
    so that differences between variants are paired. `resume` goes on with a comparison that was
    interrupted: finished runs stay, unfinished ones continue.
    """
    if len(set(seeds)) != len(seeds):
        raise WakefulError(f"seeds names one twice: {list(seeds)!r}")
    comparison = Run(path)
    names = list(variants)
    facts = {"name": comparison.path.name, "baseline": names[0], "variants": names,
             "seeds": list(seeds), "layouts": list(layouts)}  # fmt: skip
    if resume:
        header = Run.open(path).header
        odd = [key for key in ("variants", "seeds") if header.get(key) != facts[key]]
        if odd:
            raise WakefulError(
                f"{path} compares other {odd[0]}: {header.get(odd[0])}, not {facts[odd[0]]}"
            )
    else:
        comparison.make("compare", facts)
    runs = {
        (name, seed): dataclasses.replace(
            config, train=dataclasses.replace(config.train, seed=seed)
        )
        for seed in seeds
        for name, config in variants.items()
    }
    places = {key: comparison.path / key[0] / f"seed-{key[1]}" for key in runs}
    begun = [key for key, place in places.items() if (place / "run.json").is_file()]
    for place in places.values():
        refuse_link(place.parent)
        refuse_link(place)
    for key in begun:
        _check_same_config(places[key], runs[key])
    comparison.set_status("running")
    try:
        for (name, seed), config in runs.items():
            place, resume = places[name, seed], (name, seed) in begun
            if resume and Run.open(place).header.get("status") == "done":
                continue
            try:
                with shown(name if len(seeds) == 1 else f"{name}, seed {seed}") as show:
                    train(config, place, resume=resume, show=show)
            except Interrupted as stopped:
                after = str(stopped).split("; continue", 1)[0]
                raise Interrupted(
                    f"{name}, seed {seed}: {after}; continue with the same command and --resume"
                ) from None
    except BaseException:
        comparison.set_status("stopped")
        raise
    comparison.set_status("done")
    return comparison


def _check_same_config(place: Path, config: Config) -> None:
    before = Run.open(place).config
    # A run knows the vocabulary of its tokenizer; a configuration may not yet.
    model = dataclasses.replace(config.model, vocab_size=before.model.vocab_size)
    if before != dataclasses.replace(config, model=model):
        raise WakefulError(
            f"{place} was begun with another configuration than it has now; restore the "
            "configuration, or choose another folder"
        )
