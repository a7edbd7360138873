"""A GPT in one file and its training loop, in the shape of nanoGPT."""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

LAYERS, WIDTH, HEADS, LENGTH, RATE = 3, 64, 4, 64, 3e-3
TEXT = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()


class Attention(nn.Module):
    def __init__(self, layer: int) -> None:
        super().__init__()
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.c_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        heads = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.c_attn(x).chunk(3, -1))
        q, k, v = heads
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, layer: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = Attention(layer)
        self.mlp = nn.ModuleDict(
            {"c_fc": nn.Linear(WIDTH, 4 * WIDTH), "c_proj": nn.Linear(4 * WIDTH, WIDTH)}
        )

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.h = nn.ModuleList(Block(layer) for layer in range(LAYERS))
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def batch(step: int) -> torch.Tensor:
    starts = torch.randint(len(TEXT) - LENGTH, (8,), generator=torch.Generator().manual_seed(step))
    return torch.stack([TEXT[start : start + LENGTH + 1] for start in starts])


def main(steps: int = 50, folder: str = "", compiled: bool = False) -> list[float]:
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
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
