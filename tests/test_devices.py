"""Main paths on the stand-in for a GPU: none mixes devices, hands its tensors to numpy, or asks for
what CUDA lacks; results are the CPU's.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from devices import GPU, OnGpu, stand_in_gpu
from evaluation.models import loaded_llama
from helpers import some_tokens, tiny_decoder
from training.runs import text, tiny
from wakeful import surgery
from wakeful.config.schema import BridgeConfig, DistillConfig
from wakeful.curing import search as choosing
from wakeful.diagnosis.measure import diagnose_model
from wakeful.inheritance.blocks import inherit_blocks
from wakeful.inheritance.bridge import bridge
from wakeful.inheritance.layers import LayerMap, diagnose_layers
from wakeful.loading.model import Model
from wakeful.model.decoder import Decoder
from wakeful.model.generate import generate_tokens
from wakeful.quantization import parse_scheme, quantize_module
from wakeful.quantization.measure import measure_damage
from wakeful.quantization.sensitivity import measure_layer_costs
from wakeful.training.distillation import Distillation
from wakeful.training.loop import train_run

__all__ = ["text"]
W8A8 = "weights=absmax(bits=8, per='channel'), inputs=absmax(bits=8, per='token')"
TOKENS = some_tokens(4, 12)


@pytest.fixture(autouse=True)
def gpu(as_users_run_it: None) -> Iterator[None]:
    with stand_in_gpu():
        yield


def decoder(**over: Any) -> Decoder:
    return tiny_decoder(**{"dtype": torch.float32, "num_layers": 2} | over).eval()


def same(do: Callable[[Decoder], Any], **over: Any) -> None:
    """Assert that what is done to a decoder on the GPU gives what it gives on the CPU."""
    expected, found = do(decoder(**over)), do(decoder(**over).to(GPU))
    for one, other in zip(_parts(expected), _parts(found), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)


def _parts(found: Any) -> list[Any]:
    if isinstance(found, Decoder):
        weight = found.embed.weight
        assert all(isinstance(p, OnGpu) == isinstance(weight, OnGpu) for p in found.parameters())
        with torch.no_grad():
            return [found(TOKENS.to(weight.device)).cpu()]
    if isinstance(found, Tensor):
        return [found.cpu()]
    return list(found) if isinstance(found, list | tuple) else [found]


def here(model: torch.nn.Module, tokens: Tensor = TOKENS) -> Tensor:
    return tokens.to(next(model.parameters()).device)


def test_the_stand_in_refuses_what_a_gpu_does() -> None:
    x = torch.ones(3, 8, device=GPU)
    assert (x.device, (x * torch.tensor(2.0)).device, x.cpu().device.type) == (GPU, GPU, "cpu")
    assert x[torch.tensor([0])].shape == (1, 8)
    number = x[:, 0].long()
    for refused in (
        x.numpy, lambda: x + torch.ones(8), lambda: torch.ones(3)[number],
        lambda: torch.ones(8).add_(x[0]), lambda: torch.cat([x, torch.ones(1, 8)]),
        lambda: torch.ones(3).scatter(0, number, 1), lambda: number[None] @ number[:, None],
        lambda: torch.rand(3, generator=torch.Generator(), device=GPU),
        lambda: torch._int_mm(x.char(), x.char().T),
    ):  # fmt: skip
        with pytest.raises((RuntimeError, TypeError, NotImplementedError)):
            refused()


@pytest.mark.parametrize("over", [{}, {"route": "svformer"}, {"normalizer": "softmax1"}])
def test_generation(over: dict[str, str]) -> None:
    same(lambda m: list(generate_tokens(m, [1, 2, 3], num_tokens=5, top_p=0.9)), **over)


SCHEMES = [
    "w4", "nvfp4", "coarse static", f"scheme({W8A8}, cache=absmax(bits=4, per='tensor'))",
    "scheme(weights=absmax(bits=4, per='channel', group=8), method=gptq)",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantization(scheme: str) -> None:
    static = scheme.endswith(" static")
    parsed = parse_scheme(scheme.removesuffix(" static"), "static" if static else "dynamic")

    def do(model: Decoder) -> Decoder:
        text = [row[None] for row in here(model)]
        small = quantize_module(model, parsed, calibration=text if parsed.calibrated else ())
        assert isinstance(small, Decoder)
        return small

    same(do)


@pytest.mark.long
def test_damage_and_what_each_layer_costs() -> None:
    def do(model: Decoder) -> list[float]:
        small, rows = quantize_module(model, "w4"), [row[None] for row in here(model)]
        damage = measure_damage("tiny", model, {"w4": small}, rows)
        alone = sorted(measure_layer_costs(model, small, rows), key=lambda each: each.name)
        return [*damage.loss_increase("w4"), *(x for each in alone for x in each.alone)]

    same(do)


OPERATIONS: dict[str, Callable[[Decoder, Tensor], Any]] = {
    "rotate": lambda m, t: surgery.rotate(m, "haar"),
    "keys": lambda m, t: surgery.rotate_keys(m),
    "prefix": lambda m, t: surgery.store_prefix(m, [3]),
    "sinks": lambda m, t: surgery.learned_sinks(m, 3, t),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_cures(name: str) -> None:
    same(lambda m: OPERATIONS[name](m, here(m)))


@pytest.mark.long
def test_choosing(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = some_tokens(choosing.SearchTexts.num_rows, 6)
    monkeypatch.setattr(choosing, "CLIPS", (0.9,))

    def do(model: Decoder) -> list[float]:
        texts = choosing.SearchTexts.split(here(model, rows))
        found = choosing.choose_cure(model, [parse_scheme(f"scheme({W8A8})")], texts, token=3)
        return [trial.damage[0] for trials in found.trials for trial in trials]

    same(do)


@pytest.mark.parametrize("map", ["down", "output"])
def test_inheriting(map: str) -> None:
    def do(model: Decoder) -> Decoder:
        layers = LayerMap((0, 3), "named")
        heir = inherit_blocks(model, layers)
        bridge(heir, model, layers, TOKENS, BridgeConfig(map=map))
        return heir

    same(do, num_layers=4)


@pytest.mark.slow
def test_choosing_layers() -> None:
    same(lambda m: diagnose_layers(m, TOKENS.tolist())[0])


@pytest.mark.slow
def test_diagnoses(tmp_path: Path) -> None:
    llama = loaded_llama(tmp_path, dtype=torch.float32)
    of_llama = [values_of(llama)]
    llama.module.to(GPU)
    assert values_of(llama) == pytest.approx(of_llama[0], rel=1e-3, abs=1e-4)
    same(
        lambda m: values_of(dataclasses.replace(llama, module=m)),
        normalizer="softmax1(learned=True)",
    )


def values_of(loaded: Model) -> list[float]:
    return diagnose_model(loaded, TOKENS.tolist()).rows["value"].to_list()


def test_teachers() -> None:
    def do(model: Decoder) -> list[float]:
        student = copy.deepcopy(model)
        inputs, targets = here(model)[:, :-1], here(model)[:, 1:]
        lesson = DistillConfig(teacher="x")
        loss = Distillation(student, model, lesson).loss(inputs, targets)
        loss.backward()
        return [float(loss.detach())]

    same(do)


RUNS: dict[str, dict[str, Any]] = {
    **{name: {"optimizer": {"name": name}} for name in ("adamw", "muon")},
    "eigenbasis": {"optimizer": {"name": "orthoadam", "rotation": "eigenbasis"}},
    "micro-batches": {
        "train": {"micro_batch_size": 2, "diagnose": {"every": 4}},
        "data": {"cross_documents": False},
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_is_gone_on_with(name: str, text: Path, tmp_path: Path) -> None:
    run = train_run(tiny(text, **RUNS[name]), tmp_path / "run")
    more = train_run(run.config, run.path, resume=True, steps=10)
    assert more.config.train.steps == 10
