"""The arms of an inheritance as the work of a cluster: each seed's heirs, and each baseline."""

from collections.abc import Iterator
from pathlib import Path

from wakeful.config.tables import from_table, read_table
from wakeful.display import usual
from wakeful.heirs.recipe import Recipe
from wakeful.heirs.rounds import Seed
from wakeful.loading.load import read_decoder
from wakeful.runs.run import read_windows
from wakeful.training.cluster import Ended, Work, ended_of
from wakeful.training.validation import mean_loss


def arms_of(recipe: Recipe, out: Path) -> Iterator[Work]:
    """Give every seed's heirs, then its baselines, whose runs lie below `out`.

    These wait where several heirs are trained: the last one's depth and steps decide theirs. When
    any of them is done is not known beforehand: parity decides the number of rounds. What any arm
    of a seed saves counts as a step forward.
    """
    for number, (name, seeded) in enumerate(recipe.of_seeds()):
        seed, place = f"seed {seeded.train.seed}", out / name
        heirs = f"{seed}, heirs" if recipe.most_heirs > 1 else f"{seed}, heir"
        yield Work(heirs, place, (train_arm, str(out), number, ""), said=False)
        after = (heirs,) if recipe.most_heirs > 1 else ()
        for baseline in recipe.baselines:
            call = train_arm, str(out), number, baseline
            yield Work(f"{seed}, {baseline}", place, call, after, said=False)


def train_arm(place: str, number: int, baseline: str) -> Ended:
    """Train one seed's heirs or one of its baselines, or go on."""

    def work() -> None:
        out = Path(place)
        recipe = read_recipe(out)
        name, seeded = recipe.of_seeds()[number]
        loss, _ = mean_loss(read_windows(out / "reference.parquet"))
        reference = read_decoder(recipe.reference).decoder()
        Seed(seeded, reference, loss, out / name, usual, out).train_arm(baseline)

    return ended_of(work)


def read_recipe(place: Path) -> Recipe:
    """Return the recipe of an inheritance's folder."""
    return from_table(Recipe, read_table(place / "recipe.toml"))
