"""Options of `quantize`."""

from dataclasses import dataclass
from typing import Literal

from wakeful.config.options import How, HowMuch, What, Where
from wakeful.config.reading import ReadingOptions
from wakeful.config.rules import AtLeast, Excludes, Needs
from wakeful.errors import WakefulError

ScaleKind = Literal["dynamic", "static"]
CacheName = Literal["", "fp8", "int8"]
EngineName = Literal["vllm", "llama.cpp"]
ArithmeticName = Literal["reference", "integer"]


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions(ReadingOptions):
    """Schemes, and the text to measure the damage on."""

    scheme: How[tuple[str, ...]] = ()
    """A scheme's name (listed below), or what it does: scheme(weights=absmax(bits=6,
    per="channel")). None: fine, moderate, coarse, w4. Beside --bits: what each layer may take, in
    place of the engine's formats."""
    scales: How[tuple[ScaleKind, ...]] = ("dynamic",)
    """Activation scales: of the current tensor, or calibrated once; with both, each that can be is
    measured."""
    num_sequences: HowMuch[int] = 8
    """Sequences to measure on, one after another from the text's beginning."""
    calibration_sequences: HowMuch[int] = 16
    """Sequences for static scales, methods and caches that need them."""
    calibration_text: How[tuple[str, ...]] = ()
    """Texts to calibrate on, with equally many sequences of each, named as for --text. None: the
    sequences that follow the measured ones."""
    save: Where[str] = ""
    """Folder to create with the quantized model, as compressed-tensors, which Transformers and vLLM
    load. Takes one scheme that the format has."""
    arithmetic: ArithmeticName = "integer"
    """Dequantized numbers, or int8 products; the same to rounding."""
    skip: What[tuple[str, ...]] = ()
    """Layers to leave in full precision, by name or pattern: lm_head, *.down_proj."""
    others: What[tuple[str, ...]] = ()
    """Layers that take another scheme, by name or pattern: lm_head=w8a8."""
    sensitivity: How[bool] = False
    """Rank layers by the loss that each costs alone. Takes one scheme."""
    for_: How[EngineName] = "vllm"
    """Engine whose formats --bits, --bytes and --loss choose among. llama.cpp: Q4_0, Q5_0, Q8_0 and
    F16, of embeddings and head too; --save NAME.gguf writes the file, NAME.txt the flags of
    llama-quantize."""
    bits: HowMuch[float] = 0.0
    """Choose a format for each layer, within so many bits per weight with their scales; embeddings
    and the head are counted apart. 0: every layer takes the scheme."""
    bytes: HowMuch[int] = 0
    """The same, within so many bytes of the whole file."""
    loss: HowMuch[float] = 0.0
    """The same, with the fewest bytes that raise the loss by so many nats per token."""
    cache: How[CacheName] = ""
    """Beside --bits, --bytes or --loss: hold keys and values in 8 bits too, with a scale per tensor
    that calibration text gives. Empty: as they are."""
    tune: HowMuch[int] = 0
    """Steps of training the scales of the chosen formats by KL from the model, each on about 1,024
    further tokens of the calibration text; they stay untrained unless other text gets better."""
    tuning_state: Where[str] = ""
    """File that keeps the state of --tune; the same command goes on from it."""

    RULES = (
        AtLeast("num_sequences calibration_sequences", 1),
        AtLeast("bits bytes loss tune", 0),
        Needs("tune", "bits bytes loss", "it trains the scales of chosen formats"),
        Needs("tuning_state", "tune", "it is the state of that training"),
        Excludes("bits", "bytes loss", "each says how small the file is to be"),
        Excludes("bytes", "loss", "each says how small the file is to be"),
        Excludes("bits bytes loss", "scales others sensitivity", "they choose the formats"),
        Needs("cache", "bits bytes loss", "a scheme says it otherwise"),
        Needs("for_", "bits bytes loss", "it is the engine whose formats are chosen"),
    )

    @property
    def chooses(self) -> bool:
        """True where the tool chooses each layer's format."""
        return bool(self.bits or self.bytes or self.loss)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.calibration_sequences < len(self.calibration_text):
            raise WakefulError(
                f"calibration_sequences = {self.calibration_sequences}: give one or more for each "
                f"of {len(self.calibration_text)} texts"
            )
        for name in ("num_sequences", "calibration_sequences"):
            if self.chooses and getattr(self, name) < 2:
                why = "the proof wants an interval"
                if name == "calibration_sequences":
                    why = "one rounds layers and another one chooses formats"
                raise WakefulError(f"{name} = {getattr(self, name)}: give 2 or more, {why}")
        for pair in self.others:
            if not all(pair.partition("=")):
                raise WakefulError(f"others = {pair!r}: must be PATTERN=SCHEME, as lm_head=w8a8")
        if not self.scales:
            raise WakefulError("name at least one kind of scales")
