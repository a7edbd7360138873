"""A model of torchtitan in a loop of your own, with wakeful's parts."""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import llama3_configs

from wakeful.parts import OrthoAdam, add_value_residuals, softmax1_attention

LENGTH = 64


class Softmax1(torch.nn.Module):
    def forward(self, q, k, v, *, attention_masks=None, scale=None, enable_gqa=False):
        return softmax1_attention(q, k, v, scale, layout="BLHd")


TEXT = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()


def batch(step: int) -> torch.Tensor:
    starts = torch.randint(len(TEXT) - LENGTH, (8,), generator=torch.Generator().manual_seed(step))
    return torch.stack([TEXT[start : start + LENGTH + 1] for start in starts])


def main(steps: int = 50, folder: str = "", compiled: bool = False) -> list[float]:
    torch.manual_seed(0)
    config = llama3_configs["debugmodel"]("flex")
    for layer in config.layers:  # which runs on a CPU, forward and backward
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    model = config.build()
    model.init_states()
    for block in model.layers.values():
        block.attention.inner_attention = Softmax1()
    projections = [block.attention.qkv_linear for block in model.layers.values()]
    add_value_residuals(projections, "learnable")
    optimizer = OrthoAdam(model, lr=3e-3)
    file, first = Path(folder, "checkpoint.pt"), 0
    if folder and file.exists():
        saved = torch.load(file)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    forward = torch.compile(model, fullgraph=True) if compiled else model
    losses = []
    for step in range(first, steps):
        tokens = batch(step)
        loss = F.cross_entropy(forward(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if folder:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": steps}
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, file)
    return losses


if __name__ == "__main__":
    print(*(f"{loss:.3f}" for loss in main()))
