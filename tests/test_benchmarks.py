"""The benchmarks run, on shapes too small to say anything about speed."""

import math
from pathlib import Path

import pytest
import torch
from benchmarks import diagnose, gpu, optimizer, peaks, timing, waits
from benchmarks.models import CPU, GPT2, Ours, PlainGPT, Shape, random_tokens
from benchmarks.timing import compare
from transformers import LlamaConfig, LlamaForCausalLM

TINY = Shape(2, 2, 32, 64, 64, 16)


def test_a_ratio_is_the_median_of_pairs_that_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = [0.0], []

    def takes(name: str, seconds: float) -> None:
        calls.append(name)
        now[0] += seconds * len(calls)  # a machine that slows down slows both

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    row = compare("a", lambda: takes("a", 2.0), "b", lambda: takes("b", 1.0), rounds=4, warmup=0)
    assert calls == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert row.low < row.ratio < row.high
    pairs = [(2 * 1, 2), (2 * 4, 3), (2 * 5, 6), (2 * 8, 7)]
    by_hand = sorted(a / b for a, b in pairs)
    assert row.ratio == pytest.approx((by_hand[1] + by_hand[2]) / 2)


def test_the_plain_gpt_is_the_model_ours_is_compared_with() -> None:
    """With the same weights both have the same loss, so the two rows time the same function."""
    ours, plain = Ours(TINY, **GPT2), PlainGPT(TINY)
    sizes = [sum(p.numel() for p in model.parameters()) for model in (ours, plain)]
    assert sizes[0] == sizes[1]
    with torch.no_grad():
        plain.embed.weight.copy_(ours.decoder.embed.weight)
        plain.positions.weight.copy_(ours.decoder.positions.weight)
        for mine, theirs in zip(ours.decoder.blocks, plain.blocks, strict=True):
            found = dict(mine.named_parameters())
            qkv = [found[f"attention.{part}.weight"] for part in ("query", "key", "value")]
            theirs.qkv.weight.copy_(torch.cat(qkv))
            theirs.out.weight.copy_(found["attention.out.weight"])
            theirs.up.weight.copy_(found["mlp.up.weight"])
            theirs.down.weight.copy_(found["mlp.down.weight"])
    tokens = random_tokens(TINY, 2, 16)
    assert ours(tokens).item() == pytest.approx(plain(tokens).item(), abs=1e-5)


@pytest.mark.slow
def test_the_gpu_rows_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "peak_flops", lambda _device: 1e12)
    monkeypatch.setattr(torch, "compile", lambda model: model)
    rows = [
        *gpu.attention(CPU, (1, 16, 2, 16)),
        *gpu.against_plain(CPU, TINY, 2),
        *gpu.variants(CPU, "tiny", TINY, 2),
    ]
    assert len(rows) == 1 + 2 + 4
    assert all(row.ratio > 0 for row in rows)
    share = rows[2]
    assert share.ratio == pytest.approx(share.seconds / share.peer_seconds)


def test_a_steps_arithmetic_is_counted_by_hand() -> None:
    matrices = 2 * (4 * 32 * 32 + 2 * 32 * 64) + 32 * 64  # tied: the embedding is the head
    norms = 5 * 32
    wanted = 6 * 2 * 16 * (matrices + norms + 2 * 32 * 16)
    assert gpu.step_flops(Ours(TINY, **GPT2), TINY, 2) == wanted


def test_a_device_of_unknown_peak_has_no_share() -> None:
    assert math.isnan(gpu.peak_flops(CPU))


def test_bytes_of_state_are_counted_once() -> None:
    model = Ours(TINY)
    adam = torch.optim.AdamW(model.parameters())
    model(random_tokens(TINY, 1, 16)).backward()
    adam.step()
    weights = sum(p.numel() for p in model.parameters())
    steps = len(list(model.parameters()))
    assert optimizer.held_bytes(adam) == 4 * (2 * weights + steps)


def tiny_llama(max_length: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=257, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=max_length,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.mark.long
def test_peaks_are_measured_in_processes_of_their_own() -> None:
    rows = list(peaks.ratios("small"))
    assert len(rows) == 3
    assert all(row.seconds > 0 and row.peer_seconds > 0.1 for row in rows)


@pytest.mark.slow
def test_waits_are_in_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WAKEFUL_CACHE", str(tmp_path))
    rows = list(waits.ratios(("presets",), rounds=2))
    assert [row.name for row in rows] == ["wakeful presets --help", "a page about a run"]
    assert all(row.ratio == row.seconds > 0 for row in rows)


def test_long_ranks_say_how_many_are_exact() -> None:
    with torch.inference_mode():
        row = diagnose.long_ranks(tiny_llama(64), torch.randint(257, (1, 48)))
    assert "of 8 exact" in row.name
