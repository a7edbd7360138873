"""Our decoder's configuration as a configuration of Transformers."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

from wakeful.config.model import ModelConfig
from wakeful.errors import WakefulError


def _part_property(name: str) -> Any:
    """Return a property that reads and writes `parts[name]` of a `WakefulConfig`."""

    def read(self: "WakefulConfig") -> Any:
        return self.parts[name]

    def write(self: "WakefulConfig", value: Any) -> None:
        self.parts[name] = value

    return property(read, write)


class WakefulConfig(PreTrainedConfig):
    """A Transformers configuration that holds a `ModelConfig` as the table `parts`.

    Each of `HF_FIELDS`, the names that other tools know, reads and sets one of the parts, and is
    saved beside them. Whether the parts fit together is checked here, and again where a model is
    built from them.
    """

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
        **kwargs: Any,
    ) -> None:
        """Build a configuration from the fields of a `ModelConfig` (`parts`), from those of
        `HF_FIELDS` among `kwargs`, or from both where they agree. Fields that are not given have
        the defaults of `ModelConfig`; other `kwargs` are for Transformers.

        Raises:
            WakefulError: a part is unknown, or a field of `HF_FIELDS` contradicts the parts.
        """
        given_parts = dict(parts or {})
        unknown = given_parts.keys() - {entry.name for entry in dataclasses.fields(ModelConfig)}
        if unknown:
            raise WakefulError(
                f"the configuration has parts.{min(unknown)}, which this wakeful does not know"
            )
        # JSON has lists for tuples.
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in given_parts.items()
        }
        self.parts = dataclasses.asdict(ModelConfig(**fields))
        hf_fields = {name: kwargs.pop(name) for name in HF_FIELDS if name in kwargs}
        self._set_hf_fields(hf_fields, given_parts)
        self.use_cache = use_cache
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.pad_token_id = pad_token_id
        super().__init__(**kwargs)

    @classmethod
    def of(cls, config: ModelConfig, **kwargs: Any) -> "WakefulConfig":
        """Return the Transformers configuration of a decoder with this `ModelConfig`."""
        return cls(parts=dataclasses.asdict(config), **kwargs)

    def _set_hf_fields(self, fields: Mapping[str, Any], parts: Mapping[str, Any]) -> None:
        """Set parts of the model to the values in `fields`, whose keys are Transformers' names.

        `parts` are those that the caller gave. If there are any, no field may contradict them.

        Raises:
            WakefulError: a field contradicts the parts.
        """
        for name, value in fields.items():
            current = getattr(self, name)
            if parts and value != current:
                raise WakefulError(
                    f"the configuration has {name} = {value!r}, and its parts say {current!r}: "
                    "change both, or leave the name out"
                )
            if value != current:
                setattr(self, name, value)

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as config.json holds it: Transformers' own fields and `parts`,
        and beside them those of `HF_FIELDS` that are not None.
        """
        fields = {name: getattr(self, name) for name in HF_FIELDS}
        return super().to_dict() | {
            name: value for name, value in fields.items() if value is not None
        }

    @property
    def model(self) -> ModelConfig:
        """The decoder's configuration, without local layers past the number of layers, which a
        tool may have lowered.
        """
        num_layers = self.parts["num_layers"]
        local = tuple(layer for layer in self.parts["local_layers"] if layer < num_layers)
        parts: dict[str, Any] = self.parts | {"local_layers": local}
        return ModelConfig(**parts)

    vocab_size = _part_property("vocab_size")
    tie_word_embeddings = _part_property("tied")
    num_hidden_layers = _part_property("num_layers")
    hidden_size = _part_property("width")
    intermediate_size = _part_property("mlp_width")
    num_attention_heads = _part_property("num_heads")
    initializer_range = _part_property("init_std")

    @property
    def max_position_embeddings(self) -> int:
        """Most tokens of a text: the decoder's positions minus those of a stored prefix."""
        return self.parts["max_length"] - self.parts["stored_prefix"]

    @max_position_embeddings.setter
    def max_position_embeddings(self, value: int) -> None:
        self.parts["max_length"] = value + self.parts["stored_prefix"]

    @property
    def num_key_value_heads(self) -> int:
        return self.parts["num_kv_heads"] or self.parts["num_heads"]

    @num_key_value_heads.setter
    def num_key_value_heads(self, value: int | None) -> None:
        self.parts["num_kv_heads"] = value or 0

    @property
    def head_dim(self) -> int:
        return self.parts["head_width"] or self.parts["width"] // max(1, self.parts["num_heads"])

    @head_dim.setter
    def head_dim(self, value: int | None) -> None:
        self.parts["head_width"] = value or 0

    @property
    def final_logit_softcapping(self) -> float | None:
        return self.parts["logit_cap"] or None

    @final_logit_softcapping.setter
    def final_logit_softcapping(self, value: float | None) -> None:
        self.parts["logit_cap"] = value or 0.0

    @property
    def _has_short_window(self) -> bool:
        return bool(self.parts["local_layers"]) and (
            0 < self.parts["window"] < self.parts["max_length"]
        )

    @property
    def sliding_window(self) -> int | None:
        return self.parts["window"] if self._has_short_window else None

    @sliding_window.setter
    def sliding_window(self, value: int | None) -> None:
        """Set the window; raise `WakefulError` where no layer would have it."""
        if value and not self.parts["local_layers"]:
            raise WakefulError(
                f"sliding_window = {value}, and no layer has a window: set parts.local_layers to "
                "the layers that have one"
            )
        self.parts["window"] = value or 0

    @property
    def layer_types(self) -> list[str] | None:
        """The type of attention of every layer, for inference engines; None without windows."""
        if not self._has_short_window:
            return None
        local, count = self.parts["local_layers"], self.parts["num_layers"]
        return [_WINDOWED if layer in local else _WHOLE for layer in range(count)]

    @layer_types.setter
    def layer_types(self, value: list[str] | None) -> None:
        """Set which layers have the window; raise `WakefulError` for a type of another name."""
        if unknown := set(value or ()) - {_WINDOWED, _WHOLE}:
            raise WakefulError(f"layer_types has {min(unknown)!r}, not {_WINDOWED} or {_WHOLE}")
        self.parts["local_layers"] = tuple(
            layer for layer, kind in enumerate(value or ()) if kind == _WINDOWED
        )


_WINDOWED, _WHOLE = "sliding_attention", "full_attention"
HF_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "tie_word_embeddings",
    "initializer_range", "final_logit_softcapping", "layer_types", "sliding_window",
)  # fmt: skip
"""Names in Transformers of parts of a model."""
