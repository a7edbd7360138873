"""Take a pretrained model's outliers away without training, and see what that does to 4 and 8 bits.

    python examples/cure_and_quantize.py --model smollm2 --text book.txt --prefix bos --out cured

Without arguments the model is tiny and random, and reads Python's standard library.
"""

from typing import Literal

import tyro
from stand_in import TEXT, tiny_llama

import wakeful


def main(
    model: str = "",
    text: str = TEXT,
    prefix: Literal["", "auto", "bos"] = "auto",
    schemes: tuple[str, ...] = ("coarse", "w4"),
    length: int = 64,
    out: str = "",
) -> None:
    plain = wakeful.load(model or tiny_llama())

    # A rotation of the residual stream changes no logit; the stored prefix is a token that is
    # always read first, so that no token of the text becomes the sink.
    cured = wakeful.cure(plain, rotate="hadamard", prefix=prefix, text=text, length=length)
    print(*cured.verdicts, sep="\n")

    damage = wakeful.quantize([plain, cured.model], *schemes, text=text, length=length)
    print(*damage.verdicts, sep="\n")

    if out:
        print("a folder that Transformers loads:", cured.save(out))


if __name__ == "__main__":
    tyro.cli(main)
