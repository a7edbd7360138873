"""The arms of an inheritance as the work of a cluster: each seed's heirs, and each baseline."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from wakeful.config.tables import from_table, read_table
from wakeful.display import usual
from wakeful.heirs.recipe import Recipe
from wakeful.heirs.rounds import Seed
from wakeful.loading.load import read_decoder
from wakeful.runs.run import read_windows
from wakeful.training.cluster import Call, Ended, ended_of
from wakeful.training.validation import mean_loss


@dataclass(frozen=True)
class ArmWork:
    """The heirs of one seed, or one of its baselines."""

    label: str
    place: Path
    """The seed's folder: what any of its arms saves counts as a step forward."""
    out: Path
    """The inheritance's folder, which all machines must see."""
    number: int
    """Which of the recipe's seeds."""
    baseline: str = ""
    """Its name; empty of the heirs."""
    after: tuple[str, ...] = ()
    operations: float = math.inf
    """Enough for a job of its own."""
    done: bool = False
    """Never known beforehand: parity decides the number of rounds. Finished runs are read."""

    @property
    def call(self) -> Call:
        """Its training, or what is left of it."""
        return train_arm, str(self.out), self.number, self.baseline


def arms_of(recipe: Recipe, out: Path) -> Iterator[ArmWork]:
    """Give every seed's heirs, then its baselines.

    These wait where several heirs are trained: the last one's depth and steps decide theirs.
    """
    for number, (name, seeded) in enumerate(recipe.of_seeds()):
        seed, place = f"seed {seeded.train.seed}", out / name
        heirs = f"{seed}, heirs" if recipe.most_heirs > 1 else f"{seed}, heir"
        yield ArmWork(heirs, place, out, number)
        after = (heirs,) if recipe.most_heirs > 1 else ()
        for baseline in recipe.baselines:
            yield ArmWork(f"{seed}, {baseline}", place, out, number, baseline, after)


def train_arm(place: str, number: int, baseline: str) -> Ended:
    """Train one seed's heirs or one of its baselines, or go on."""
    return ended_of(lambda: _train_arm(Path(place), number, baseline))


def _train_arm(place: Path, number: int, baseline: str) -> None:
    recipe = read_recipe(place)
    name, seeded = recipe.of_seeds()[number]
    loss, _ = mean_loss(read_windows(place / "reference.parquet"))
    reference, out = read_decoder(recipe.reference).decoder(), place / name
    seed = Seed(seeded, reference, loss, out, usual, place)
    if baseline:
        seed.train_baseline(baseline)
    else:
        seed.train_heirs()


def read_recipe(place: Path) -> Recipe:
    """Return the recipe of an inheritance's folder."""
    return from_table(Recipe, read_table(place / "recipe.toml"))
