"""A trained model back from its run directory."""

from dataclasses import dataclass
from pathlib import Path

from wakeful.config.schema import Config
from wakeful.data.tokenizer import Tokenizer
from wakeful.device import choose_device
from wakeful.errors import WakefulError
from wakeful.model.decoder import Decoder
from wakeful.runs import checkpoint
from wakeful.runs.run import Run


@dataclass(frozen=True)
class Trained:
    """A model with all it takes to use it."""

    decoder: Decoder
    tokenizer: Tokenizer
    config: Config
    step: int


def restore(path: str | Path, *, step: int = 0, device: str = "auto") -> Trained:
    """Return the model of a run, from its newest checkpoint or that of `step`, ready to use."""
    run = Run.open(path)
    kind = run.header.get("kind")
    if kind == "compare":
        raise WakefulError(
            f"{path} is a comparison; name one of its runs, e.g. {path}/VARIANT/seed-0"
        )
    if kind != "train":
        raise WakefulError(f"{path} holds no trained model: run.json calls it {kind!r}")
    config = run.config
    if step and step not in checkpoint.steps(run.checkpoints):
        kept = ", ".join(map(str, checkpoint.steps(run.checkpoints))) or "none"
        raise WakefulError(f"{path} has no checkpoint of step {step}; it has {kept}")
    found = run.checkpoints / f"step-{step:08d}" if step else checkpoint.newest(run.checkpoints)
    checkpoint.check_description(found, config.model)
    decoder = Decoder(config.model)
    if config.train.dtype == "float64":
        decoder.double()
    checkpoint.load_model(found, decoder)
    decoder.to(choose_device(device)).eval().requires_grad_(False)
    tokenizer = Tokenizer.load(run.path)
    return Trained(decoder, tokenizer, config, int(found.name.removeprefix("step-")))


def encode_prompt(trained: Trained, text: str) -> list[int]:
    """Return a prompt's tokens; an empty one is the end-of-text token, where a document begins."""
    return trained.tokenizer.encode(text) or [trained.tokenizer.end_of_text]
