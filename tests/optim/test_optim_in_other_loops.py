"""OrthoAdam where its users put it: a plain loop, and the Hugging Face Trainer."""

from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Trainer
from transformers import TrainingArguments as Arguments

from wakeful.optim import OrthoAdam


class Rows(Dataset):
    """The same 24 sequences for every run."""

    def __init__(self) -> None:
        self.tokens = torch.randint(0, 96, (24, 12), generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[number], "labels": self.tokens[number]}


def model(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if kind == "gpt2":
        config = GPT2Config(
            vocab_size=96, n_positions=32, n_embd=24, n_layer=2, n_head=2,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        return GPT2LMHeadModel(config)
    config = LlamaConfig(
        vocab_size=96, hidden_size=24, intermediate_size=40, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    return LlamaForCausalLM(config)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("rotation", ["hadamard", "haar"])
def test_the_trainer_takes_the_steps_of_a_plain_loop(
    kind: str, rotation: str, tmp_path: Path
) -> None:
    def optimizer_of(trained: torch.nn.Module) -> OrthoAdam:
        return OrthoAdam(trained.named_parameters(), lr=1e-2, rotation=rotation, seed=5)

    by_hand = model(kind)
    start = {name: p.detach().clone() for name, p in by_hand.named_parameters()}
    optimizer = optimizer_of(by_hand)
    data = Rows()
    # For GPT-2 the Trainer divides by every label, for Llama by those that are predicted.
    counted = 4 * 12 if kind == "gpt2" else 4 * 11
    for step in range(6):
        batch = data.tokens[4 * step : 4 * step + 4]
        loss = by_hand(input_ids=batch, labels=batch, num_items_in_batch=counted).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(by_hand.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    trained = model(kind)
    arguments = Arguments(
        output_dir=str(tmp_path), per_device_train_batch_size=4, num_train_epochs=1,
        max_grad_norm=1.0, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
        lr_scheduler_type="constant", train_sampling_strategy="sequential",
    )  # fmt: skip
    trainer = Trainer(
        trained, arguments, train_dataset=data, optimizers=(optimizer_of(trained), None)
    )
    trainer.train()
    for (name, one), two in zip(trained.named_parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)
        assert not torch.equal(one, start[name]) or name.endswith("attn.c_attn.bias")


@pytest.mark.long
@pytest.mark.filterwarnings("default")
def test_the_trainer_resumes_it(tmp_path: Path) -> None:
    trained = model("llama")
    optimizer = OrthoAdam(trained.named_parameters(), lr=1e-2, rotation="hadamard")
    arguments = Arguments(
        output_dir=str(tmp_path), max_steps=4, report_to=[], use_cpu=True, save_steps=2
    )
    trainer = Trainer(trained, arguments, train_dataset=Rows(), optimizers=(optimizer, None))
    trainer.train()
    whole = {name: value.clone() for name, value in trained.state_dict().items()}
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    head = trained.get_output_embeddings().weight
    assert float(optimizer.state[head]["step"]) == 4
    for name, value in trained.state_dict().items():
        assert torch.equal(value, whole[name])


@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False])
def test_the_trainer_makes_it_itself_without_names(
    whole: bool, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    trained = model("llama")
    options = {"lr": 1e-2, "module": trained} if whole else {"lr": 1e-2}
    data = Rows()
    before = trained(input_ids=data.tokens, labels=data.tokens).loss.item()
    arguments = Arguments(
        output_dir=str(tmp_path), max_steps=12, save_strategy="no", report_to=[], use_cpu=True,
        disable_tqdm=True, weight_decay=0.1,
    )  # fmt: skip
    trainer = Trainer(
        trained,
        arguments,
        train_dataset=data,
        optimizer_cls_and_kwargs=(OrthoAdam, options),
    )
    trainer.train()
    said = [str(entry.message) for entry in recwarn if "OrthoAdam" in str(entry.message)]
    assert len(said) == (not whole), said
    assert trained(input_ids=data.tokens, labels=data.tokens).loss.item() < before - 0.1
