"""Our decoder's description as a configuration of Transformers."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from wakeful.config.model import ModelConfig
from wakeful.errors import WakefulError


class WakefulConfig(PreTrainedConfig):
    """A `ModelConfig` under `parts`; the names other tools ask for are read from it."""

    model_type = "wakeful"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012

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
        self.parts = dataclasses.asdict(ModelConfig(**given))
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

    @property
    def vocab_size(self) -> int:
        return self.parts["vocab_size"]

    @vocab_size.setter
    def vocab_size(self, value: int) -> None:  # a resized embedding sets it
        self.parts["vocab_size"] = value

    @property
    def tie_word_embeddings(self) -> bool:
        return self.parts["tied"]

    @tie_word_embeddings.setter
    def tie_word_embeddings(self, value: bool) -> None:
        self.parts["tied"] = value

    @property
    def max_position_embeddings(self) -> int:
        return self.parts["max_length"]

    @property
    def num_hidden_layers(self) -> int:
        return self.parts["num_layers"]

    @property
    def hidden_size(self) -> int:
        return self.parts["width"]

    @property
    def intermediate_size(self) -> int:
        return self.parts["mlp_width"]

    @property
    def num_attention_heads(self) -> int:
        return self.parts["num_heads"]

    @property
    def num_key_value_heads(self) -> int:
        return self.model.shape.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.model.shape.head_width

    @property
    def initializer_range(self) -> float:
        return self.parts["init_std"]
