"""Matching: a student comes nearer to its teacher, the same way each time."""

import copy
from functools import partial

import pytest
import torch

from helpers import some_tokens, tiny_decoder
from wakeful.surgery import learned_sinks, store_prefix
from wakeful.training.matching import Matching, divergence, match

PLAN = Matching(steps=30, batch_size=4, length=8, lr=3e-3)


def pair():
    plain = tiny_decoder(dtype=torch.float32)
    text = some_tokens(1, 400)[0]
    student = copy.deepcopy(learned_sinks(plain, 3, text[:64].view(4, 16)))
    return student, store_prefix(plain, [3]), text


def note(seen: list[tuple[int, int]], done: int, total: int) -> None:
    seen.append((done, total))


def test_the_divergence_falls_and_the_losses_are_the_same_each_time() -> None:
    runs = []
    for _ in range(2):
        student, teacher, text = pair()
        held = some_tokens(4, 8, seed=9)
        before, taught = divergence(student, teacher, held), copy.deepcopy(teacher.state_dict())
        seen: list[tuple[int, int]] = []
        losses = match(student, teacher, text, PLAN, progress=partial(note, seen))
        assert divergence(student, teacher, held) < 0.9 * before
        assert seen == [(step, 30) for step in range(31)]
        assert all(torch.equal(taught[name], now) for name, now in teacher.state_dict().items())
        assert not student.training
        assert not any(p.requires_grad or p.grad is not None for p in student.parameters())
        runs.append(losses)
    assert runs[0] == runs[1]
    assert len(runs[0]) == 30


def test_fast_parameters_move_further() -> None:
    student, teacher, text = pair()
    sinks = [p for name, p in student.named_parameters() if name.endswith("log_sinks")]
    before = [p.clone() for p in sinks]
    plan = Matching(steps=1, batch_size=2, length=8, lr=1e-4)
    match(student, teacher, text, plan, fast=sinks, speed=100.0)
    moved = torch.cat([(p - old).abs() for p, old in zip(sinks, before, strict=True)])
    assert moved.max().item() == pytest.approx(100 * 1e-4, rel=0.01)  # Adam's first step


def test_a_teacher_is_its_own_equal() -> None:
    _, teacher, _ = pair()
    assert divergence(teacher, teacher, some_tokens(2, 8)) == pytest.approx(0, abs=1e-6)
