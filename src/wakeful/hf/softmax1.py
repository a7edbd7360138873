"""softmax-1 for the models that ship with Transformers.

    import wakeful.hf                                   # registers the name: `register_softmax1`
    AutoModelForCausalLM.from_pretrained(name, attn_implementation="wakeful_softmax1")

Every weight of an attention row becomes e^{x_i} / (1 + Σ_j e^{x_j}) (From Attention to Activation,
eq. 1), in training and in generation, with the kernels of `wakeful.model.attend`. A model that has
learned sinks of its own (gpt-oss stores them as `sinks` and hands them over as `s_aux`) keeps them:
they are softmax-1's with e^s in place of 1, and the model is then the one that was trained.

`save_pretrained` writes the name into config.json, so that the folder is not read as another model:
Transformers and wakeful load it with softmax-1, and Transformers without `import wakeful.hf`
refuses the name.

Shapes: B batch, L queries, S keys, H query heads, G key/value heads, d head width.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.masking_utils import sdpa_mask

from wakeful.errors import WakefulError
from wakeful.model.attend import attend, check_kernel
from wakeful.parts.softmax1 import attend_with_sink
from wakeful.tracing import is_readable
from wakeful.variants.implementations import SOFTMAX1, implementation_in_config

_UNSUPPORTED = {
    "softcap": "caps its attention logits",
    "sinks": "has attention sinks of its own",
    "position_bias": "adds a position bias to its attention logits",
    "head_mask": "got a head mask",
    "layer_head_mask": "got a head mask",
    "cache": "got a paged cache",
}
_HIDDEN = -1e9
"""An additive mask at or below this hides a pair; float16 has no such number, so its least does."""
_FIELD = "attn_implementation"
"""Field of config.json that Transformers reads, and never writes itself."""


def register_softmax1() -> None:
    """Add `SOFTMAX1` to Transformers' public registries of attention and mask functions, and
    have configurations that name it write it.

    No model changes until it is asked for by name. `import wakeful.hf` calls this, so that the name
    is known wherever it could be written; calling it again changes nothing.
    """
    AttentionInterface.register(SOFTMAX1, softmax1_attention_forward)
    AttentionMaskInterface.register(SOFTMAX1, sdpa_mask)
    to_dict = PreTrainedConfig.to_dict
    if not hasattr(to_dict, "writes_softmax1"):  # Transformers has no registry for this
        PreTrainedConfig.to_dict = _writing_softmax1(to_dict)


def _writing_softmax1(to_dict: Any) -> Any:
    """Return a `PreTrainedConfig.to_dict` whose table has `_FIELD` where softmax-1 is chosen."""

    @functools.wraps(to_dict)
    def writing(config: PreTrainedConfig) -> dict[str, Any]:
        table, choice = to_dict(config), softmax1_choice(config)
        return table if choice is None else table | {_FIELD: choice}

    writing.writes_softmax1 = True  # pyright: ignore[reportAttributeAccessIssue]
    return writing


def softmax1_choice(config: PreTrainedConfig) -> str | dict[str, Any] | None:
    """Return the `attn_implementation` that asks for softmax-1 where a configuration has it.

    That is `SOFTMAX1`, a table of the parts that have it ("" is the whole), or None.
    """
    parts: dict[str, Any] = {}
    for key in config.sub_configs:
        part = getattr(config, key, None)
        choice = softmax1_choice(part) if isinstance(part, PreTrainedConfig) else None
        if choice is not None:
            parts[key] = choice
    if implementation_in_config(config) == SOFTMAX1:
        return {"": SOFTMAX1} | parts if config.sub_configs else SOFTMAX1
    return parts or None


def check_softmax1(model: PreTrainedModel) -> None:
    """Check that a model asked for `SOFTMAX1` computes softmax-1, not its own softmax.

    Some architectures (Bloom, for one) never look up their attention function and take any name.

    Raises:
        WakefulError: the model was not asked for it, or its architecture ignores the request.
    """
    chosen = model.config._attn_implementation
    if chosen != SOFTMAX1:
        raise WakefulError(
            f"{type(model).__name__} uses attn_implementation = {chosen!r}, not {SOFTMAX1!r}"
        )
    if not model._can_set_attn_implementation():
        raise WakefulError(
            f"{type(model).__name__} has an attention of its own, which ignores "
            f"attn_implementation = {SOFTMAX1!r}"
        )


def softmax1_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Return softmax-1 attention (B, L, H, d), called by a model in place of its own.

    `query` is (B, H, L, d), `key` and `value` (B, G, S, d), `s_aux` (H,) the logarithms of a
    model's own sinks, 0 where it has none. A mask (B or 1, 1, L, S), boolean or
    additive, decides who sees whom; without one the module is causal or sees everything, by the
    rules of Transformers' "sdpa".

    Raises:
        WakefulError: the model needs something that softmax-1 here does not have; nothing that
            reaches this function is ignored silently. (GPT-2 keeps `output_attentions=True` of a
            single call to itself and returns an empty tuple, as it does with "sdpa".)
    """
    _refuse(module, query, value, s_aux, dropout, kwargs)
    queries, keys = query.shape[2], key.shape[2]
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    sink = query.new_zeros(query.shape[1]) if s_aux is None else s_aux.to(query)
    if attention_mask is not None:
        keep = _keep(module, attention_mask, queries, keys)
        return attend(q, k, v, scale=scale, sink=sink, keep=keep), None
    window = kwargs.get("sliding_window")
    if isinstance(window, int) and window < keys:
        raise WakefulError(
            f"{type(module).__name__} looks back {window} of {keys} keys, and gives no mask that "
            f"says so: {SOFTMAX1} needs the mask"
        )
    if causal and queries > 1:
        # A static cache that was empty: what lies past the queries is not written yet.
        return attend(q, k[:, :queries], v[:, :queries], scale=scale, sink=sink), None
    check_kernel(q)
    return attend_with_sink(q, k, v, sink, None, False, scale), None


def _refuse(
    module: nn.Module,
    query: Tensor,
    value: Tensor,
    s_aux: Tensor | None,
    dropout: float,
    kwargs: dict[str, object],
) -> None:
    name = type(module).__name__
    if dropout:
        raise WakefulError(
            f"{SOFTMAX1} has no dropout on attention weights, and {name} asks for {dropout}: set "
            "the configuration's attention dropout (attention_dropout, attn_pdrop) to 0"
        )
    for option, problem in _UNSUPPORTED.items():
        if kwargs.get(option) is not None:
            raise WakefulError(f"{SOFTMAX1} cannot serve {name}: it {problem} ({option})")
    config = getattr(module, "config", None)
    if kwargs.get("output_attentions") or getattr(config, "output_attentions", False):
        raise WakefulError(
            f"{SOFTMAX1} never makes the attention weights that output_attentions asks for"
        )
    if s_aux is not None and s_aux.shape != query.shape[1:2]:
        raise WakefulError(
            f"{SOFTMAX1} takes a sink a head (s_aux), and {name} gives {tuple(s_aux.shape)} for "
            f"{query.shape[1]} heads"
        )
    if value.shape[-1] != query.shape[-1]:
        raise WakefulError(
            f"{SOFTMAX1} cannot serve {name}: its values are {value.shape[-1]} wide and its "
            f"queries {query.shape[-1]}"
        )


def _keep(module: nn.Module, mask: Tensor, queries: int, keys: int) -> Tensor:
    """Return a boolean mask (B or 1, L, S) for a boolean or additive one (B or 1, 1, L, S)."""
    if mask.ndim != 4 or mask.shape[1] != 1 or mask.shape[-1] != keys:
        raise WakefulError(
            f"{SOFTMAX1} needs one mask (batch, 1, {queries}, {keys}) for all heads, and "
            f"{type(module).__name__} gives {tuple(mask.shape)}"
        )
    if mask.dtype != torch.bool:
        hidden = mask <= max(_HIDDEN, torch.finfo(mask.dtype).min)
        plain = (hidden | (mask == 0)).all()
        problem = (
            f"{SOFTMAX1} takes masks that show or hide a token, and the one of "
            f"{type(module).__name__} holds a bias between the two"
        )
        if is_readable(plain):
            if not bool(plain):
                raise WakefulError(problem)
        else:
            torch._assert_async(plain, problem)  # the graph checks it when it runs
        mask = ~hidden
    return mask[:, 0].expand(-1, queries, -1)
