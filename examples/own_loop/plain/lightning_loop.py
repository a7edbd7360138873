"""A Llama in Lightning."""

import argparse
from pathlib import Path

import lightning
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

LENGTH = 64
TEXT = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()


def batch(step: int) -> torch.Tensor:
    starts = torch.randint(len(TEXT) - LENGTH, (8,), generator=torch.Generator().manual_seed(step))
    return torch.stack([TEXT[start : start + LENGTH] for start in starts])


class Module(lightning.LightningModule):
    def __init__(self, compiled: bool) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=3,
            num_attention_heads=4, max_position_embeddings=LENGTH,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config)
        if compiled:
            self.model.compile(fullgraph=True)
        self.losses = []

    def training_step(self, *_):
        tokens = batch(self.global_step)
        loss = self.model(input_ids=tokens, labels=tokens).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.model.parameters(), lr=3e-3)


def main(steps: int = 50, folder: str = "", compiled: bool = False) -> list[float]:
    lightning.seed_everything(0)
    module = Module(compiled)
    trainer = lightning.Trainer(
        max_steps=steps, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    file = Path(folder, "last.ckpt")
    last = file if folder and file.exists() else None
    trainer.fit(module, DataLoader(range(steps)), ckpt_path=last)
    if folder:
        trainer.save_checkpoint(file)
    return module.losses


if __name__ == "__main__":
    print(*(f"{loss:.3f}" for loss in main()))
