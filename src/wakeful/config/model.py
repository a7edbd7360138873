"""Configuration of a decoder, part by part."""

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args, get_origin

from wakeful.config.options import What
from wakeful.config.rules import AtLeast, RuleChecked
from wakeful.errors import WakefulError
from wakeful.variants.shape import Shape

_MAX_ANGLES = 2**26
"""Largest number of angles in RoPE's table, which is computed at once: a million positions of heads
with 128 channels."""
MLPName = Literal["gelu", "gelu_exact", "swiglu", "geglu"]
PositionName = Literal["rotary", "learned", "none"]
RotationName = Literal["", "rotary", "local_rotary"]
"""RoPE table of a layer: the decoder's, that of the local layers, or none ("")."""
AttentionBias = Literal["same", "none", "qkv", "all"]
VARIANTS = {
    "route": "routes", "depth": "depth", "normalizer": "normalizers", "norm": "norms",
    "placement": "placements", "rope": "ropes", "embedding": "embeddings",
}  # fmt: skip
"""Fields whose value is the expression of a variant, and the folder that defines the variant."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(RuleChecked):
    """Configuration of a decoder: GPT-2, Llama and their kin, by the parts that are chosen."""

    vocab_size: int = 4096
    """Tokens in the vocabulary. At the default, training sets it to the tokenizer's size; a larger
    value adds embedding rows that no text uses, as a teacher may have."""
    max_length: int = 512
    """Context window, in tokens."""
    num_layers: What[int] = 8
    """Layers (blocks)."""
    num_heads: What[int] = 4
    """Query heads per layer."""
    num_kv_heads: int = 0
    """Key/value heads per layer; divides num_heads. 0 means as many as num_heads (no GQA)."""
    width: What[int] = 128
    """Channels of the residual stream."""
    head_width: int = 0
    """Channels of a head. 0 means width / num_heads."""
    mlp_width: int = 344
    """Hidden channels of the feed-forward network."""
    norm: What[str] = "rmsnorm"
    """layernorm, rmsnorm (one scale per channel, M), rmsnorm_single (one scale, S), or e.g.
    layernorm_scaling."""
    placement: What[str] = "pre"
    """Placement of norms: pre, post, peri, reordered, or e.g. mixed(share=0.25): post-norm in that
    share of the layers, the first ones."""
    norm_eps: float = 1e-5
    """Added to the variance."""
    positions: PositionName = "rotary"
    """Rotary (RoPE), learned absolute, or no position embedding."""
    rope_theta: float = 10_000.0
    """RoPE's base."""
    rotary_width: int = 0
    """Channels of a head that RoPE rotates, the first ones. 0 means all."""
    rope: str = "plain"
    """Scaling of RoPE's frequencies, e.g. linear(factor=2.0)."""
    local_layers: tuple[int, ...] = ()
    """Layers, counted from 0, whose RoPE has the base local_theta and no scaling."""
    local_theta: float = 0.0
    """RoPE's base in the local layers. 0 means no RoPE there (NoPE)."""
    window: int = 0
    """Sliding window of the local layers, in tokens, the query's own included. 0 means all."""
    mlp: MLPName = "swiglu"
    """SwiGLU (Llama), GeGLU (Gemma), tanh-GELU (GPT-2) or exact GELU (GPT-NeoX)."""
    mlp_rotation: bool = False
    """Rotate the hidden channels by a Walsh-Hadamard transform before the down projection."""
    qk_rotation: bool = False
    """Rotate queries and keys by a Walsh-Hadamard transform after RoPE: attention is unchanged."""
    bias: bool = False
    """Biases in linear layers and LayerNorm."""
    attention_bias: AttentionBias = "same"
    """Biases of the attention's projections: same as bias, none, on q, k and v, or on all four."""
    qk_norm: bool = False
    """RMSNorm of every query and key head before RoPE (Qwen3)."""
    qk_norm_whole: bool = False
    """Take that norm over all heads of a token together (OLMo 2), not over each head."""
    parallel: bool = False
    """Attention and feed-forward network both read the block's input (GPT-NeoX)."""
    tied: bool = False
    """One matrix for the embedding and the head."""
    embedding: str = "plain"
    """Embedding: plain, scaled by the square root of width (Gemma), or projected: a square matrix
    after the embedding and another before the head."""
    logit_cap: float = 0.0
    """Soft cap c of the head's logits: x becomes c · tanh(x / c) (Gemma 2). 0 means none."""
    query_scalar: int = 0
    """Queries times keys are divided by the square root of this. 0 means head_width."""
    scale_logits_by_layer: bool = False
    """Divide attention logits also by (layer index + 1), beyond the square root of head_width."""
    stored_prefix: int = 0
    """Tokens before every sequence whose keys and values are stored with the weights. Every token
    attends to them, in local layers also from beyond the window."""
    normalizer: What[str] = "softmax"
    """Normalization of attention logits into weights, e.g. softmax, softmax1,
    softmax1(learned=True)."""
    route: What[str] = "own"
    """Source of the attention's values, e.g. resformer(mode="learnable"), svformer."""
    depth: What[str] = "residual"
    """Input of a block from the residual stream, e.g. denseformer."""
    init_std: float = 0.02
    """Standard deviation of initial weights."""
    scale_residual_init: bool = False
    """Divide the initial output and down projections by sqrt(2 · num_layers), as GPT-2 does."""

    SECTION = "model"
    RULES = (
        AtLeast("vocab_size max_length num_layers num_heads width mlp_width", 1),
        AtLeast("num_kv_heads head_width rotary_width stored_prefix", 0),
        AtLeast("logit_cap query_scalar window local_theta", 0),
    )

    def __post_init__(self) -> None:
        """Raise `WakefulError` if fields are out of range or contradict each other.

        Whole numbers in fields of floats become floats.
        """
        for entry in dataclasses.fields(self):
            value = getattr(self, entry.name)
            if entry.type is float and type(value) is int:
                # In the formats that models are exported to, 500000 and 500000.0 are of different
                # types. (`object`, since this dataclass is frozen.)
                object.__setattr__(self, entry.name, float(value))
            if get_origin(entry.type) is Literal and value not in get_args(entry.type):
                raise WakefulError(
                    f"model.{entry.name} must be one of {', '.join(get_args(entry.type))}, "
                    f"got {value!r}"
                )
        super().__post_init__()  # checks `RULES`
        if self.head_width == 0 and self.width % self.num_heads:
            raise WakefulError(
                f"model.num_heads = {self.num_heads} does not divide model.width = {self.width}; "
                "change one of them, or set model.head_width"
            )
        if self.num_kv_heads and self.num_heads % self.num_kv_heads:
            raise WakefulError(
                f"model.num_kv_heads = {self.num_kv_heads} does not divide model.num_heads = "
                f"{self.num_heads}"
            )
        self._check_positions()
        self._check_local_layers()
        if self.stored_prefix >= self.max_length:
            raise WakefulError(
                f"model.stored_prefix = {self.stored_prefix} leaves no room for text within "
                f"model.max_length = {self.max_length}"
            )
        if self.qk_norm_whole and not self.qk_norm:
            raise WakefulError("model.qk_norm_whole needs model.qk_norm: turn it on too")
        if self.norm_eps <= 0 or self.init_std < 0 or self.rope_theta <= 0:
            raise WakefulError(
                "model.norm_eps and model.rope_theta must be positive, model.init_std not negative"
            )

    def _check_positions(self) -> None:
        """Raise `WakefulError` if the options of rotary positions do not fit the heads or each
        other, or are set without rotary positions.
        """
        if self.positions == "rotary" and self.shape.head_width % 2:
            raise WakefulError(
                f"rotary positions turn pairs of channels, but a head has {self.shape.head_width}"
            )
        if self.rotary_width % 2 or self.rotary_width > self.shape.head_width:
            raise WakefulError(
                f"model.rotary_width must be even and at most the {self.shape.head_width} channels "
                f"of a head, got {self.rotary_width}"
            )
        pairs = (self.rotary_width or self.shape.head_width) // 2
        if self.positions == "rotary" and self.max_length * pairs > _MAX_ANGLES:
            raise WakefulError(
                f"the rotary table of model.max_length = {self.max_length} times {pairs} pairs of "
                "channels does not fit into memory: lower model.max_length or model.width"
            )
        if self.positions != "rotary" and (self.rotary_width or self.rope != "plain"):
            raise WakefulError(
                f"model.rotary_width = {self.rotary_width} and model.rope = {self.rope!r} are for "
                f"rotary positions, and model.positions = {self.positions!r}"
            )

    def _check_local_layers(self) -> None:
        """Raise `WakefulError` if `local_layers` are not ascending numbers of layers, or if they or
        `local_theta` are set without rotary positions.
        """
        layers, theta = self.local_layers, self.local_theta
        ascending = all(first < second for first, second in itertools.pairwise(layers))
        in_range = all(type(layer) is int and 0 <= layer < self.num_layers for layer in layers)
        if not in_range or not ascending:
            raise WakefulError(
                f"model.local_layers must be ascending numbers from 0 to {self.num_layers - 1}, "
                f"got {list(layers)}"
            )
        if self.positions != "rotary" and (layers or theta):
            raise WakefulError(
                f"model.local_layers = {list(layers)} and model.local_theta = {theta} are for "
                f"rotary positions, and model.positions = {self.positions!r}"
            )

    @property
    def context(self) -> int:
        """Context length for text: `max_length` minus the stored prefix."""
        return self.max_length - self.stored_prefix

    @property
    def has_short_window(self) -> bool:
        """True where some layers have a sliding window that is shorter than `max_length`."""
        return bool(self.local_layers) and 0 < self.window < self.max_length

    @property
    def qkv_bias(self) -> bool:
        """True where the query, key and value projections have biases."""
        return self.attention_bias in ("qkv", "all") or self._same_bias

    @property
    def out_bias(self) -> bool:
        """True where the attention's output projection has a bias."""
        return self.attention_bias == "all" or self._same_bias

    def rope_table_name(self, layer: int) -> RotationName:
        """Return the name of the RoPE table that a layer uses: "rotary", or in a local layer
        "local_rotary"; "" for no RoPE.
        """
        if self.positions != "rotary":
            return ""
        if layer not in self.local_layers:
            return "rotary"
        return "local_rotary" if self.local_theta else ""

    def with_vocabulary(self, num_tokens: int) -> "ModelConfig":
        """Return this configuration for a tokenizer of `num_tokens` tokens.

        A `vocab_size` at its default becomes that number; a larger one that was set stays.

        Raises:
            WakefulError: `vocab_size` was set to less.
        """
        if self.vocab_size == ModelConfig.vocab_size:
            return dataclasses.replace(self, vocab_size=num_tokens)
        if self.vocab_size < num_tokens:
            raise WakefulError(
                f"model.vocab_size = {self.vocab_size} has no room for the {num_tokens} tokens of "
                "the text's tokenizer: leave it out, or give as many or more"
            )
        return self

    def with_layers(self, sources: Sequence[int]) -> "ModelConfig":
        """Return the configuration of a model whose layer t is a copy of this model's layer
        `sources[t]`; a copy of a local layer is local.
        """
        local = tuple(t for t, source in enumerate(sources) if source in self.local_layers)
        return dataclasses.replace(self, num_layers=len(sources), local_layers=local)

    @property
    def _same_bias(self) -> bool:
        return self.attention_bias == "same" and self.bias

    @property
    def shape(self) -> Shape:
        """The decoder's sizes, with the numbers that a 0 in a field stands for."""
        return Shape(
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads or self.num_heads,
            head_width=self.head_width or self.width // self.num_heads,
            width=self.width,
            vocab_size=self.vocab_size,
        )
