"""Options of `cure`."""

from dataclasses import dataclass
from typing import Literal

from wakeful.config.options import How, HowMuch, Where
from wakeful.config.reading import ReadingOptions, StoredDtype
from wakeful.config.rules import AtLeast, Excludes, Needs
from wakeful.errors import WakefulError


@dataclass(frozen=True, kw_only=True)
class CureOptions(ReadingOptions):
    """Cures of a model, and the text to verify it on."""

    for_: How[tuple[str, ...]] = ()
    """Choose the cure for number formats by measuring: nvfp4, mxfp4, int8, w4a8, w4a4, w4a16, kv4,
    or any scheme of quantize."""
    stock: How[bool] = False
    """Choose among cures that leave one of Transformers' own architectures, which engines and
    quantize --save want."""
    rotate: How[str] = ""
    """Rotate the residual stream: hadamard, haar, block_diagonal(size=64). It helps 8 bits and
    int4 inputs, and hurts NVFP4: see --for. Empty: leave it."""
    rotate_values: How[bool] = False
    """Rotate every head's values alone, by Hadamard: exact wherever a model's norms stand."""
    rotate_inner: How[bool] = False
    """Rotate the inputs of the feed-forward networks' last projections too, as the model runs."""
    rotate_keys: How[bool] = False
    """Rotate queries and keys after RoPE, as the model runs, for a cache of 4 bits."""
    prefix: How[Literal["", "auto", "bos"]] = ""
    """Store a token before every text: auto, BOS if it takes the sink without raising the loss on
    the text, else another token that does, if any; or bos in any case. Empty: none."""
    sinks: How[bool] = False
    """Put a learned sink into every head, fitted to the model's own statistics."""
    seed: int = 0
    """Seed of the rotation."""
    num_sequences: HowMuch[int] = 2
    """Sequences to verify on, one after another from the text's beginning."""
    stored: Where[StoredDtype] = "auto"
    """Type of the weights written, which the cured ones are rounded to. auto: as the model's files
    have it."""

    RULES = (
        AtLeast("num_sequences", 1),
        Excludes(
            "for_",
            "rotate rotate_values rotate_inner rotate_keys prefix sinks",
            "it chooses what is best for the formats",
        ),
        Needs("stock", "for_", "it says what is chosen among"),
        Excludes("prefix", "sinks", "a prefix keeps the token that sinks do without"),
        Excludes("dtype=bfloat16", "sinks", "it is too coarse to fit them"),
        Excludes("rotate", "rotate_values", "it turns them with the residual stream"),
    )

    def __post_init__(self) -> None:
        """Raise `WakefulError` if neither a cure nor a format is named."""
        super().__post_init__()
        rotates = self.turning or self.rotate_inner or self.rotate_keys
        if not (rotates or self.prefix or self.sinks or self.for_):
            raise WakefulError(
                "name a format to cure for, --for nvfp4, or a cure: --rotate hadamard, "
                "--rotate_values, --rotate_inner, --rotate_keys, --prefix auto, --sinks"
            )

    @property
    def turning(self) -> str:
        """The rotation of the residual stream, or of values alone; "" for none."""
        return self.rotate or ("hadamard" if self.rotate_values else "")
