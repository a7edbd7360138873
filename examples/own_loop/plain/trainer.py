"""A Llama in Transformers' Trainer."""

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

LENGTH = 64
TEXT = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
ROWS = [{"input_ids": row, "labels": row} for row in TEXT.split(LENGTH) if len(row) == LENGTH]


def main(steps: int = 50, folder: str = "out", compiled: bool = False) -> list[float]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=3,
        num_attention_heads=4, max_position_embeddings=LENGTH,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    arguments = TrainingArguments(
        folder, max_steps=steps, per_device_train_batch_size=8, logging_steps=1, use_cpu=True,
        save_steps=10, report_to="none", lr_scheduler_type="constant", torch_compile=compiled,
        disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=ROWS, optimizers=(optimizer, None))
    last = get_last_checkpoint(folder) if Path(folder).exists() else None
    trainer.train(resume_from_checkpoint=last)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    print(*(f"{loss:.3f}" for loss in main()))
