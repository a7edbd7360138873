"""Several models, loaded one after another, so that one at a time is in memory."""

from collections.abc import Iterator, Sequence

import torch

from wakeful.display import Display
from wakeful.errors import WakefulError
from wakeful.loading.load import Loaded, load
from wakeful.world import World


def load_each(
    models: Sequence[str],
    *,
    device: torch.device,
    dtype: torch.dtype,
    trust_remote_code: bool,
    show: Display,
    world: World,
) -> Iterator[Loaded]:
    """Load models in turn; who takes one must let go of it before asking for the next.

    Of several processes the first loads before the others, so that what is fetched is fetched once.

    Raises:
        WakefulError: what `load` raises, or two models have one name.
    """
    names: set[str] = set()
    for source in models:
        show.note(f"loading {source}")
        loaded = world.leader_first(
            lambda source=source: load(
                source, device=device, dtype=dtype, trust_remote_code=trust_remote_code
            )
        )
        if loaded.name in names:
            raise WakefulError(f"two models are called {loaded.name!r}; rename one")
        names.add(loaded.name)
        yield loaded
        del loaded
