"""Our decoder's description as a configuration of Transformers."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from wakeful.config.model import ModelConfig
from wakeful.errors import WakefulError


def _part(name: str, *, settable: bool = False) -> Any:
    """Return a property that is an entry of `parts`."""

    def put(self: "WakefulConfig", value: Any) -> None:
        self.parts[name] = value

    return property(lambda self: self.parts[name], put if settable else None)


class WakefulConfig(PreTrainedConfig):
    """A `ModelConfig` under `parts`; the names other tools ask for are read from it."""

    model_type = "wakeful"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012

    def __init__(
        self,
        *,
        parts: Mapping[str, Any] | None = None,
        use_cache: bool = True,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
        **others: Any,
    ) -> None:
        given = dict(parts or {})
        unknown = given.keys() - {entry.name for entry in dataclasses.fields(ModelConfig)}
        if unknown:
            raise WakefulError(
                f"the configuration has parts.{min(unknown)}, which this wakeful does not know"
            )
        # JSON has lists for tuples.
        named: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in given.items()
        }
        self.parts = dataclasses.asdict(ModelConfig(**named))
        self.use_cache = use_cache
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.pad_token_id = pad_token_id
        super().__init__(**others)

    @classmethod
    def of(cls, config: ModelConfig, **others: Any) -> "WakefulConfig":
        """Return the configuration of a decoder."""
        return cls(parts=dataclasses.asdict(config), **others)

    @property
    def model(self) -> ModelConfig:
        """The decoder's description."""
        return ModelConfig(**self.parts)

    # A resized embedding sets the vocabulary, and Transformers ties or unties the head.
    vocab_size = _part("vocab_size", settable=True)
    tie_word_embeddings = _part("tied", settable=True)
    num_hidden_layers = _part("num_layers")
    hidden_size = _part("width")
    intermediate_size = _part("mlp_width")
    num_attention_heads = _part("num_heads")
    initializer_range = _part("init_std")

    @property
    def max_position_embeddings(self) -> int:
        """Most tokens of text: a stored prefix takes its places from them."""
        return self.model.context

    @property
    def num_key_value_heads(self) -> int:
        return self.model.shape.num_kv_heads

    @property
    def layer_types(self) -> list[str] | None:
        """What an engine asks for: the layers with a window, where there are any."""
        ours = self.model
        if not ours.narrowed:
            return None
        local = ours.local_layers
        return [
            "sliding_attention" if layer in local else "full_attention"
            for layer in range(ours.num_layers)
        ]

    @property
    def sliding_window(self) -> int | None:
        return self.model.window if self.model.narrowed else None

    @property
    def final_logit_softcapping(self) -> float | None:
        return self.parts["logit_cap"] or None

    @property
    def head_dim(self) -> int:
        return self.model.shape.head_width
