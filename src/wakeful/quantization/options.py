"""Options of `quantize`."""

from dataclasses import dataclass
from typing import Literal

from wakeful.config.options import How, HowMuch, What, Where
from wakeful.config.reading import ReadingOptions
from wakeful.config.rules import AtLeast, Excludes, Needs
from wakeful.errors import WakefulError

CacheName = Literal["", "fp8", "int8", "fp8_head", "int8_head"]
EngineName = Literal["vllm", "llama.cpp"]


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions(ReadingOptions):
    """Schemes, and the text to measure the damage on."""

    scheme: How[tuple[str, ...]] = ()
    """A scheme's name (listed below) or expression: scheme(weights=absmax(bits=6, per="channel")).
    None: fine, moderate, coarse, w4. With --bits, --bytes or --loss: formats to choose from instead
    of the engine's."""
    num_sequences: HowMuch[int] = 8
    """Sequences to measure on, one after another from the text's beginning."""
    calibration_sequences: HowMuch[int] = 16
    """Calibration sequences for static scales, methods and caches that need them."""
    calibration_text: How[tuple[str, ...]] = ()
    """Texts to calibrate on, named as for --text, with equally many sequences from each. None: the
    sequences that follow the measured ones."""
    save: Where[str] = ""
    """Folder to create with the quantized model in the format compressed-tensors, which
    Transformers and vLLM load. Needs a single scheme that the format supports."""
    skip: What[tuple[str, ...]] = ()
    """Layers to leave in full precision, by name or pattern: lm_head, *.down_proj."""
    sensitivity: How[bool] = False
    """Rank layers by the loss increase when each alone is quantized. Needs a single scheme."""
    for_: How[EngineName] = "vllm"
    """Engine whose formats --bits, --bytes and --loss choose from. llama.cpp: Q4_0, Q5_0, Q8_0 and
    F16, also for embeddings and head; --save NAME.gguf writes the file, NAME.txt the flags of
    llama-quantize."""
    bits: HowMuch[float] = 0.0
    """Choose a format for each layer, with at most this many bits per weight on average, scales
    included, embeddings and head not. 0: every layer has the same scheme."""
    bytes: HowMuch[int] = 0
    """Choose a format for each layer, with at most this many bytes for the whole file."""
    loss: HowMuch[float] = 0.0
    """Choose a format for each layer, with the fewest bytes that raise the loss by at most this
    many nats per token."""
    rotation: How[str] = ""
    """With --bits, --bytes or --loss: rotate the model before its formats are chosen. auto: try
    values, hadamard and blocks as wide as the format's groups on calibration text, and use the best
    if its 95% interval shows that it helps and the file does not grow. Or name one: values,
    hadamard, block_diagonal(size=64)."""
    against: What[tuple[str, ...]] = ()
    """With --bits, --bytes or --loss: other quantized versions of the model, such as those of other
    tools, to compare with on the same text: Transformers folders or GGUF files."""
    cache: How[CacheName] = ""
    """With --bits, --bytes or --loss: also store keys and values in 8 bits, with scales from
    calibration text: one per tensor, or one per head (fp8_head, int8_head). Empty: full
    precision."""
    tune: HowMuch[int] = 0
    """Steps of training the scales of the chosen formats by KL from the full-precision model, each
    on about 1,024 further tokens of calibration text. The trained scales are used only if they
    lower the KL on other text."""
    tuning_state: Where[str] = ""
    """File that stores the state of --tune, from which the same command continues."""

    RULES = (
        AtLeast("num_sequences calibration_sequences", 1),
        AtLeast("bits bytes loss tune", 0),
        Needs("tune", "bits bytes loss", "it trains the scales of chosen formats"),
        Needs("tuning_state", "tune", "it is the state of that training"),
        Excludes("bits", "bytes loss", "each limits the size of the file"),
        Excludes("bytes", "loss", "each limits the size of the file"),
        Excludes("bits bytes loss", "sensitivity", "they choose the formats"),
        Needs("rotation", "bits bytes loss", "for named schemes, rotate the model by wakeful cure"),
        Needs("against", "bits bytes loss", "else compare models by wakeful evaluate"),
        Needs("cache", "bits bytes loss", "otherwise the scheme says it"),
        Needs("for_", "bits bytes loss", "it is the engine whose formats are chosen"),
    )

    @property
    def chooses_formats(self) -> bool:
        """True where the tool chooses each layer's format, within a budget."""
        return bool(self.bits or self.bytes or self.loss)

    def __post_init__(self) -> None:
        """Raise `WakefulError` if options are out of range or contradict each other."""
        super().__post_init__()
        if self.calibration_sequences < len(self.calibration_text):
            raise WakefulError(
                f"calibration_sequences = {self.calibration_sequences}: give one or more for each "
                f"of {len(self.calibration_text)} texts"
            )
        reasons_for_two = {
            "num_sequences": "a comparison needs an interval",
            "calibration_sequences": "one is for rounding layers and another for choosing formats",
        }
        for name, reason in reasons_for_two.items():
            if self.chooses_formats and getattr(self, name) < 2:
                raise WakefulError(f"{name} = {getattr(self, name)}: give 2 or more, {reason}")
