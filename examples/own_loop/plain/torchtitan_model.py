"""A model of torchtitan in a loop of your own."""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import llama3_configs

LENGTH = 64
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
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
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
