"""Options of `generate`."""

from dataclasses import dataclass

from wakeful.config.options import How, HowMuch, What, Where
from wakeful.config.reading import Bos
from wakeful.config.rules import AtLeast, RuleChecked, Within


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(RuleChecked):
    """Length, sampling and model of a continuation."""

    num_tokens: HowMuch[int] = 100
    """Maximum number of tokens to generate."""
    temperature: How[float] = 0.8
    """Divides the logits; 0 takes the likeliest token every time."""
    top_k: How[int] = 50
    """Sample from this many of the likeliest tokens; 0 means all."""
    top_p: How[float] = 1.0
    """Choose among the likeliest tokens that together reach this probability."""
    seed: How[int] = 0
    """Seed of the choice."""
    chat: How[bool] = False
    """The prompt is what a user says, and the model answers, by its chat template."""
    bos: Bos = "auto"
    """BOS before the prompt: as the model's own tokenizer does (auto), on, or off."""
    step: What[int] = 0
    """Checkpoint of a run to use, by its step. 0 means the newest."""
    device: Where[str] = "auto"
    """auto, cpu, cuda ..."""

    RULES = (
        AtLeast("num_tokens top_k step", 0),
        Within("temperature", "[0, inf)"),
        Within("top_p", "(0, 1]"),
        Within("seed", "[0, 2**63)"),
    )
