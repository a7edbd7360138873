"""Matching: a student comes nearer to its teacher, the same way each time."""

import copy
import math
from functools import partial

import pytest
import torch

from helpers import some_tokens, tiny_decoder
from wakeful.curing.matching import Matching, match, teacher_divergence
from wakeful.model.decoder import Decoder
from wakeful.surgery import learned_sinks, store_prefix

PLAN = Matching(steps=30, batch_size=4, length=8, lr=3e-3)


def pair():
    plain = tiny_decoder(dtype=torch.float32)
    text = some_tokens(1, 400)[0]
    student = copy.deepcopy(learned_sinks(plain, 3, text[:64].view(4, 16)))
    return student, store_prefix(plain, [3]), text


def note(seen: list[tuple[int, int]], done: int, total: int) -> None:
    seen.append((done, total))


@pytest.mark.slow
def test_the_divergence_falls_and_the_losses_are_the_same_each_time() -> None:
    runs = []
    for _ in range(2):
        student, teacher, text = pair()
        held = some_tokens(4, 8, seed=9)
        before, taught = (
            teacher_divergence(student, teacher, held),
            copy.deepcopy(teacher.state_dict()),
        )
        seen: list[tuple[int, int]] = []
        losses = match(student, teacher, text, PLAN, on_progress=partial(note, seen))
        assert teacher_divergence(student, teacher, held) < 0.9 * before
        assert seen == [(step, 30) for step in range(31)]
        assert all(torch.equal(taught[name], now) for name, now in teacher.state_dict().items())
        assert not student.training
        assert not any(p.requires_grad or p.grad is not None for p in student.parameters())
        runs.append(losses)
    assert runs[0] == runs[1]
    assert len(runs[0]) == 30


@pytest.mark.slow
def test_fast_parameters_move_further() -> None:
    student, teacher, text = pair()
    sinks = [p for name, p in student.named_parameters() if name.endswith("log_sinks")]
    before = [p.clone() for p in sinks]
    plan = Matching(steps=1, batch_size=2, length=8, lr=1e-4)
    match(student, teacher, text, plan, fast=sinks, speed=100.0)
    moved = torch.cat([(p - old).abs() for p, old in zip(sinks, before, strict=True)])
    assert moved.max().item() == pytest.approx(100 * 1e-4, rel=0.01)  # Adam's first step


@pytest.mark.slow
@pytest.mark.parametrize(("length", "short"), [(24, 3), (15, 2), (9, 2)])
def test_every_other_batch_is_of_eight_times_as_many_short_sequences(
    length: int, short: int
) -> None:
    student, teacher, text = tiny_decoder(seed=2), tiny_decoder(seed=1), some_tokens(1, 400)[0]
    seen: list[tuple[int, ...]] = []
    student.register_forward_pre_hook(lambda _, args: seen.append(tuple(args[0].shape)))
    match(student, teacher, text, Matching(steps=4, batch_size=3, length=length, lr=1e-3))
    assert seen == [(24, short), (3, length)] * 2


def states(decoder: Decoder, tokens: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the logits, and the stream behind every layer."""
    seen: list[torch.Tensor] = []
    hooks = [
        block.register_forward_hook(lambda _, __, out: seen.append(out[0]))
        for block in decoder.blocks
    ]
    logits = decoder(tokens)
    for hook in hooks:
        hook.remove()
    return logits, seen


def by_hand(
    student: Decoder, teacher: Decoder, text: torch.Tensor, rates: list[float], fast: str
) -> tuple[list[float], list[float]]:
    """Train with Adam written out, `fast` at thrice the rate; return losses, and gradients' norms.

    Two sequences of 9 tokens a step, in even steps sixteen of 2.
    """
    student.requires_grad_(True)
    names, parameters = zip(*student.named_parameters(), strict=True)
    first, second = ([torch.zeros_like(p) for p in parameters] for _ in range(2))
    generator = torch.Generator().manual_seed(5)
    losses, norms = [], []
    for step, rate in enumerate(rates):
        count, length = (2, 9) if step % 2 else (16, 2)
        starts = torch.randint(len(text) - length + 1, (count, 1), generator=generator)
        tokens = torch.stack([text[start : start + length] for start in starts.flatten().tolist()])
        with torch.no_grad():
            expected, wanted = states(teacher, tokens)
        actual, found = states(student, tokens)
        message, guessed = expected.softmax(-1), actual.softmax(-1)
        loss = (message * (message / guessed).log()).sum(-1).mean()
        for x, y in zip(found, wanted, strict=True):
            loss = loss + ((x - y).norm(dim=-1) / y.norm(dim=-1)).square().mean() / len(found)
        slopes = torch.autograd.grad(loss, parameters)
        norm = math.sqrt(sum(float(slope.square().sum()) for slope in slopes))
        for name, p, m, v, slope in zip(names, parameters, first, second, slopes, strict=True):
            clipped = slope * min(1.0, 1 / (norm + 1e-6))
            m.mul_(0.9).add_(0.1 * clipped)
            v.mul_(0.95).add_(0.05 * clipped.square())
            mean, square = m / (1 - 0.9 ** (step + 1)), v / (1 - 0.95 ** (step + 1))
            p.data.sub_(rate * (3 if name == fast else 1) * mean / (square.sqrt() + 1e-8))
        losses.append(loss.item())
        norms.append(norm)
    return losses, norms


@pytest.mark.slow
def test_a_run_is_its_definition() -> None:
    """A tenth of the steps up to the rate, from a tenth of it, and half a cosine down."""
    options = {"num_layers": 2, "noise": 0.05}
    student, teacher = tiny_decoder(seed=2, **options), tiny_decoder(seed=1, **options)
    text, again = some_tokens(1, 400)[0], copy.deepcopy(student)
    fast = "blocks.1.mlp.down.weight"
    plan = Matching(steps=15, batch_size=2, length=9, lr=2e-2, seed=5)
    losses = match(student, teacher, text, plan, fast=[student.get_parameter(fast)], speed=3.0)
    rates = [2e-3, 1.1e-2] + [1e-2 * (1 + math.cos(math.pi * n / 13)) for n in range(13)]
    expected, norms = by_hand(again, teacher, text, rates, fast)
    assert max(norms) > 1.1 * min(norms) > 1.1  # all are clipped, by different factors
    assert losses == pytest.approx(expected, rel=1e-9)
    for name, parameter in again.named_parameters():
        torch.testing.assert_close(student.get_parameter(name), parameter, rtol=0, atol=1e-10)


@pytest.mark.slow
def test_a_teacher_is_its_own_equal() -> None:
    _, teacher, _ = pair()
    assert teacher_divergence(teacher, teacher, some_tokens(2, 8)) == pytest.approx(0, abs=1e-6)
