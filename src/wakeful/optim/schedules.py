"""Learning rates over a run."""

import math


def warmup_cosine(
    step: int, *, steps: int, warmup_steps: int, initial: float, peak: float, final: float
) -> float:
    """Return the learning rate of a step, counted from 0.

    A straight line from `initial` to `peak` over `warmup_steps`, then half a cosine down to
    `final`, which the last step reaches.
    """
    if step < warmup_steps:
        return initial + (peak - initial) * step / warmup_steps
    progress = (step - warmup_steps) / max(1, steps - 1 - warmup_steps)
    return final + (peak - final) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
