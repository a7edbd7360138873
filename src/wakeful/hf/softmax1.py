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
_HIDDEN_BIAS = -1e9
"""Value of an additive mask at or below which a pair of tokens is hidden; in float16, whose range
ends before, its least value."""
_CONFIG_FIELD = "attn_implementation"
"""Field of config.json that Transformers reads, and never writes itself."""


def register_softmax1() -> None:
    """Register `SOFTMAX1` in Transformers' public registries of attention and mask functions, and
    make configurations that choose it write it to config.json.

    Models that do not choose it by name stay as they are. `import wakeful.hf` calls this, so that
    every process that can save such a model knows the name; calling it again changes nothing.
    """
    AttentionInterface.register(SOFTMAX1, softmax1_attention_forward)
    AttentionMaskInterface.register(SOFTMAX1, sdpa_mask)
    to_dict = PreTrainedConfig.to_dict
    if not hasattr(to_dict, "writes_softmax1"):  # not replaced yet
        # Transformers has no registry for what config.json holds.
        PreTrainedConfig.to_dict = _add_softmax1_field(to_dict)


def _add_softmax1_field(to_dict: Any) -> Any:
    """Wrap `PreTrainedConfig.to_dict` so that its table has the field `attn_implementation` where
    the configuration chooses softmax-1.
    """

    @functools.wraps(to_dict)
    def to_dict_with_softmax1(config: PreTrainedConfig) -> dict[str, Any]:
        """Return the table of `to_dict`, with the field where the configuration needs it."""
        table, choice = to_dict(config), softmax1_choice(config)
        return table if choice is None else table | {_CONFIG_FIELD: choice}

    # The mark by which it is seen that `to_dict` is wrapped already.
    to_dict_with_softmax1.writes_softmax1 = True  # pyright: ignore[reportAttributeAccessIssue]
    return to_dict_with_softmax1


def softmax1_choice(config: PreTrainedConfig) -> str | dict[str, Any] | None:
    """Return the value of `attn_implementation` by which a configuration chooses softmax-1; None if
    it does not.

    The value is the name `SOFTMAX1`. For a model of several parts (`sub_configs`) it is a table of
    the parts that choose softmax-1, in which "" stands for the whole model.
    """
    choices: dict[str, Any] = {}
    if implementation_in_config(config) == SOFTMAX1:
        if not config.sub_configs:
            return SOFTMAX1
        choices[""] = SOFTMAX1
    for name in config.sub_configs:
        part = getattr(config, name, None)
        choice = softmax1_choice(part) if isinstance(part, PreTrainedConfig) else None
        if choice is not None:
            choices[name] = choice
    return choices or None


def check_softmax1(model: PreTrainedModel) -> None:
    """Check that a model with `attn_implementation` = `SOFTMAX1` computes softmax-1.

    Some architectures (such as Bloom) accept any name and never look up their attention function.

    Raises:
        WakefulError: the model has another `attn_implementation`, or its architecture ignores it.
    """
    implementation = model.config._attn_implementation
    if implementation != SOFTMAX1:
        raise WakefulError(
            f"{type(model).__name__} uses attn_implementation = {implementation!r}, not "
            f"{SOFTMAX1!r}"
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
    """Return softmax-1 attention (B, L, H, d), and None in place of attention weights. A
    Transformers model calls this as its attention function.

    `query` is (B, H, L, d), `key` and `value` (B, G, S, d), `s_aux` (H,) the logarithms of a
    model's learned sinks, by default 0. A mask (B or 1, 1, L, S), boolean or additive, says which
    keys each query attends to; without one, attention is causal or full by the rules of
    Transformers' "sdpa".

    Raises:
        WakefulError: the model passes an argument that is not supported here, such as dropout. No
            argument that arrives here is ignored; GPT-2 drops `output_attentions=True` of a single
            call before, and returns an empty tuple, as it does with "sdpa".
    """
    _check_arguments(module, query, value, s_aux, dropout, kwargs)
    queries, keys = query.shape[2], key.shape[2]
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    sink = query.new_zeros(query.shape[1]) if s_aux is None else s_aux.to(query)
    if attention_mask is not None:
        keep = _to_boolean_mask(module, attention_mask, queries, keys)
        return attend(q, k, v, scale=scale, sink=sink, keep=keep), None
    window = kwargs.get("sliding_window")
    if isinstance(window, int) and window < keys:
        raise WakefulError(
            f"{type(module).__name__} looks back {window} of {keys} keys, and gives no mask that "
            f"says so: {SOFTMAX1} needs the mask"
        )
    if causal and queries > 1:
        # `attend` is causal. Further keys are those of a static cache that are not written yet.
        return attend(q, k[:, :queries], v[:, :queries], scale=scale, sink=sink), None
    # Every query attends to all keys: full attention, or a single last query.
    check_kernel(q)
    return attend_with_sink(q, k, v, sink, keep=None, causal=False, scale=scale), None


def _check_arguments(
    module: nn.Module,
    query: Tensor,
    value: Tensor,
    s_aux: Tensor | None,
    dropout: float,
    kwargs: dict[str, object],
) -> None:
    """Raise `WakefulError` for arguments of an attention function that softmax-1 cannot serve.

    These are dropout, options of `_UNSUPPORTED`, a request for attention weights, sinks (`s_aux`)
    that are not one per head, and values of another width than the queries.
    """
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


def _to_boolean_mask(module: nn.Module, mask: Tensor, queries: int, keys: int) -> Tensor:
    """Convert a boolean or additive mask (B or 1, 1, L, S) to a boolean one (B or 1, L, S), true
    where a query attends to a key.

    Raises:
        WakefulError: the mask has another shape, or is additive and holds a bias that neither shows
            nor hides a key. While a graph is traced, biases cannot be read: they are checked when
            the graph runs.
    """
    if mask.ndim != 4 or mask.shape[1] != 1 or mask.shape[-1] != keys:
        raise WakefulError(
            f"{SOFTMAX1} needs one mask (batch, 1, {queries}, {keys}) for all heads, and "
            f"{type(module).__name__} gives {tuple(mask.shape)}"
        )
    if mask.dtype != torch.bool:
        # The range of float16 ends before `_HIDDEN_BIAS`: there its least value hides a key.
        hidden = mask <= max(_HIDDEN_BIAS, torch.finfo(mask.dtype).min)
        has_no_bias = (hidden | (mask == 0)).all()
        problem = (
            f"{SOFTMAX1} takes masks that show or hide a token, and the one of "
            f"{type(module).__name__} holds a bias between the two"
        )
        if is_readable(has_no_bias):
            if not bool(has_no_bias):
                raise WakefulError(problem)
        else:
            torch._assert_async(has_no_bias, problem)  # the graph checks it when it runs
        mask = ~hidden
    return mask[:, 0].expand(-1, queries, -1)
