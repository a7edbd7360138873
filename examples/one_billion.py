"""One page about a model of 1.1 billion parameters, before and after it is quantized.

    python examples/one_billion.py --text book.txt --out runs/one-billion

With a GPU it is TinyLlama from the hub. Without one it has TinyLlama's shape and random weights, in
4.4 GB: sizes and times are real, perplexities and errors are not.
"""

from pathlib import Path

import torch
import tyro
from stand_in import TEXT

import wakeful
from wakeful.data import Tokenizer
from wakeful.loading import Model
from wakeful.model import Decoder, ModelConfig, initialize

NAME = "TinyLlama/TinyLlama-1.1B-Chat-v1.0"


def of_its_shape(layers: int, vocab_size: int) -> Model:
    tokenizer = Tokenizer.train([Path(torch.__file__).read_text("utf-8")], 512)
    config = ModelConfig(
        vocab_size=vocab_size, max_length=2048, num_layers=layers, num_heads=32, num_kv_heads=4,
        width=2048, mlp_width=5632, tied=False,
    )  # fmt: skip
    return wakeful.load(initialize(Decoder(config), seed=0), tokenizer=tokenizer)


def main(
    text: str = TEXT,
    schemes: tuple[str, ...] = ("w8a8", "w4g128"),
    layers: int = 22,
    vocab_size: int = 32_000,
    length: int = 128,
    out: str = "runs/one-billion",
) -> None:
    real, count = (True, 8) if torch.cuda.is_available() else (False, 1)
    model = wakeful.load(NAME, dtype="bfloat16") if real else of_its_shape(layers, vocab_size)
    done = wakeful.quantize(model, *schemes, text=text, length=length, num_sequences=count, out=out)
    print(*done.verdicts, sep="\n")
    print(f"{'' if real else 'of random weights, '}the page: {out}/report.html")


if __name__ == "__main__":
    tyro.cli(main)
