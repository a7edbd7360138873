"""A smaller model that starts from a larger one's layers, and a random start trained alike.

    python examples/inherit.py --model smollm2 --text 'books/*.txt' --layers 15 --steps 2000

Without arguments the reference is tiny and random, with nothing worth inheriting.
"""

import tyro
from stand_in import TEXT, tiny_llama

import wakeful


def main(
    model: str = "",
    text: str = TEXT,
    layers: int = 2,
    steps: int = 10,
    length: int = 64,
    out: str = "runs/heir",
) -> None:
    found = wakeful.inherit(
        model or tiny_llama(),
        layers=layers,
        baseline=["random"],
        text=text,
        steps=steps,
        train={"length": length, "batch_size": 4, "eval_every": steps},
        out=out,
    )
    print(*found.verdicts, sep="\n")
    print("runs and one offline page:", out)


if __name__ == "__main__":
    tyro.cli(main)
