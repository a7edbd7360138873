"""What OrthoAdam adds to a whole training step, against fused AdamW and pytorch-optimizer's SOAP.

One model of the papers' 82M shape (8 layers, width 512, SwiGLU 1792, 8 heads, vocabulary 50,277,
untied) on random tokens. Each round makes one forward and backward, then every optimizer takes its
steps on those gradients, in an order that changes from round to round; a whole step is forward +
backward + the optimizer's mean step. What SOAP does every tenth step counts by a tenth.
"""

import statistics
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from benchmarks.models import CPU, Ours, Shape, random_tokens
from benchmarks.timing import Ratio, seconds
from wakeful.optim import OrthoAdam, decay_groups

SHAPE = Shape(8, 8, 512, 1792, 50_277, 512)
BATCH = 8
ROTATIONS: Mapping[str, str] = {
    "identity": "", "hadamard": "<= 1.05", "block_diagonal": "", "haar": "<= 1.10",
    "eigenbasis": "",
}  # fmt: skip
FUSED, SOAP = "fused AdamW", "SOAP"
PERIOD = 10
"""SOAP and the eigenbasis turn their bases every tenth step."""
Contenders = dict[str, torch.optim.Optimizer]


def ratios(
    shape: Shape = SHAPE,
    batch: int = BATCH,
    *,
    device: torch.device = CPU,
    bfloat16: bool = False,
    rounds: int = 5,
) -> Iterator[Ratio]:
    """Yield whole steps over fused AdamW's and SOAP's, then the bytes of state over AdamW's."""
    model = Ours(shape).to(device)
    optimizers = _optimizers(list(model.named_parameters()))
    tokens = random_tokens(shape, batch, shape.max_length, device)
    passes: list[float] = []
    halves: list[float] = []
    few = tokens[: batch // 2]
    steps: dict[str, list[float]] = {name: [] for name in optimizers}
    _backward(model, tokens, bfloat16)
    for _ in range(2):  # state is made, kernels are compiled
        for optimizer in optimizers.values():
            optimizer.step()
    for number in range(rounds):
        halves.append(seconds(lambda: _backward(model, few, bfloat16)))
        passes.append(seconds(lambda: _backward(model, tokens, bfloat16)))
        names = list(optimizers)
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            count = PERIOD if name in (SOAP, "eigenbasis") else 2
            took = seconds(lambda name=name, count=count: _step(optimizers[name], count))
            steps[name].append(took / count)
    for name, target in ROTATIONS.items():
        yield _whole_step(name, FUSED, passes, steps, target)
    for name in ("hadamard", "haar"):  # a step's optimizer costs the same whatever the batch is
        label = f"{name}, {few.numel():,} tokens"
        yield _whole_step(name, FUSED, halves, steps, "<= 1.10", label)
    for name in ("hadamard", "eigenbasis"):
        yield _whole_step(name, SOAP, passes, steps, "<= 1.00")
    base = held_bytes(optimizers[FUSED])
    for name in ("hadamard", "haar", SOAP):
        size = held_bytes(optimizers[name])
        label = name if name == SOAP else f"OrthoAdam, {name}"
        target = "<= 1.05" if name == "hadamard" else ""
        ratio = size / base
        yield Ratio(f"{label}, bytes of state", FUSED, ratio, ratio, ratio, size, base, target)


def held_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of state and, for OrthoAdam, of its rotations' tensors, each tensor counted once."""
    tensors = [t for state in optimizer.state.values() for t in _tensors(state)]
    if isinstance(optimizer, OrthoAdam):
        for rotation in optimizer.rotations():
            tensors += _tensors(vars(rotation))
    stores = {t.data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(stores.values())


def _tensors(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _optimizers(named: list[tuple[str, torch.nn.Parameter]]) -> Contenders:
    from pytorch_optimizer import SOAP as Soap

    def groups() -> list[dict[str, object]]:
        return decay_groups(named, weight_decay=0.1)

    plain = [{**g, "params": [p for _, p in g["params"]]} for g in groups()]  # pyright: ignore[reportGeneralTypeIssues]
    return {
        FUSED: torch.optim.AdamW(groups(), lr=1e-5, fused=True),
        SOAP: Soap(plain, lr=1e-5, precondition_frequency=PERIOD),
        **{name: OrthoAdam(groups(), lr=1e-5, rotation=name) for name in ROTATIONS},
    }


def _backward(model: torch.nn.Module, tokens: Tensor, bfloat16: bool) -> None:
    model.zero_grad()
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=bfloat16):
        loss = model(tokens)
    loss.backward()


def _step(optimizer: torch.optim.Optimizer, count: int) -> None:
    for _ in range(count):
        optimizer.step()


def _whole_step(
    name: str, peer: str, passes: list[float], steps: Mapping[str, list[float]], target: str,
    label: str = "",
) -> Ratio:  # fmt: skip
    ours = [a + b for a, b in zip(passes, steps[name], strict=True)]
    theirs = [a + b for a, b in zip(passes, steps[peer], strict=True)]
    found = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, _, high = statistics.quantiles(found, n=4)
    return Ratio(
        f"OrthoAdam, {label or name}, whole step", peer, statistics.median(found), low, high,
        statistics.median(ours), statistics.median(theirs), target,
    )  # fmt: skip
