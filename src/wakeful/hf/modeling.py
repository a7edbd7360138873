"""Our decoder as a model of Transformers: `generate()`, the Trainer, adapters, `save_pretrained`.

Shapes: B batch, L new tokens, S all tokens so far, D width, V vocabulary, N layers.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import Cache as TransformersCache
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.generation import GenerationMode
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import logging
from transformers.utils.generic import can_return_tuple

from wakeful.depth.base import DepthMix
from wakeful.embeddings import Embedding
from wakeful.errors import WakefulError
from wakeful.hf.cache import CACHE, Visible, WakefulCache, token_visibility
from wakeful.hf.configuration import WakefulConfig
from wakeful.hf.engine import ENGINES, use_engine_attention
from wakeful.hf.offloading import offloaded_weights_loaded, unsplit_modules
from wakeful.hf.projections import name_projections, projection_name
from wakeful.model.decoder import Decoder, fixed_seed
from wakeful.model.hooks import hooked
from wakeful.model.initialize import deviation
from wakeful.model.positions import Rotary
from wakeful.normalizers.base import Normalizer
from wakeful.norms.base import Norm
from wakeful.routes.base import TOKENS, ValueRoute
from wakeful.variants import build
from wakeful.variants.roles import HEAD, HasRoles, Role, RoleMarks, mark_roles, role_of, roles_of

_logger = logging.get_logger(__name__)
_INITIAL_CAPACITY = 256
"""Tokens that a new cache has room for; it doubles whenever they are used up."""
_VARIANT_FOLDERS = {
    ValueRoute: "routes", DepthMix: "depth", Embedding: "embeddings", Normalizer: "normalizers",
    Norm: "norms",
}  # fmt: skip
"""The folders of variants that may have parameters, by the base class of their variants."""


class WakefulPreTrainedModel(PreTrainedModel):
    """Base class of the models with and without a head."""

    config_class = WakefulConfig
    config: WakefulConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _skip_keys_device_placement = ["past_key_values", "cache"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_attention_backend = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize the parameters and buffers of one module, except those that a checkpoint has
        set: the functions of `init` skip these. Transformers calls this for each module.

        `role.start` names the distribution of a parameter. A tensor without one ("defined") gets
        the value that it has in a newly built variant or rotary table. In a module that is neither,
        Transformers initializes "normal" and "defined" tensors.
        """
        if not (module._parameters or module._buffers):
            return  # most modules: looking for their initial values would take longer than loading
        values = initial_values(self._decoder, module)
        is_part_of_variant = values is not None  # or a rotary table
        if not is_part_of_variant:
            super()._init_weights(module)
        for key, tensor in (
            *module.named_parameters(recurse=False),
            *module.named_buffers(recurse=False),
        ):
            if tensor.ndim >= 2 and role_of(tensor) is None:
                mark_roles(self)  # Transformers replaced parameters, and with them their marks
            role = role_of(tensor)
            start = "defined" if role is None else role.start
            if start == "residual" or (start == "normal" and is_part_of_variant):
                init.normal_(tensor, std=deviation(self.config.model, start))
            elif start == "orthogonal":
                init.orthogonal_(tensor)
            elif start == "zeros":
                init.zeros_(tensor)
            elif values is not None:
                init.copy_(tensor, values[key])

    @property
    def _decoder(self) -> Decoder:
        return self.base_model.decoder  # pyright: ignore[reportReturnType]

    def get_input_embeddings(self) -> nn.Module:
        return self._decoder.embed

    def set_input_embeddings(self, value: nn.Module) -> None:
        self._decoder.add_module("embed", value)

    def new_cache(self, batch_size: int, capacity: int = _INITIAL_CAPACITY) -> WakefulCache:
        """Return an empty cache, to pass as `cache`, or as `past_key_values`, its older name. It
        has room for `capacity` tokens, and grows when they are used up.
        """
        return WakefulCache(self._decoder.new_cache(batch_size, capacity))

    def _resize_token_embeddings(
        self,
        new_num_tokens: int | None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Module:
        """Resize the embedding; return it. The model's value route, which may mix embeddings of
        its own into the values, gets as many rows in each of its embedding tables.

        Raises:
            WakefulError: a table of the route is not an `nn.Embedding`; nothing has changed.
        """
        route = self._decoder.route
        roles: Mapping[str, Role] = {}
        if new_num_tokens is not None or pad_to_multiple_of is not None:  # else nothing is resized
            roles = roles_of(route)
        tables: dict[str, nn.Embedding] = {}
        for weight_name, role in roles.items():
            if not role.vocabulary:  # it has no row per token
                continue
            table_name = weight_name.rpartition(".")[0]
            table = route.get_submodule(table_name)
            if not isinstance(table, nn.Embedding):
                raise WakefulError(
                    f"model.route = {route} has a row per token in its parameter {weight_name}, "
                    "which is not of an nn.Embedding: the vocabulary cannot be resized"
                )
            tables[table_name] = table
        embeddings = super()._resize_token_embeddings(
            new_num_tokens, pad_to_multiple_of, mean_resizing
        )
        for table_name, old in tables.items():
            assert isinstance(embeddings, nn.Embedding)
            new = self._get_resized_embeddings(
                old, embeddings.num_embeddings, mean_resizing=mean_resizing
            )
            new.requires_grad_(old.weight.requires_grad)
            route.set_submodule(table_name, new)
        return embeddings

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Callable[..., Any] = checkpoint,
        every_n_layers: int = 1,
    ) -> None:
        """Turn the recomputation of blocks on or off, by `gradient_checkpointing_func`.

        Raises:
            WakefulError: the function is the reentrant checkpoint, which loses gradients through
                values that layers share, or `every_n_layers` is not 1.
        """
        options = getattr(gradient_checkpointing_func, "keywords", {})  # of a `functools.partial`
        if enable and options.get("use_reentrant"):
            raise WakefulError(
                "use_reentrant = True loses the gradients of values that layers share; "
                'set gradient_checkpointing_kwargs = {"use_reentrant": False}'
            )
        if every_n_layers != 1:
            raise WakefulError(f"every_n_layers must be 1 for this model, got {every_n_layers}")
        super()._set_gradient_checkpointing(enable, gradient_checkpointing_func)


class WakefulModel(WakefulPreTrainedModel):
    """The decoder without its head: final hidden states."""

    def __init__(self, config: WakefulConfig) -> None:
        """Build the decoder, with its projections under the names that peft looks for. Where the
        configuration names an inference engine, the engine computes attention.
        """
        super().__init__(config)
        self.decoder = Decoder(config.model)
        self.decoder.add_module("head", nn.Identity())  # `WakefulForCausalLM` has the head
        name_projections(self.decoder)
        if config._attn_implementation in ENGINES:
            use_engine_attention(self.decoder, config)
        self._no_split_modules = unsplit_modules(self.decoder)  # accelerate reads this
        self.gradient_checkpointing = False
        self.post_init()

    @property
    def reads_tokens(self) -> bool:
        """True where the route has an embedding table of its own and needs `input_ids`."""
        return TOKENS in self.decoder.plan.before

    def get_decoder(self) -> "WakefulModel":
        return self

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: TransformersCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        cache: TransformersCache | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Return the final normalized hidden states (B, L, D).

        `attention_mask` (B, S) marks real tokens with 1. `position_ids` that restart inside a row
        separate packed texts, which do not attend to each other. A model whose route reads tokens
        (`reads_tokens`) takes `inputs_embeds` together with their `input_ids`. Where
        `config.num_hidden_layers` was lowered, only that many layers run. The optional hidden
        states are the inputs of all blocks and the final states.

        Raises:
            WakefulError: attention weights are requested, which are never computed; the mask or
                the cache is of another kind.
        """
        if output_attentions or (output_attentions is None and self.config.output_attentions):
            raise WakefulError(
                "attention weights are never made, so output_attentions has nothing to return; "
                "wakeful.probes measures attention without them"
            )
        has_neither = input_ids is None and inputs_embeds is None
        has_both = input_ids is not None and inputs_embeds is not None
        if has_neither or (has_both and not self.reads_tokens):
            raise WakefulError(
                "give either input_ids or inputs_embeds (both where a route reads tokens)"
            )
        x = self.decoder.embed(input_ids) if inputs_embeds is None else inputs_embeds
        used_cache = self._choose_cache(past_key_values if cache is None else cache, use_cache, x)
        slots = None if used_cache is None else used_cache.slots
        start = 0 if slots is None else slots.length
        if slots is not None:
            slots.reserve(start + x.shape[1])
        visibility: Visible = None, position_ids, None
        if not self.decoder.by_engine:
            visibility = token_visibility(attention_mask, position_ids, start, x)
        valid, places, documents = visibility
        self.decoder.run_layers = self.config.num_hidden_layers
        self.decoder.checkpoint_activations = self.gradient_checkpointing and self.training
        if self.gradient_checkpointing:
            self.decoder.recompute = self._gradient_checkpointing_func
        states: list[Tensor] = []
        returns_states = output_hidden_states or (
            output_hidden_states is None and self.config.output_hidden_states
        )
        blocks = dict(enumerate(self.decoder.blocks)) if returns_states else {}
        collect_inputs = hooked(blocks, before=lambda _, inputs: states.append(inputs[0]))
        with collect_inputs, offloaded_weights_loaded(self.decoder):
            x = self.decoder.stream(
                x, tokens=input_ids, cache=slots, valid=valid, places=places, documents=documents
            )
        return BaseModelOutputWithPast(
            last_hidden_state=x,  # pyright: ignore[reportArgumentType]
            hidden_states=(*states, x) if returns_states else None,
            **{CACHE: used_cache},  # pyright: ignore[reportArgumentType]
        )

    def _choose_cache(
        self, cache: TransformersCache | None, use_cache: bool | None, x: Tensor
    ) -> WakefulCache | None:
        """Return the cache of a forward pass over x (B, L, D): the caller's `cache`; without one a
        new cache, if `use_cache` or, outside of training, the configuration asks for it; else None.

        While activations are recomputed in training there is no cache.

        Raises:
            WakefulError: the caller's cache is of another class.
        """
        if self.gradient_checkpointing and self.training:
            if use_cache:
                _logger.warning_once("use_cache=True is ignored while activations are recomputed")
            return None
        if cache is not None:
            if not isinstance(cache, WakefulCache):
                raise WakefulError(
                    f"{CACHE} is a {type(cache).__name__}, and this model has a cache of "
                    "its own: pass none, or model.new_cache(batch_size)"
                )
            return cache
        if use_cache or (use_cache is None and self.config.use_cache and not self.training):
            return self.new_cache(x.shape[0], max(_INITIAL_CAPACITY, x.shape[1]))
        return None


class WakefulForCausalLM(HasRoles, RoleMarks, WakefulPreTrainedModel, GenerationMixin):
    """The decoder with its head."""

    _tied_weights_keys = {"lm_head.weight": "model.decoder.embed.weight"}  # noqa: RUF012

    def __init__(self, config: WakefulConfig) -> None:
        super().__init__(config)
        self.model = WakefulModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def roles(self) -> Mapping[str, Role]:
        return {"lm_head.weight": HEAD}

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """Return False: `generate()` gets our cache from `_prepare_cache_for_generation`."""
        return False

    def _prepare_cache_for_generation(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: GenerationMode,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """Put our cache, with room for the whole text, among the arguments (`model_kwargs`) that
        `generate()` calls the model with, unless the caller gave a cache or wants none.
        """
        super()._prepare_cache_for_generation(  # pyright: ignore[reportAttributeAccessIssue]
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )
        if model_kwargs.get(CACHE) is None and generation_config.use_cache:
            # `generate()` repeats each prompt this often.
            rows_per_prompt = max(
                generation_config.num_beams or 1, generation_config.num_return_sequences or 1
            )
            model_kwargs[CACHE] = self.new_cache(batch_size * rows_per_prompt, max_cache_length)

    def prepare_inputs_for_generation(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, input_ids: Tensor, *args: Any, inputs_embeds: Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """Return the model's inputs for one step of `generate()`.

        For a prompt of embeddings, Transformers drops the prompt's ids. They are added again for a
        model whose value route reads tokens, if the caller gave an id for each embedding.
        """
        kwargs["inputs_embeds"] = inputs_embeds
        base: Any = super()
        inputs = base.prepare_inputs_for_generation(input_ids, *args, **kwargs)
        embeds = inputs.get("inputs_embeds")
        if embeds is not None and self.model.reads_tokens and input_ids.shape == embeds.shape[:2]:
            inputs["input_ids"] = input_ids
        return inputs

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Raise `WakefulError`, always: Transformers calls this for `generate_batch`, which needs a
        paged cache, and our layers have none.
        """
        raise WakefulError(
            "generate_batch keeps keys and values in pages that this model does not fill: call "
            "generate() with a padded batch, or serve the model by vLLM"
        )

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: TransformersCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: TransformersCache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits (B, L, V) and, given `labels`, the next-token loss.

        `logits_to_keep` > 0 keeps only those of the last tokens; a tensor keeps those it indexes.
        Other keyword arguments go to the loss function (`num_items_in_batch`).
        """
        outputs: BaseModelOutputWithPast = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=past_key_values if cache is None else cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
        )
        hidden = outputs.last_hidden_state
        assert hidden is not None
        positions = logits_to_keep
        if isinstance(logits_to_keep, int):
            positions = slice(-logits_to_keep, None)  # for 0 from -0, the first position, on
        logits = self._decoder.capped(self.lm_head(hidden[:, positions]))
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            **{CACHE: outputs.get(CACHE)},  # pyright: ignore[reportArgumentType]
        )


def as_transformers(decoder: Decoder, *, end_of_text: int | None = None) -> WakefulForCausalLM:
    """Wrap a decoder as our Transformers class, which shares its parameters and quantized layers,
    and is in training mode where the decoder is.

    `generate()` stops at the token `end_of_text`, if it is not None.
    """
    config = WakefulConfig.of(decoder.config, eos_token_id=end_of_text)
    with torch.device("meta"):
        model = WakefulForCausalLM(config)
    modules = decoder.named_modules(remove_duplicate=False)
    # Only quantized layers have a scheme.
    quantized = {name: module for name, module in modules if hasattr(module, "scheme")}
    # The new model has each projection inside a module ("attention.query.q_proj", for peft). A
    # quantized layer takes the place of that whole module, and keeps the decoder's name.
    for name, module in quantized.items():
        hf_name = "lm_head" if name == "head" else f"model.decoder.{name}"
        parent, _, leaf = hf_name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, module)
    state: dict[str, Tensor] = {}
    for name, tensor in decoder.state_dict(keep_vars=True).items():
        parent, _, leaf = name.rpartition(".")
        inner_name = name if parent in quantized else projection_name(name)
        hf_name = f"lm_head.{leaf}" if parent == "head" else f"model.decoder.{inner_name}"
        state[hf_name] = tensor
    model.load_state_dict(state, assign=True)
    model.to(decoder.embed.weight.device)  # pyright: ignore[reportArgumentType]  only buffers move
    return model.train(decoder.training)


def initial_values(decoder: Decoder, module: nn.Module) -> Mapping[str, Tensor] | None:
    """Return the initial values, by name, of the parameters and buffers of a module that is a
    rotary table or part of a variant (route, norm, normalizer ...); None for another module.
    """
    if isinstance(module, Rotary):
        cos, sin = module.table()
        return {"cos": cos, "sin": sin}
    for variant in decoder.modules():
        folders = [_VARIANT_FOLDERS[base] for base in _VARIANT_FOLDERS if isinstance(variant, base)]
        if not folders:  # not a variant
            continue
        # The module's name inside the variant: "" for the variant itself.
        name = next((name for name, part in variant.named_modules() if part is module), None)
        if name is not None:
            new_module = _rebuild_variant(decoder, folders[0], variant).get_submodule(name)
            return dict(new_module.named_parameters()) | dict(new_module.named_buffers())
    return None


def _rebuild_variant(decoder: Decoder, folder: str, variant: nn.Module) -> nn.Module:
    """Build one of a decoder's variants again, with its initial values. `folder` is where wakeful
    has the variants of its kind, such as "routes".
    """
    shape = decoder.config.shape
    with fixed_seed():  # the decoder's own seed: random constants come out the same
        rebuilt = build(folder, str(variant))  # `str` returns the expression that it was built from
        if isinstance(variant, ValueRoute):
            rebuilt.attach(shape, range(shape.num_layers))
        else:
            rebuilt.attach(variant.spec if isinstance(variant, Norm) else shape)
    return rebuilt
