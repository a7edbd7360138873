"""Global switches of torch that a caller has set: verbs set what they need, and give them back."""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from test_in_memory import (
    LOOKS,
    VERBS,
    Verb,
    cured,
    generated,
    llama,
    quantized,
    tokenizer,
    written,
)

import wakeful
from training.runs import text

__all__ = ["text"]


def state() -> list[Any]:
    """Return what a process shares and a function should give back."""
    return [
        torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.get_default_dtype(),
        torch.get_default_device(), torch.is_autocast_enabled("cpu"), torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(), torch.is_anomaly_enabled(),
        hash((*torch.get_rng_state().tolist(),)), hash(random.getstate()),
        hash(str(np.random.get_state())),  # noqa: NPY002 - the legacy generator's, which is global
        transformers.logging.is_progress_bar_enabled(), transformers.logging.get_verbosity(),
    ]  # fmt: skip


@contextmanager
def switched(verb: Verb) -> Iterator[None]:
    """Set all that a caller may have set, at once."""
    more = [torch.device("meta"), torch.autocast("cpu")]
    if verb in (cured, written):  # which run models themselves, on tokens that they make
        more = []
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with ExitStack() as stack:
            for each in (torch.inference_mode(), *more):
                stack.enter_context(each)
            yield
    finally:
        torch.set_default_dtype(dtype)


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_does_the_same_whatever_is_switched_and_gives_it_back(
    verb: Verb, text: Path, tmp_path: Path
) -> None:
    words, module = tokenizer(), llama()
    before = state()
    expected = verb(module, words, text, tmp_path / "plain")
    assert state() == before
    module = llama()
    with switched(verb):
        before = state()
        found = verb(module, words, text, tmp_path / "switched")
        assert state() == before
    assert found == expected


@pytest.mark.parametrize(
    "switch", [torch.inference_mode, torch.no_grad, lambda: torch.autocast("cpu")]
)
@pytest.mark.parametrize("verb", [quantized, generated])
def test_a_model_that_was_loaded_under_a_switch_is_that_model(
    verb: Verb, switch: Callable[[], Any], text: Path, tmp_path: Path
) -> None:
    expected = verb(llama(), tokenizer(), text, tmp_path)
    with switch():  # its weights are inference tensors, which autograd may not save
        assert verb(llama(), tokenizer(), text, tmp_path) == expected
        llama().save_pretrained(tmp_path / "saved")
        tokenizer().save_pretrained(tmp_path / "saved")
        model = wakeful.load(tmp_path / "saved", device="cpu")
    assert not any(each.is_inference() for each in model.module.parameters())
    assert verb(model, None, text, tmp_path) == expected or verb is quantized


def test_deterministic_algorithms_are_the_callers(text: Path) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        for verb in (wakeful.diagnose, wakeful.evaluate):
            verb(llama(), tokenizer=tokenizer(), text=str(text), **LOOKS)
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_between_two_tokens_the_switches_are_the_callers() -> None:
    with torch.inference_mode():
        pieces = wakeful.load(llama(), tokenizer=tokenizer()).stream("def ", num_tokens=4)
        next(pieces)
        assert torch.is_inference_mode_enabled()
        assert not torch.is_grad_enabled()
