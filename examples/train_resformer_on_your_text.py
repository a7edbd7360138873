"""Train a ResFormer on a text of yours: every layer mixes its values with those of the first.

    python examples/train_resformer_on_your_text.py --text 'notes/*.txt' --width 256 --steps 2000

Without arguments it is a tiny one on text of Python's standard library. It writes a run, which
resumes to the bit, and whose folder every command takes.
"""

import tyro
from stand_in import TEXT

import wakeful


def main(
    text: str = TEXT,
    out: str = "runs/my-resformer",
    layers: int = 4,
    width: int = 64,
    steps: int = 30,
    vocabulary: int = 1024,
    prompt: str = "def ",
) -> None:
    run = wakeful.train(
        "cpu-tiny",  # a preset; what follows takes the place of its fields
        out=out,
        model={"route": "resformer", "num_layers": layers, "width": width, "mlp_width": 3 * width},
        data={"source": text, "vocab_size": vocabulary},
        train={"steps": steps, "length": 64, "eval_every": max(1, steps // 3)},
    )
    print(*run.verdicts, sep="\n")
    print(prompt + wakeful.generate(run.model, prompt, num_tokens=40))
    wakeful.report(run.path)
    print(f"one offline page: {out}/report.html")


if __name__ == "__main__":
    tyro.cli(main)
