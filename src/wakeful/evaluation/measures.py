"""What an evaluation measures, checked before anything is read."""

from collections.abc import Sequence
from dataclasses import dataclass

from wakeful.errors import WakefulError
from wakeful.evaluation.perplexity import check_sizes


@dataclass(frozen=True, kw_only=True)
class Measures:
    """What to measure; a file, text or name that is empty is not measured."""

    text: str = ""
    data: str = ""
    length: int = 512
    stride: int = 0
    num_sequences: int = 0
    lambada: str = ""
    choices: str = ""
    labels: str = ""
    tasks: Sequence[str] = ()
    limit: int = 0

    def __post_init__(self) -> None:
        default = type(self)
        if self.text and self.data:
            raise WakefulError("text and data both name a text; give one")
        if not self.source and not self.asks:
            raise WakefulError("nothing to measure: give --text, --lambada, --choices or --tasks")
        for name in ("length", "stride", "num_sequences"):
            if not self.source and getattr(self, name) != getattr(default, name):
                raise WakefulError(f"{name} is for a text, and none is given; add --text or --data")
            if getattr(self, name) < 0:
                raise WakefulError(f"{name} = {getattr(self, name)} must not be negative")
        check_sizes(length=self.length, stride=self.stride or self.length)
        if self.labels and not self.choices:
            raise WakefulError("labels are for --choices, and none are given")
        if self.limit and not self.asks:
            raise WakefulError("limit is for examples; a text is shortened by --num_sequences")
        if self.limit < 0:
            raise WakefulError(f"limit = {self.limit} must not be negative; 0 takes all examples")

    @property
    def source(self) -> str:
        """The text to measure perplexity on."""
        return self.text or self.data

    @property
    def asks(self) -> bool:
        """Whether lm-eval is needed."""
        return bool(self.lambada or self.choices or self.tasks)
