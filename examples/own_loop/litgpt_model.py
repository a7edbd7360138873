"""A model of litgpt in a loop of your own, with wakeful's parts."""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from litgpt import GPT, Config

from wakeful.parts import OrthoAdam, add_value_residuals, softmax1_attention

LENGTH = 64


def attend(q, k, v, mask=None):
    return softmax1_attention(q, k, v, keep=mask).transpose(1, 2)


TEXT = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()


def batch(step: int) -> torch.Tensor:
    starts = torch.randint(len(TEXT) - LENGTH, (8,), generator=torch.Generator().manual_seed(step))
    return torch.stack([TEXT[start : start + LENGTH + 1] for start in starts])


def main(steps: int = 50, folder: str = "", compiled: bool = False) -> list[float]:
    torch.manual_seed(0)
    config = Config(
        block_size=LENGTH, vocab_size=256, padded_vocab_size=256, n_layer=3, n_head=4, n_embd=64,
        n_query_groups=2, rotary_percentage=1.0, bias=False, norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP", intermediate_size=128, parallel_residual=False,
    )  # fmt: skip
    model = GPT(config)
    for block in model.transformer.h:
        block.attn.scaled_dot_product_attention = attend
    projections = [block.attn.qkv for block in model.transformer.h]
    start = config.n_head * config.head_size + config.n_query_groups * config.head_size
    values = slice(start, start + config.n_query_groups * config.head_size)
    add_value_residuals(projections, "learnable", columns=values)
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
