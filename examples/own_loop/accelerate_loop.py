"""A Llama in a loop of your own with accelerate and wakeful's parts."""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

import wakeful.hf  # noqa: F401 - names the attention
from wakeful.parts import OrthoAdam, add_value_residuals

LENGTH = 64
TEXT = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()


def batch(step: int) -> torch.Tensor:
    starts = torch.randint(len(TEXT) - LENGTH, (8,), generator=torch.Generator().manual_seed(step))
    return torch.stack([TEXT[start : start + LENGTH] for start in starts])


def main(steps: int = 50, folder: str = "", compiled: bool = False) -> list[float]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=3,
        num_attention_heads=4, max_position_embeddings=LENGTH,
        attn_implementation="wakeful_softmax1",
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    add_value_residuals([layer.self_attn.v_proj for layer in model.model.layers], "learnable")
    optimizer = OrthoAdam(model, lr=3e-3)
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    first = 0
    if folder and Path(folder, "step").exists():
        accelerator.load_state(folder)
        first = int(Path(folder, "step").read_text("utf-8"))
    forward = torch.compile(model, fullgraph=True) if compiled else model
    losses = []
    for step in range(first, steps):
        tokens = batch(step)
        loss = forward(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if folder:
        accelerator.save_state(folder)
        Path(folder, "step").write_text(str(steps), "utf-8")
    return losses


if __name__ == "__main__":
    print(*(f"{loss:.3f}" for loss in main()))
