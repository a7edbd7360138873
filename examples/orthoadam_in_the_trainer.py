"""OrthoAdam in the Trainer of Transformers: Adam in a random basis, where no channel is special.

    python examples/orthoadam_in_the_trainer.py --model HuggingFaceTB/SmolLM2-135M --text book.txt

Without arguments it trains a tiny random model on text of Python's standard library.
"""

import tyro
from stand_in import TEXT, tiny_llama
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

from wakeful.data import read_documents
from wakeful.optim import OrthoAdam


def main(model: str = "", text: str = TEXT, steps: int = 20, length: int = 64) -> None:
    path = model or tiny_llama()
    network = AutoModelForCausalLM.from_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    words = "".join(document.text for document in read_documents(text))
    tokens = tokenizer(words, verbose=False).input_ids
    starts = range(0, len(tokens) - length, length)
    rows = [{"input_ids": tokens[n : n + length], "labels": tokens[n : n + length]} for n in starts]

    optimizer = OrthoAdam(network.named_parameters(), lr=1e-3)
    print(optimizer.plan())  # which axis of which weight is rotated, and why

    arguments = TrainingArguments(
        output_dir="runs/orthoadam", max_steps=steps, per_device_train_batch_size=4,
        logging_steps=5, save_strategy="no", report_to=[], dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = Trainer(network, arguments, train_dataset=rows, optimizers=(optimizer, None))
    print(trainer.train().metrics)


if __name__ == "__main__":
    tyro.cli(main)
