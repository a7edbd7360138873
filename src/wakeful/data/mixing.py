"""Sixty-four random-looking bits from a key: the same on every machine and in every version."""

import hashlib

import numpy as np


def key64(purpose: str, *numbers: int) -> int:
    """A 64-bit key for a purpose and some numbers (a seed, an epoch), far from any other's."""
    text = ":".join([purpose, *(str(int(number)) for number in numbers)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def mix64(values: np.ndarray, key: int) -> np.ndarray:
    """The finaliser of SplitMix64 over (`values` + `key`): a bijection of uint64, elementwise.

    Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014).
    `values` must be an array of uint64: NumPy warns of overflow for scalars, and wraps for arrays.
    """
    mixed = values + np.uint64(key)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed
