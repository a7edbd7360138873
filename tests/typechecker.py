"""The checker behind every annotation of the library, in tests only."""

import numpy as np
from beartype import BeartypeConf, FrozenDict, beartype

# An int where a float is asked for, and numpy's integers where an int is, are what they stand for.
check = beartype(
    conf=BeartypeConf(is_pep484_tower=True, hint_overrides=FrozenDict({int: int | np.integer}))
)
