"""Our class under the Trainer, under LoRA adapters and under lm-eval."""

from pathlib import Path

import peft
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments

from helpers import some_tokens
from hf.models import RECOMPUTE, VARIANTS, pair, recompute
from wakeful.data.tokenizer import Tokenizer
from wakeful.hf.modeling import WakefulForCausalLM
from wakeful.model.generate import generate_tokens

# peft asks by the old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")


class Rows(Dataset):
    """Token rows of unequal numbers of counted targets."""

    def __init__(self) -> None:
        self.tokens = some_tokens(8, 12)
        self.labels = self.tokens.clone()
        for row in range(8):
            self.labels[row, : row + 1] = -100

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[row], "labels": self.labels[row]}


def trained(model: WakefulForCausalLM, folder: Path, **options: object) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=2, learning_rate=0.1, optim="sgd", seed=1, use_cpu=True,
        lr_scheduler_type="constant", max_grad_norm=0.0, report_to="none", disable_tqdm=True,
        save_strategy="no", logging_strategy="no", dataloader_pin_memory=False, **options,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=Rows())
    trainer.train()
    return trainer


@pytest.mark.slow
def test_the_trainer_counts_items_over_accumulated_batches(tmp_path: Path) -> None:
    wanted, rows = pair(torch.float32, route="svformer")[1], Rows()
    optimizer = torch.optim.SGD(wanted.parameters(), lr=0.1)
    results = []
    for options in (
        {"per_device_train_batch_size": 8},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
        {"per_device_train_batch_size": 8, RECOMPUTE: True},
    ):
        model = pair(torch.float32, route="svformer")[1]
        trained(model, tmp_path, **options)
        results.append({n: p.detach() for n, p in model.named_parameters()})
    for _ in range(2):
        logits = wanted(rows.tokens).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), rows.labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for result in results:
        for name, parameter in wanted.named_parameters():
            torch.testing.assert_close(result[name], parameter.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vanilla", "svformer", "cla", "odd parts"])
def test_lora_reaches_every_projection(name: str, tmp_path: Path) -> None:
    _, model = pair(torch.float32, **VARIANTS[name])
    tokens = some_tokens(2, 9)
    before = model(tokens).logits.detach()
    owners = sum(n.endswith("v_proj.weight") for n, _ in model.named_parameters())
    assert owners == {"svformer": 1, "cla": 2}.get(name, 4)
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM"
    )
    adapted = peft.get_peft_model(model, config)
    adapted.eval()
    assert torch.equal(adapted(tokens).logits, before)
    free = [n for n, p in adapted.named_parameters() if p.requires_grad]
    assert len([n for n in free if "v_proj.lora_A" in n]) == owners
    loss = adapted(tokens, labels=tokens).loss
    loss.backward()
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=1.0)
    optimizer.step()
    after = adapted(tokens, labels=tokens)
    assert after.loss < loss
    frozen = dict(pair(torch.float32, **VARIANTS[name])[1].named_parameters())
    for n, parameter in adapted.named_parameters():
        plain = n.removeprefix("base_model.model.").replace(".base_layer", "")
        if "lora" not in n:
            assert torch.equal(parameter, frozen[plain])
    found = adapted.generate(input_ids=tokens, max_new_tokens=5, pad_token_id=0, do_sample=False)
    adapted.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(pair(torch.float32, **VARIANTS[name])[1], tmp_path)
    torch.testing.assert_close(again(tokens).logits, after.logits.detach())
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged(tokens).logits, after.logits.detach())
    assert torch.equal(
        merged.generate(tokens, max_new_tokens=5, pad_token_id=0, do_sample=False), found
    )


def test_lora_trains_with_recomputed_activations() -> None:
    gradients = []
    for again in (False, True):
        torch.manual_seed(1)
        _, model = pair(torch.float32, route="svformer")
        if again:
            recompute(model)
        config = peft.LoraConfig(r=2, target_modules=["v_proj", "o_proj"], task_type="CAUSAL_LM")
        adapted = peft.get_peft_model(model, config).train()
        tokens = some_tokens(2, 9)
        adapted(tokens, labels=tokens).loss.backward()
        gradients.append(
            {n: p.grad.clone() for n, p in adapted.named_parameters() if p.requires_grad}
        )
    assert any(grad.abs().max() > 0 for grad in gradients[0].values())
    for name, grad in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], grad)


def test_lm_eval_scores_and_continues_with_our_class() -> None:
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    from lm_eval.api.instance import Instance

    tokenizer = Tokenizer.train(["def f(x):\n    return x + 1\n"] * 5, 270)
    decoder, model = pair(torch.float32, vocab_size=tokenizer.vocab_size, route="svformer")
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.inner, eos_token=tokenizer.end_of_text_token
    )
    lm = huggingface.HFLM(pretrained=model, tokenizer=theirs, batch_size=2, device="cpu")
    texts = [("def f(x):", " return x"), ("def", "(x + 1)"), ("", "return")]

    def asked(kind: str, *arguments: object) -> list[Instance]:
        return [
            Instance(request_type=kind, doc={}, arguments=each, idx=index)
            for index, each in enumerate(arguments)
        ]

    found = lm.loglikelihood(asked("loglikelihood", *texts), disable_tqdm=True)
    for (given, rest), (score, _) in zip(texts, found, strict=True):
        start = tokenizer.encode(given) or [tokenizer.end_of_text]
        tokens = tokenizer.encode(given + rest)[len(tokenizer.encode(given)) :]
        logits = decoder(torch.tensor([start + tokens]))[0, len(start) - 1 : -1]
        wanted = -F.cross_entropy(logits, torch.tensor(tokens), reduction="sum")
        assert score == pytest.approx(wanted.item(), rel=1e-5)
    options = {"until": ["@@"], "max_gen_toks": 8, "do_sample": False}
    texts_out = lm.generate_until(
        asked("generate_until", ("def f", options), ("x", options)), disable_tqdm=True
    )
    for start, text in zip(("def f", "x"), texts_out, strict=True):
        tokens = list(
            generate_tokens(
                decoder, tokenizer.encode(start), num_tokens=8, temperature=0,
                stop={tokenizer.end_of_text},
            )
        )  # fmt: skip
        assert text == tokenizer.decode(tokens)
