"""The checker of the other tests: what it refuses, and that users run without it."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import Float
from torch import Tensor

from typechecker import checked
from wakeful.norms.rms import rms_norm


@checked
def product(x: Float[Tensor, "B D"], w: Float[Tensor, "D C"]) -> Float[Tensor, "B C"]:
    return x @ w if len(x) > 1 else x @ w.repeat(1, 2)


@checked
def named(x: "list[Absent]", k: "float | None" = None) -> "list[Tensor]":  # noqa: F821 - that it is missing is the test
    return x


@checked
@dataclass
class Record:
    number: int


def test_a_letter_is_one_length_in_all_shapes_of_a_call() -> None:
    assert product(torch.ones(2, 3), torch.ones(3, 4)).shape == (2, 4)
    for x, w in ((torch.ones(2, 3), torch.ones(5, 4)), (torch.ones(3), torch.ones(3, 4))):
        with pytest.raises(BeartypeCallHintViolation):
            product(x, w)
    with pytest.raises(BeartypeCallHintViolation, match="return"):
        product(torch.ones(1, 3), torch.ones(3, 4))
    with pytest.raises(BeartypeCallHintViolation):
        product(torch.ones(2, 3, dtype=torch.long), torch.ones(3, 4))


def test_types_are_checked_with_names_that_nobody_imports() -> None:
    tensors = [torch.ones(1)]
    assert named(tensors, k=1) is tensors
    with pytest.raises(BeartypeCallHintViolation, match="k="):
        named(tensors, k="one")
    with pytest.raises(BeartypeCallHintViolation, match="return"):
        named([3])
    assert Record(np.int64(3)).number == 3
    with pytest.raises(BeartypeCallHintViolation):
        Record("three")


def test_the_library_is_checked() -> None:
    with pytest.raises(BeartypeCallHintViolation):
        rms_norm("x", None, 1e-6)  # pyright: ignore


@pytest.mark.usefixtures("as_users_run_it")
def test_as_users_run_it_nothing_is_checked() -> None:
    assert named([3], k="one") == [3]
