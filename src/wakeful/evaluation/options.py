"""Options of `evaluate`."""

from dataclasses import dataclass
from pathlib import Path

from wakeful.config.options import HowMuch, What
from wakeful.config.reading import ReadingOptions
from wakeful.config.rules import AtLeast, Excludes, Needs
from wakeful.config.schema import DataConfig
from wakeful.errors import WakefulError


def with_shots(task: str) -> tuple[str, int | None]:
    """Split TASK@SHOTS into the name and the number of shots, None for a plain TASK.

    Raises:
        WakefulError: the text after the @ is not a number.
    """
    name, at, shots = task.partition("@")
    if at and not shots.isdecimal():
        raise WakefulError(
            f"task {task!r}: after the @ goes the number of few-shot examples, e.g. {name}@5"
        )
    return name, int(shots) if at else None


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(ReadingOptions):
    """Texts, tasks and costs to measure; with examples and no text, the examples alone."""

    texts: What[tuple[str, ...]] = ()
    """Several texts in place of one, each with figures of its own: files, folders, globs."""
    speed: What[tuple[int, ...]] = ()
    """Lengths of a prompt at which reading and writing are timed, e.g. 128 1024 4096; the model's
    size is reported too."""
    stride: HowMuch[int] = 0
    """Tokens from one window to the next. 0: the length, so that windows do not overlap."""
    num_sequences: HowMuch[int] = 0
    """Windows at most, from the text's beginning. 0: all of a text that is named, else 64."""
    lambada: What[str] = ""
    """JSON lines {"text": ...}: predict the last word."""
    choices: What[str] = ""
    """JSON lines {"question" or "context", "choices", "answer"}, or PIQA's {"goal", "sol1",
    "sol2", "label"}: choose the answer."""
    tasks: What[tuple[str, ...]] = ()
    """Tasks of lm-eval by name, as TASK@SHOTS with that many examples before each question; their
    data comes from the Hugging Face hub."""
    limit: HowMuch[int] = 0
    """Examples at most of each task. 0: all."""
    batch_size: HowMuch[int] = 4
    """Windows or examples per forward pass."""

    RULES = (
        AtLeast("batch_size", 1),
        AtLeast("stride num_sequences limit", 0),
        Excludes("texts", "text", "every text is named in --texts"),
        Needs("limit", "lambada choices tasks", "a text is shortened by --num_sequences"),
    )

    def __post_init__(self) -> None:
        """Raise `WakefulError` if options are out of range or contradict each other, or two texts
        or tasks have one name.
        """
        super().__post_init__()
        stems = [Path(text).stem for text in self.texts]
        for stem in stems:
            if stems.count(stem) > 1:
                raise WakefulError(f"two of the texts are called {stem}: figures go by that name")
        if any(length < 1 for length in self.speed) or len({*self.speed}) < len(self.speed):
            raise WakefulError(f"speed = {self.speed}: lengths of at least 1, each once")
        for name in ("length", "stride", "num_sequences"):
            if not self.sources and getattr(self, name):
                raise WakefulError(f"{name} is for a text, and none is given; add --text")
        if self.length and self.stride > self.length:
            raise WakefulError(
                f"stride = {self.stride} must be between 1 and the length, {self.length}"
            )
        task_names = [with_shots(task)[0] for task in self.tasks]
        if len(set(task_names)) < len(task_names):
            raise WakefulError(f"tasks = {self.tasks}: each once, with one number of shots")
        task_names += [name for name in ("lambada", "choices") if getattr(self, name)]
        common_names = {*stems} & {*task_names}
        if common_names:
            raise WakefulError(
                f"a text is called {min(common_names)}, and so is a task: figures go by that name, "
                "so rename the text"
            )

    @property
    def source(self) -> str:
        """The one text to measure perplexity on: the one named, else the default; "" if none is
        named but something else is asked for, such as several texts or tasks.
        """
        asks_for_more = self.asks or self.texts or self.speed
        return self.text or ("" if asks_for_more else DataConfig.source)

    @property
    def sources(self) -> dict[str, str]:
        """The texts to measure perplexity on, by the names that their scores get: "text" for a
        single one, else their files' names.
        """
        several = {Path(text).stem: text for text in self.texts}
        return {"text": self.source} if self.source else several

    @property
    def windows(self) -> int:
        """Windows at most; 0: all."""
        return self.num_sequences or (0 if self.text or self.texts else 64)

    @property
    def asks(self) -> bool:
        """True where lm-eval is needed."""
        return bool(self.lambada or self.choices or self.tasks)
