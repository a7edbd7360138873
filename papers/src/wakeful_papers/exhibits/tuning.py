"""The learning rate of every row, chosen by one rule before an exhibit is trained."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from wakeful.config.schema import Config, DiagnoseConfig, QuantizeConfig


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """Every row tries the same multiples of its rate, for a share of its steps, with one seed.

    The multiple with the lowest validation loss is taken. Where that is the least or the largest
    tried, the grid goes on there by its own ratio, at most `beyond` times; an edge that is the best
    even then is taken. The seed is none of those that are judged.
    """

    multiples: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0)
    steps: float = 0.25
    """Share of a row's steps."""
    seed: int = 1000
    beyond: int = 2

    def left(self, losses: Mapping[float, float]) -> tuple[float, ...]:
        """Return the multiples still to be tried, given the losses of those that were."""
        if missing := tuple(each for each in self.multiples if each not in losses):
            return missing
        best, tried = best_rate(losses), sorted(losses)
        if best not in (tried[0], tried[-1]) or len(tried) >= len(self.multiples) + self.beyond:
            return ()
        ratio = self.multiples[1] / self.multiples[0]
        return (best / ratio if best == tried[0] else best * ratio,)

    def trial(self, config: Config, multiple: float) -> Config:
        """Return the configuration of one trial, which is looked at by its loss alone."""
        steps = max(2, round(self.steps * config.train.steps))
        train = dataclasses.replace(
            config.train, steps=steps, eval_every=0, checkpoint_every=0,
            diagnose=DiagnoseConfig(), quantize=QuantizeConfig(),
        )  # fmt: skip
        warmup = min(config.optimizer.warmup_steps, steps // 5)
        optimizer = dataclasses.replace(config.optimizer, warmup_steps=warmup)
        return at_rate(dataclasses.replace(config, train=train, optimizer=optimizer), multiple)


def best_rate(losses: Mapping[float, float]) -> float:
    """Return the multiple of the lowest loss, of equal ones the smallest; infinite is diverged."""
    return min(losses, key=lambda each: (losses[each], each))


def at_rate(config: Config, multiple: float) -> Config:
    """Return a configuration with its rate, its last and its first one multiplied."""
    own = config.optimizer
    rates = {name: multiple * getattr(own, name) for name in ("lr", "final_lr", "initial_lr")}
    return dataclasses.replace(config, optimizer=dataclasses.replace(own, **rates))
