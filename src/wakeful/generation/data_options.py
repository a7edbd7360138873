"""Options of `data prepare` and `data generate`."""

from dataclasses import dataclass

from wakeful.config.options import How, HowMuch, What, Where
from wakeful.config.reading import LENGTH, Bos
from wakeful.config.rules import AtLeast, RuleChecked, Within
from wakeful.config.schema import TRAINED, TextConfig


@dataclass(frozen=True, kw_only=True)
class PrepareOptions(TextConfig):
    """Turn text into memory-mapped tokens.

    wakeful data generate --help: text that a model writes.
    """

    out: Where[str]
    """Folder to create."""

    RULES = (TRAINED,)


@dataclass(frozen=True, kw_only=True)
class SampleOptions(RuleChecked):
    """Text for a model to generate as training data.

    Run the same command again to resume.
    """

    out: Where[str]
    """Folder to create."""
    tokens: HowMuch[int] = 1_000_000
    """Tokens to write at least; the last document is whole."""
    length: HowMuch[int] = 0
    """Maximum tokens per document. 0: 512, or the model's context where that is shorter."""
    batch_size: HowMuch[int] = 16
    """Documents written side by side."""
    temperature: How[float] = 1.0
    """Divides the logits."""
    top_k: How[int] = 0
    """Sample from this many of the likeliest tokens; 0 means all."""
    top_p: How[float] = 1.0
    """Choose among the likeliest tokens that together reach this probability."""
    seed: How[int] = 0
    """Seed of the choice, and of what is held out."""
    prompts: What[str] = ""
    """File with one prompt per line, each for a document in turn. Empty: none."""
    chat: How[Bos] = "auto"
    """Begin with the chat template: a prompt is what a user says; without prompts the model writes
    question and answer. auto: of a model that has one."""
    validation_fraction: float = TextConfig.validation_fraction
    """Share of documents held out, chosen by a hash of their tokens."""
    step: What[int] = 0
    """Checkpoint of a run to use, by its step. 0 means the newest."""
    device: Where[str] = "auto"
    """auto, cpu, cuda ..."""
    trust_remote_code: bool = False
    """Run code that comes with the model. Leave it out for models you do not trust."""

    RULES = (
        AtLeast("tokens batch_size", 1),
        AtLeast("top_k length seed", 0),
        Within("temperature", "(0, inf)"),  # with 0, every document would be the same
        Within("top_p", "(0, 1]"),
        Within("validation_fraction", "(0, 1)"),
    )

    def length_for(self, context: int) -> int:
        """Return the most tokens of a document, for a model with this context."""
        return self.length or min(LENGTH, context)
