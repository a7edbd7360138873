"""The decoder: embeddings, the layer loop, the head.

Shapes: B batch, L new tokens, S all tokens so far, D width, V vocabulary, N layers.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from wakeful.config.model import VARIANTS, ModelConfig, RotationName
from wakeful.depth.base import DepthMix, SublayerMix
from wakeful.embeddings import Embedding
from wakeful.errors import WakefulError
from wakeful.model.attend import causal_mask
from wakeful.model.attention import Attention, Flow
from wakeful.model.block import BLOCKS, MLP, Block, ParallelBlock, SublayerBlock
from wakeful.model.cache import Cache, Slot
from wakeful.model.chunked import MANY, cross_entropy_of_rows
from wakeful.model.positions import CosSin, Rotary
from wakeful.normalizers.base import Normalizer
from wakeful.norms.base import Norm, NormSite, NormSpec
from wakeful.placements import Placement
from wakeful.ropes import RopeScaling
from wakeful.routes.base import EMBEDDED, TOKENS, Read, RoutePlan, ValueRoute
from wakeful.tracing import is_readable, is_transformed
from wakeful.variants import build, expression_of
from wakeful.variants.roles import HEAD, TABLE, HasRoles, Role, RoleMarks, role_of

IGNORED = -100
"""Target of positions that the loss does not count."""


def admit(config: ModelConfig) -> None:
    """Check the expressions of a configuration's variants, and import the modules of a user's own
    variants, so that the decoder can be built.

    Call this only for a configuration that the user wrote, never for one read from a run or an
    export: importing a module executes it.

    Raises:
        WakefulError: an expression names no variant, or a module that cannot be imported.
    """
    for field, folder in VARIANTS.items():
        build(folder, getattr(config, field), imports=True)


@contextmanager
def fixed_seed() -> Iterator[None]:
    """Make the random constants in a variant's definition the same in every model and process.

    Inside the context torch's CPU generator has the seed 0; its state is restored at the end.
    """
    generator = torch.default_generator
    state = generator.get_state()
    generator.manual_seed(0)
    token = _DEFINING.set(True)  # `without_matrices` gives memory to tensors made here
    try:
        yield
    finally:
        _DEFINING.reset(token)
        generator.set_state(state)


_DEFINING = ContextVar("defining", default=False)
"""True while a variant creates the tensors of its definition."""


class without_matrices(TorchFunctionMode):
    """Build decoders whose matrices are on the meta device, without memory.

    Those are the tables, projections, MLPs and head, whose values are drawn or read afterwards.
    Parameters, buffers and scales that variants define are allocated as in any decoder.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch function, and return its result.

        A matrix that it creates is put on the meta device, where it has no memory, unless a device
        is given or the matrix belongs to a variant's definition (inside `fixed_seed`).
        """
        kwargs = kwargs or {}
        # torch's layers allocate their weights by torch.empty((rows, columns), ...).
        size = args[0] if func is torch.empty and len(args) == 1 else ()
        is_matrix = isinstance(size, tuple) and len(size) == 2
        if is_matrix and kwargs.get("device") is None and not _DEFINING.get():
            kwargs = kwargs | {"device": "meta"}
        return func(*args, **kwargs)


class Blocks(nn.ModuleList):
    """A list of blocks, typed as such."""

    if TYPE_CHECKING:

        def __iter__(self) -> Iterator[Block]: ...


class Decoder(HasRoles, RoleMarks, nn.Module):
    """A causal language model, described by a `ModelConfig`.

    Variants may be given as objects instead of the configuration's expressions. The decoder builds
    its own from their expressions, which its configuration keeps, so one object may serve several
    decoders. A class from outside the package must be in a module that is already imported.

    Raises:
        WakefulError: a variant is unknown, is not one of its kind, or does not fit this shape.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        route: ValueRoute | str | None = None,
        depth: DepthMix | str | None = None,
        normalizer: Normalizer | str | None = None,
        norm: Norm | str | None = None,
        placement: Placement | str | None = None,
        rope: RopeScaling | str | None = None,
        embedding: Embedding | str | None = None,
    ) -> None:
        """Build the model that a configuration describes; an argument, a variant or its expression,
        replaces the configuration's field of the same name.
        """
        arguments = locals()  # an argument has the name of its field
        super().__init__()
        expressions: dict[str, str] = {}
        for field, folder in VARIANTS.items():
            part = arguments[field]
            if part is not None:
                expressions[field] = part if isinstance(part, str) else expression_of(folder, part)
        config = dataclasses.replace(config, **expressions)
        shape = config.shape
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.width)
        if config.positions == "learned":
            self.positions = nn.Embedding(config.max_length, config.width)
        if config.positions == "rotary":
            make_rotary = partial(
                Rotary, config.rotary_width or shape.head_width, config.max_length
            )
            self.rotary = make_rotary(theta=config.rope_theta, scaling=build("ropes", config.rope))
            if config.local_layers and config.local_theta:
                self.local_rotary = make_rotary(theta=config.local_theta)
        self.route: ValueRoute = build("routes", config.route)
        self.depth: DepthMix = build("depth", config.depth)
        self.embedding: Embedding = build("embeddings", config.embedding)
        # Each is seeded anew: its random constants do not depend on the variants before it.
        with fixed_seed():
            self.embedding.attach(shape)
        with fixed_seed():
            self.plan = RoutePlan(self.route, shape)
        self._check_shared_rotations()
        with fixed_seed():
            self.depth.attach(shape)
        self.placement: Placement = build("placements", config.placement)
        self.blocks = Blocks(self._block(layer) for layer in range(shape.num_layers))
        self.norm = self._norm("final", shape.num_layers)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight
        self.run_layers = shape.num_layers
        """Number of layers that run, from the first: fewer for an early exit."""
        self.by_engine = False
        """True if a serving engine computes attention and its masks; its rows hold many texts."""
        self.checkpoint_activations = False
        """Recompute each block in the backward pass instead of keeping its activations."""
        self.recompute: Callable[..., Any] = partial(checkpoint, use_reentrant=False)
        """Function that recomputes a block. The reentrant form of `checkpoint` would lose the
        tensors that layers share."""
        self._kept_hiddens = frozenset[int]().union(
            *(self.depth.reads(number) for number in range(1, shape.num_layers + 1))
        )
        """Numbers of the layers whose outputs the depth mix reads later; 0 is the embedding."""

    def forward(
        self,
        tokens: Int[Tensor, "B L"],
        *,
        cache: Cache | None = None,
        valid: Bool[Tensor, "B S"] | None = None,
        documents: Int[Tensor, "B L"] | None = None,
    ) -> Float[Tensor, "B L V"]:
        """Return the logits of the next token after each of the new tokens.

        Args:
            tokens: token ids.
            cache: keys and values of earlier tokens; those of the new tokens are added to it.
            valid: which of all S tokens are real and not padding (left padding in a batch);
                positions are counted over real tokens.
            documents: the number of each token's document where a row holds several: a run of
                equal numbers is one document. Tokens see their own document only, and positions
                start at 0 in each, so that every document is computed as if it were alone.
        """
        return self.logits(self.hidden(tokens, cache=cache, valid=valid, documents=documents))

    def logits(self, hidden: Float[Tensor, "*B D"]) -> Float[Tensor, "*B V"]:
        """Return the logits of final normalized hidden states, capped where the model caps them."""
        return self.capped(self.head(hidden))

    def capped(self, logits: Float[Tensor, "*B V"]) -> Float[Tensor, "*B V"]:
        """Return c · tanh(x / c) of the head's outputs x, c = `logit_cap`; x where that is 0."""
        cap = self.config.logit_cap
        return cap * torch.tanh(logits / cap) if cap else logits

    def loss(
        self,
        tokens: Int[Tensor, "B L"],
        targets: Int[Tensor, "B L"],
        *,
        reduction: str = "mean",
        documents: Int[Tensor, "B L"] | None = None,
    ) -> Tensor:
        """Return the cross-entropy in nats of `targets`; targets of −100 are not counted.

        `reduction` is "mean" over the counted targets, "sum", or "none" for (B, L). The mean over
        many logits can be differentiated only once. `documents`: see `forward`.
        """
        logits = self(tokens, documents=documents)
        # To save memory, the mean over many logits is computed a few rows at a time.
        by_rows = reduction == "mean" and logits.requires_grad and logits.numel() >= MANY
        # A compiler fuses the loss itself, and `torch.func` cannot transform a loss by rows.
        if by_rows and not torch.compiler.is_compiling() and not is_transformed():
            targets = targets.flatten()
            return cross_entropy_of_rows(logits.flatten(0, 1), targets, targets.ne(IGNORED))
        return cross_entropy(logits, targets, reduction=reduction)

    def hidden(
        self,
        tokens: Int[Tensor, "B L"],
        *,
        cache: Cache | None = None,
        valid: Bool[Tensor, "B S"] | None = None,
        documents: Int[Tensor, "B L"] | None = None,
    ) -> Float[Tensor, "B L D"]:
        """Return the final normalized hidden states, as the head reads them. Arguments: see
        `forward`.
        """
        x = self.embed(tokens)
        return self.stream(x, tokens=tokens, cache=cache, valid=valid, documents=documents)

    def stream(
        self,
        x: Float[Tensor, "B L D"],
        *,
        tokens: Int[Tensor, "B L"] | None = None,
        cache: Cache | None = None,
        valid: Bool[Tensor, "B S"] | None = None,
        places: Int[Tensor, "B L"] | None = None,
        documents: Int[Tensor, "B L"] | None = None,
    ) -> Float[Tensor, "B L D"]:
        """Return the final normalized hidden states of embedded tokens `x`.

        `tokens` are the ids of the embedded tokens, for routes that read ids. `places` are the
        tokens' positions; by default they count the `valid` tokens, or those of each document.
        `cache`, which the new tokens are added to, `valid` and `documents` are as in `forward`.

        Raises:
            WakefulError: there are more tokens than the context, masks contradict each other, or a
                route reads token ids and none are given.
        """
        x, flow = self.before_blocks(
            x, tokens=tokens, cache=cache, valid=valid, places=places, documents=documents
        )
        x = self._run_blocks(x, flow)
        if cache is not None:
            cache.advance(x.shape[1])
        return self.after_blocks(x)

    def after_blocks(self, x: Float[Tensor, "B L D"]) -> Float[Tensor, "B L D"]:
        """Return the head's input, given the last block's output."""
        return self.embedding.out(self.norm(x))

    def before_blocks(
        self,
        x: Float[Tensor, "B L D"],
        *,
        tokens: Int[Tensor, "B L"] | None = None,
        cache: Cache | None = None,
        valid: Bool[Tensor, "B S"] | None = None,
        places: Int[Tensor, "B L"] | None = None,
        documents: Int[Tensor, "B L"] | None = None,
    ) -> tuple[Float[Tensor, "B L D"], Flow]:
        """Return the first block's input for embedded tokens `x`, and the state that all blocks
        share: masks, rotary angles, the cache, and the ids or embeddings that routes read.

        `valid` (of the tokens in the cache and the new ones) is False at padding. `places` are the
        new tokens' positions, `documents` the numbers of their documents, `tokens` their ids; see
        `stream`.

        Raises:
            WakefulError: see `stream`.
        """
        start = 0 if cache is None else cache.length  # the new tokens are those from start to end
        end = start + x.shape[1]
        positions_given = places is not None
        keep = None  # the mask of layers without a window: which keys a query sees; None for causal
        if valid is not None:
            keep = self._mask_padding(start, end, valid)
            if places is None:  # count real tokens; padding before the first one gets 0
                places = (valid.long().cumsum(1) - 1).clamp_min(0)[:, start:end]
            else:  # positions of padding are arbitrary
                places = places.masked_fill(~valid[:, start:end], 0)
        if documents is not None:
            if valid is not None or start:
                raise WakefulError(
                    "documents are for whole rows: give them without valid and without a filled "
                    "cache (padding can be a document of its own)"
                )
            is_first = begins_of(documents)
            document_number = is_first.cumsum(1)  # a number of `documents` may occur again
            same_document = document_number.unsqueeze(2) == document_number.unsqueeze(1)
            keep = causal_mask(end, end, x.device) & same_document
            if places is None:
                places = _positions_in_documents(is_first)
        if positions_given or end > self.config.context:  # else counted positions fit the context
            self._check_positions(places, end)
        near = self._local_mask(start, end, keep, x.device)  # `keep` within local layers' window
        stored = self.config.stored_prefix
        if stored:
            keep, near = _show_prefix(keep, stored), _show_prefix(near, stored)
            places = None if places is None else places + stored
        # Rows of the position tables, where the stored prefix has the first ones.
        table_rows = slice(start + stored, end + stored) if places is None else places
        x = self.embedding.into(x)  # the embedding variant, such as a scale or a projection
        if self.config.positions == "learned":
            x = x + self.positions.weight[table_rows]
        memory = self._initial_memory(tokens, x) if self.plan.before else {}
        rotations = self._rotations(table_rows)
        return x, Flow(memory=memory, cache=cache, rotations=rotations, keep=keep, near=near)

    def new_cache(self, batch_size: int, capacity: int) -> Cache:
        """Return an empty cache for `batch_size` sequences of up to `capacity` tokens."""
        return Cache(
            self.cache_slots,
            self.config.shape,
            batch_size=batch_size,
            capacity=capacity,
            dtype=self.embed.weight.dtype,
            prefix_length=self.config.stored_prefix,
        )

    @property
    def cache_slots(self) -> list[Slot]:
        """The slots of a cache: ("keys", layer) for each layer that computes its own keys, and
        ("values", layer) for each that computes its own values, instead of another layer's.
        """
        slots: list[Slot] = []
        for layer in range(self.config.num_layers):
            if self.plan.owns("key", layer):
                slots.append(("keys", layer))
            if self.plan.owns("value", layer):
                slots.append(("values", layer))
        return slots

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes by which the cache grows with each token of a sequence."""
        shape = self.config.shape
        # A slot holds the keys or the values of one layer, in the dtype of the embedding.
        slot_bytes = shape.num_kv_heads * shape.head_width * self.embed.weight.element_size()
        return len(self.cache_slots) * slot_bytes

    def roles(self) -> Mapping[str, Role]:
        return {"embed.weight": TABLE, "positions.weight": TABLE, "head.weight": HEAD}

    def num_parameters(self) -> dict[str, int]:
        """Return the numbers of parameters: "total"; "embedding", those of embeddings, positions
        and head; and "non_embedding", the rest.
        """
        total, embedding = 0, 0
        for parameter in self.parameters():
            role = role_of(parameter)
            total += parameter.numel()
            if role is not None and role.vocabulary:  # an axis counts tokens or positions
                embedding += parameter.numel()
        return {"total": total, "embedding": embedding, "non_embedding": total - embedding}

    def _block(self, layer: int) -> Block:
        """Build one layer's block, whose kind depends on the placement of norms, `model.parallel`
        and the depth mix.

        Raises:
            WakefulError: two of these three exclude each other.
        """
        config, shape = self.config, self.config.shape
        normalizer: Normalizer = build("normalizers", config.normalizer)
        with fixed_seed():
            normalizer.attach(shape)
        norm = partial(self._norm, layer=layer)
        head_norm = norm if config.qk_norm else lambda _: nn.Identity()
        attention = Attention(config, layer, self.plan, normalizer, head_norm)
        mlp = MLP(
            config.mlp, config.width, config.mlp_width, bias=config.bias, turned=config.mlp_rotation
        )
        placement = self.placement.at(layer, shape.num_layers)
        if isinstance(self.depth, SublayerMix):
            if placement == "over" or config.parallel:  # "over": Norm(x + F x)
                conflict = f"model.placement = {self.placement}"
                if config.parallel:
                    conflict = "model.parallel"
                raise WakefulError(
                    f"model.depth = {self.depth} decides how each sublayer's output is added, and "
                    f"so does {conflict}: keep one of them"
                )
            return SublayerBlock(
                norm, attention, mlp, layer=layer, depth=self.depth, where=placement
            )
        if config.parallel and placement != "before":
            raise WakefulError(
                f"model.parallel knows model.placement = pre alone, got {self.placement}"
            )
        make_block = ParallelBlock if config.parallel else BLOCKS[placement]
        return make_block(norm, attention, mlp)

    def _norm(self, part: NormSite, layer: int) -> Norm:
        """Build a layer's norm at a site, such as "attention", "query" or "final".

        Queries and keys always have RMSNorm: over each head, or (`qk_norm_whole`) over all heads
        together.
        """
        config, shape = self.config, self.config.shape
        num_heads = {"query": shape.num_heads, "key": shape.num_kv_heads}.get(part)
        width = shape.width
        if num_heads is not None:
            width = shape.head_width * (num_heads if config.qk_norm_whole else 1)
        norm: Norm = build("norms", config.norm if num_heads is None else "rmsnorm")
        spec = NormSpec(
            part=part,
            layer=layer,
            num_layers=config.num_layers,
            width=width,
            eps=config.norm_eps,
            bias=config.bias,
        )
        with fixed_seed():
            norm.attach(spec)
        return norm

    def _run_blocks(self, x: Tensor, flow: Flow) -> Tensor:
        """Run the first `run_layers` blocks on the embedded tokens `x`; return the final norm's
        input.

        Tensors that later layers read are added to `flow.memory`. The depth mix decides what each
        block reads. A `SublayerMix` acts inside the blocks, which pass on its state. Any other acts
        after each block, on the block's output and those of earlier blocks (`hiddens`).
        """
        if isinstance(self.depth, SublayerMix):
            x, state = self.depth.begin(x)
            for block in islice(self.blocks, self.run_layers):
                x, shared, state = self._run(block, x, flow, state)
                flow.memory.update(shared)
            return x
        hiddens = {0: x} if 0 in self._kept_hiddens else {}  # what the mix reads later, by number
        x = self.depth.first(x)
        for number, block in enumerate(islice(self.blocks, self.run_layers), start=1):
            x, shared = self._run(block, x, flow)
            flow.memory.update(shared)
            if number in self._kept_hiddens:
                hiddens[number] = x
            x = self.depth(number, x, hiddens)
        return x

    def _run(self, block: nn.Module, *inputs: Any) -> Any:
        """Return a block's outputs; with `checkpoint_activations` backward will recompute them."""
        if self.checkpoint_activations and torch.is_grad_enabled():
            return self.recompute(block, *inputs)
        return block(*inputs)

    def _initial_memory(self, tokens: Tensor | None, x: Tensor) -> dict[Read, Tensor]:
        """Return what the routes read of the model's input: embeddings `x`, token ids, or both.

        Raises:
            WakefulError: a route reads token ids, and none are given.
        """
        memory: dict[Read, Tensor] = {}
        if EMBEDDED in self.plan.before:
            memory[EMBEDDED] = x
        if TOKENS in self.plan.before:
            if tokens is None:
                raise WakefulError(
                    f"model.route = {self.route} reads token ids: give tokens (input_ids), beside "
                    "embeddings too"
                )
            memory[TOKENS] = tokens
        return memory

    def _rotations(self, positions: slice | Tensor) -> dict[RotationName, CosSin]:
        """Return the cosines and sines at `positions` from every RoPE table that a layer uses, by
        the table's name.
        """
        rotations: dict[RotationName, CosSin] = {}
        for name in map(self.config.rope_table_name, range(self.config.num_layers)):
            if name and name not in rotations:
                rotations[name] = self.get_submodule(name)(positions)
        return rotations

    def _check_shared_rotations(self) -> None:
        """Raise `WakefulError` if a layer reads queries or keys of another layer, and the two
        layers use different RoPE tables.
        """
        table_name = self.config.rope_table_name
        for layer, reads in enumerate(self.plan.reads):
            for read in reads:
                is_rotated = read.kind in ("query", "key", "keys")
                if is_rotated and table_name(read.layer) != table_name(layer):
                    raise WakefulError(
                        f"model.route = {self.route}: layer {layer} reads queries or keys of layer "
                        f"{read.layer}, whose positions are of another kind (model.local_layers = "
                        f"{list(self.config.local_layers)})"
                    )

    def _local_mask(
        self, start: int, end: int, keep: Tensor | None, device: torch.device
    ) -> Tensor | None:
        """Return the attention mask of local layers, whose queries see only the last keys (a
        window); None if all keys are within it, or if a serving engine makes the masks.

        `keep` is the mask of the other layers, None for a causal one. The queries are the tokens
        from `start` to `end`.
        """
        window = self.config.window
        if not self.config.has_short_window or end <= window or self.by_engine:
            return None
        if keep is None:
            keep = causal_mask(end - start, end, device)
        query = torch.arange(start, end, device=device).unsqueeze(1)
        return keep & (query - torch.arange(end, device=device) < window)

    def _mask_padding(self, start: int, end: int, valid: Tensor) -> Tensor:
        """Return the causal mask without padding: keys of tokens where `valid` is False are hidden.
        The queries are the tokens from `start` to `end`.

        Raises:
            WakefulError: `valid` does not have one entry for each of the `end` tokens.
        """
        if valid.shape[1] != end:
            raise WakefulError(f"valid covers {valid.shape[1]} tokens, but there are {end}")
        return causal_mask(end - start, end, valid.device) & valid.unsqueeze(1)

    def _check_positions(self, places: Tensor | None, end: int) -> None:
        """Raise `WakefulError` if a position in `places` is outside the context.

        A row of given positions may be longer than the context, as it can hold several texts. If
        `places` is None, the caller has found that the `end` tokens do not fit the context.
        """
        context = self.config.context
        if self.by_engine:  # the engine limits its texts itself
            return
        if places is None:
            raise WakefulError(f"{end} tokens do not fit the model's context of {context}")
        if is_readable(places):  # not while a compiler traces them
            first, last = (int(position) for position in places.aminmax())
            if first < 0 or last >= context:
                raise WakefulError(
                    f"positions must lie between 0 and {context - 1}, in the model's context of "
                    f"{context} tokens; got {first} to {last}"
                )


def _show_prefix(mask: Tensor | None, num_tokens: int) -> Tensor | None:
    """Return an attention mask with `num_tokens` more columns in front, all True: every query sees
    the stored prefix, even past a local layer's window.
    """
    return None if mask is None else F.pad(mask, (num_tokens, 0), value=True)


def begins_of(documents: Int[Tensor, "B L"]) -> Bool[Tensor, "B L"]:
    """Return which tokens are the first of their document, given the documents' numbers."""
    before_first = documents[:, :1] - 1  # another number: the row's first token begins a document
    return documents.diff(dim=1, prepend=before_first) != 0


def _positions_in_documents(is_first: Bool[Tensor, "B L"]) -> Int[Tensor, "B L"]:
    """Return each token's position in its document, given which tokens are the first of one."""
    index = torch.arange(is_first.shape[1], device=is_first.device)
    # The largest index of a first token so far is that of the current document's.
    index_of_first = torch.where(is_first, index, 0).cummax(1).values
    return index - index_of_first


def cross_entropy(
    logits: Float[Tensor, "B L V"], targets: Int[Tensor, "B L"], *, reduction: str = "mean"
) -> Tensor:
    """Return −log softmax(logits)_target in nats, computed in float32 or wider.

    `reduction` is "mean" or "sum" over the counted targets, or "none" for (B, L) with 0 where a
    target is not counted (`IGNORED`).
    """
    if logits.dtype != torch.float64:
        logits = logits.float()
    loss = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction=reduction
    )
    return loss.view_as(targets) if reduction == "none" else loss
