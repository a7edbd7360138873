"""A rule that chooses the learning rate of every row before an exhibit is trained."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from wakeful.config.schema import Config, DiagnoseConfig, QuantizeConfig


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The rule: every row tries the same multiples of its rate for a share of its steps.

    The multiple with the lowest validation loss is chosen. If it is the smallest or the largest
    multiple, the grid is extended on that side by its own ratio, at most `beyond` times; after that
    the best multiple is chosen even at an edge. Trials have one seed, which is not a judged one.
    """

    multiples: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0)
    steps: float = 0.25
    """Share of a row's steps."""
    seed: int = 1000
    beyond: int = 2

    def remaining_multiples(self, losses: Mapping[float, float]) -> tuple[float, ...]:
        """Return the multiples still to be tried, given the losses of the trials so far."""
        if missing := tuple(multiple for multiple in self.multiples if multiple not in losses):
            return missing
        best, grid = best_rate(losses), sorted(losses)
        if best not in (grid[0], grid[-1]) or len(grid) >= len(self.multiples) + self.beyond:
            return ()
        ratio = self.multiples[1] / self.multiples[0]
        return (best / ratio if best == grid[0] else best * ratio,)

    def trial_config(self, config: Config, multiple: float) -> Config:
        """Return the configuration of a trial, of which only the loss is measured."""
        steps = max(2, round(self.steps * config.train.steps))
        train = dataclasses.replace(
            config.train, steps=steps, eval_every=0, checkpoint_every=0,
            diagnose=DiagnoseConfig(), quantize=QuantizeConfig(),
        )  # fmt: skip
        warmup = min(config.optimizer.warmup_steps, steps // 5)
        optimizer = dataclasses.replace(config.optimizer, warmup_steps=warmup)
        trial = dataclasses.replace(config, train=train, optimizer=optimizer)
        return multiply_rates(trial, multiple)


def best_rate(losses: Mapping[float, float]) -> float:
    """Return the key of the lowest loss, the smallest of several; diverged runs have loss inf."""
    return min(losses, key=lambda rate: (losses[rate], rate))


def multiply_rates(config: Config, multiple: float) -> Config:
    """Return a configuration with its learning rate, also the initial and final one, multiplied."""
    optimizer = config.optimizer
    rates = {key: multiple * getattr(optimizer, key) for key in ("lr", "final_lr", "initial_lr")}
    return dataclasses.replace(config, optimizer=dataclasses.replace(optimizer, **rates))
