"""One seed of an inheritance as the work of a cluster."""

import math
from dataclasses import dataclass
from pathlib import Path

from wakeful.config.tables import from_table, read_table
from wakeful.display import usual
from wakeful.growth.recipe import Recipe
from wakeful.growth.rounds import carry_out
from wakeful.loading.load import read_decoder
from wakeful.runs.run import read_windows
from wakeful.training.cluster import Call, Ended, told
from wakeful.training.validation import mean_loss


@dataclass(frozen=True)
class Seed:
    """All that one seed of an inheritance trains, as work of a cluster."""

    label: str
    place: Path
    out: Path
    """The inheritance's folder, which all machines must see."""
    number: int
    """Which of the recipe's seeds."""

    @property
    def after(self) -> tuple[str, ...]:
        """Nothing: the reference is there."""
        return ()

    @property
    def operations(self) -> float:
        """Enough for a job of its own."""
        return math.inf

    @property
    def done(self) -> bool:
        """Never known beforehand: parity decides the number of rounds. Finished runs are read."""
        return False

    @property
    def call(self) -> Call:
        """Its training, or what is left of it."""
        return train_seed, str(self.out), self.number


def train_seed(place: str, number: int) -> Ended:
    """Train one seed's heirs and baselines, or go on."""
    return told(lambda: _train_seed(Path(place), number))


def _train_seed(place: Path, number: int) -> None:
    recipe = read_recipe(place)
    name, seeded = recipe.of_seeds()[number]
    loss, _ = mean_loss(read_windows(place / "reference.parquet"))
    reference = read_decoder(recipe.reference).decoder()
    carry_out(seeded, reference, loss=loss, out=place / name, shown=usual, resume=place)


def read_recipe(place: Path) -> Recipe:
    """Return the recipe of an inheritance's folder."""
    return from_table(Recipe, read_table(place / "recipe.toml"))
