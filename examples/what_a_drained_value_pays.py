"""What does a sink's drained value pay? The loss with the first token's value changed.

    wakeful compare patient --only vanilla softmax1 large-sink --out runs/patient
    python examples/what_a_drained_value_pays.py runs/patient/*/seed-*

A head that parks its attention on the first token learns to give that token a small value. Here it
is made zero in every layer, and as long as the other tokens' values are on average; the loss of 64
validation windows says what either costs. Without arguments it is a patient of a few steps, in
which no sink has grown yet.
"""

import sys

import torch
from torch import Tensor
from torch.nn import functional as F

import wakeful
from wakeful.data.preparing import load_data
from wakeful.runs.run import Run
from wakeful.training.watching import window_rows

TASK = {"data": {"source": "backcopy"}, "train": {"steps": 3}}


def main(*runs: str) -> None:
    for path in runs or [wakeful.train("cpu-tiny", out="runs/ill", **TASK).path]:
        config = Run.open(path).config
        rows = [*window_rows(load_data(config.data).windows(config), 64)]
        whole, zero, long = (loss(path, rows, length) for length in (None, 0, 1))
        print(f"{path}: loss {whole:.3f}; first value at zero {zero - whole:+.3f}, as long as the")
        print(f"  others' {long - whole:+.3f}")


@torch.no_grad()
def loss(path: str, rows: list[tuple[Tensor, Tensor]], length: int | None) -> float:
    def change(_: object, given: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        q, k, v = given  # (batch, tokens, heads, width)
        others = v[:, 1:].norm(dim=-1, keepdim=True).mean(1, keepdim=True)
        return q, k, torch.cat([F.normalize(v[:, :1], dim=-1) * others * length, v[:, 1:]], 1)

    decoder = wakeful.load(path).decoder().eval()
    for block in decoder.blocks if length is not None else ():
        block.attention.dot.register_forward_pre_hook(change)
    found = [F.cross_entropy(decoder(x).flatten(0, 1), y.flatten()) for x, y in rows]
    return float(torch.stack(found).mean())


if __name__ == "__main__":
    main(*sys.argv[1:])
