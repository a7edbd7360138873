"""The verb evaluate: its options and what they start."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from wakeful.cli.console import OUT, display, tell
from wakeful.cli.parsing import leading, parse
from wakeful.errors import WakefulError


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """What to measure, on what."""

    text: str = ""
    """Text for perplexity: a file, folder or glob."""
    data: str = ""
    """Text by name instead: python-stdlib, or hf:NAME for a Hugging Face dataset."""
    length: int = 512
    """Tokens a window of the text."""
    stride: int = 0
    """Tokens from one window to the next. 0: the length, so that windows do not overlap."""
    num_sequences: int = 0
    """Windows at most, from the text's beginning. 0: all of the text."""
    lambada: str = ""
    """JSON lines {"text": ...}: predict the last word."""
    choices: str = ""
    """JSON lines {"question" or "context", "choices", "answer"}, or PIQA's {"goal", "sol1",
    "sol2"}: choose the answer."""
    labels: str = ""
    """The answers to choices, one number a line from 0, where they are in a file of their own."""
    tasks: tuple[str, ...] = ()
    """Tasks of lm-eval by name; their data comes from the Hugging Face hub."""
    limit: int = 0
    """Examples at most of each task. 0: all."""
    bos: bool = False
    """Put the model's BOS token before every window and every context."""
    out: str = ""
    """Folder to create. Empty: runs/evaluate-MODEL."""
    batch_size: int = 4
    """Windows or examples a forward pass."""
    device: str = "auto"
    """auto, cpu, cuda ..."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Arithmetic of the model; log-likelihoods are float32 or better."""
    trust_remote_code: bool = False
    """Run code that comes with the model. Leave it out for models you do not trust."""


def run(arguments: list[str]) -> None:
    """MODEL... [options]: measure perplexity and accuracy, side by side."""
    from wakeful.world import joined

    with joined() as world:
        _evaluate(arguments, speaks=world.first)


def _evaluate(arguments: list[str], *, speaks: bool) -> None:
    from wakeful.verbs.evaluate import Measures, run_evaluation

    models, rest = leading(arguments)
    options = parse(EvaluateOptions, rest, "evaluate MODEL...", None)
    if not models:
        raise WakefulError(
            "name a model: a run directory, a Transformers folder, a GGUF file, smollm2 or a hub "
            "name"
        )
    measures = Measures(
        text=options.text,
        data=options.data,
        length=options.length,
        stride=options.stride,
        num_sequences=options.num_sequences,
        lambada=options.lambada,
        choices=options.choices,
        labels=options.labels,
        tasks=options.tasks,
        limit=options.limit,
    )
    out = Path(options.out or f"runs/evaluate-{Path(models[0]).name}")
    with display("evaluate", speaks=speaks) as show:
        run, grid = run_evaluation(
            models,
            out,
            measures,
            show=show,
            bos=options.bos,
            batch_size=options.batch_size,
            device=options.device,
            dtype=options.dtype,
            trust_remote_code=options.trust_remote_code,
        )
    if speaks:
        OUT.print(grid)
        tell(f"report: {run.path / 'report.html'}")
