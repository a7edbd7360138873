"""What calibration text shows of layers, of several processes that each read a share of it."""

from collections.abc import Mapping

import torch

from wakeful.quant.schemes.seen import Seen
from wakeful.world import World


def merge(found: Mapping[str, Seen], world: World) -> None:
    """Let every process have seen what all of them have: largest values, and sums in float64.

    Raises:
        WakefulError: one of them saw layers that another did not.
    """
    if world.size == 1:
        return
    world.check_same(
        list(found),
        "calibration text reaches other layers in one process than in another: give more "
        "--calibration_sequences, or start fewer processes",
    )
    merged: set[int] = set()
    for seen in found.values():
        seen.outputs = float(world.most(torch.tensor(seen.outputs, dtype=torch.float64)))
        # Layers that read one tensor share what is seen of it, but for products of their own.
        if id(seen.channels) not in merged:
            merged.add(id(seen.channels))
            seen.channels.copy_(world.most(seen.channels))
            seen.sums.copy_(world.sum(seen.sums.double()))
        if seen.products is not None and id(seen.products) not in merged:
            merged.add(id(seen.products))
            seen.products.copy_(world.sum(seen.products.double()))
