"""A loaded model with its tokenizer, as `load` returns it."""

import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from wakeful.data.encoding import Encoder
from wakeful.data.tokenizer import (
    CONFIG,
    GENERATION,
    StreamDecoder,
    Tokenizer,
    read_companion_files,
    special_ids_around,
    token_ids,
)
from wakeful.errors import WakefulError
from wakeful.guard import wrap_errors
from wakeful.hf.agreement import Agreement, compare_logits
from wakeful.hf.checkpoint_reader import UNPACKED, quantization_method
from wakeful.hf.weights_in import convert_hf_model
from wakeful.loading.chat import Turn, user_turn
from wakeful.loading.hf_forward import HFForward
from wakeful.model.decoder import Decoder
from wakeful.model.evaluating import evaluating
from wakeful.model.generate import Sampling, continuation, generate_tokens
from wakeful.probes.running import as_decoder, blocks_of, is_quantized, logits_of
from wakeful.switches import default_torch_state

Bos = Literal["auto", "on", "off"]
"""BOS before a text: as the model's tokenizer adds it by default ("auto"), always or never."""
BOS = ("auto", "on", "off")
AnyTokenizer = Tokenizer | PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Model:
    """A causal language model of any class, run in evaluation mode, with its tokenizer."""

    name: str
    module: nn.Module
    """Our `Decoder`, or a causal language model of Transformers."""
    context: int
    """Context length, in tokens."""
    architecture: str
    path: Path | None = None
    """Run directory, folder or GGUF file that it was read from."""
    step: int = 0
    """Step of the checkpoint, for a run."""
    stored: torch.dtype | None = None
    """Type of most weights in the files that the model, or its source, was read from."""
    types: Mapping[str, torch.dtype] | None = field(default_factory=dict)
    """Types of the other weights, by their name with N for each number; None to round all weights
    to `stored`."""
    agreement: Agreement | None = None
    """For our decoder, the difference of its logits from those of the Transformers model that it
    was converted from."""
    read_tokenizer: Callable[[], AnyTokenizer]
    generation_source: "Model | None" = None
    """Model that it was derived from, whose generation settings it has."""

    def __repr__(self) -> str:
        return f"<Model {self.name}: {self.architecture}, context {self.context}>"

    @cached_property
    def tokenizer(self) -> AnyTokenizer:
        """The model's tokenizer: ours for a run, else that of Transformers.

        Raises:
            WakefulError: the model has none.
        """
        return self.read_tokenizer()

    @cached_property
    def wakeful_tokenizer(self) -> Tokenizer:
        """The tokenizer as our `Tokenizer`, which encodes special tokens in a text as plain text.

        Raises:
            WakefulError: it has no tokenizer.json.
        """
        tokenizer = self.tokenizer
        if isinstance(tokenizer, Tokenizer):
            return tokenizer
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise WakefulError(
                f"the tokenizer of {self.name} is a {type(tokenizer).__name__} without a "
                "tokenizer.json"
            )
        with tempfile.TemporaryDirectory() as folder:  # converted by way of its files
            self.save_tokenizer(Path(folder))
            return Tokenizer.load(folder, require_end=False)

    @property
    def bos(self) -> int | None:
        """Token that begins a sequence; None where the tokenizer has none."""
        tokenizer = self.tokenizer
        return tokenizer.bos if isinstance(tokenizer, Tokenizer) else tokenizer.bos_token_id  # pyright: ignore

    @property
    def end(self) -> int | None:
        """Token that ends a text; None where the tokenizer has none."""
        tokenizer = self.tokenizer
        return tokenizer.end if isinstance(tokenizer, Tokenizer) else tokenizer.eos_token_id  # pyright: ignore

    @cached_property
    def ends(self) -> frozenset[int]:
        """Tokens that end generation: the tokenizer's, and those of the generation settings."""
        named = token_ids(self.generation, "eos_token_id")
        return frozenset(token for token in (self.end, *named) if token is not None)

    @cached_property
    def generation(self) -> dict[str, Any]:
        """Generation settings: those of generation_config.json or, without that file, the
        configuration's `eos_token_id` if it is not the tokenizer's own end token.

        A model derived from another (`generation_source`) has that one's.
        """
        if self.generation_source is not None:
            return self.generation_source.generation
        tokenizer, settings = self.tokenizer, dict[str, Any]()
        generation_config = getattr(self.module, "generation_config", None)
        if isinstance(generation_config, GenerationConfig):  # a model of Transformers
            settings = json.loads(generation_config.to_json_string())
            settings.pop("transformers_version", None)
            # Without a file, Transformers takes these settings from the configuration.
            if not settings.pop("_from_model_config", False):
                return settings
        elif isinstance(tokenizer, Tokenizer):
            return json.loads(tokenizer.companion_files.get(GENERATION, "{}"))
        elif self.path is not None:
            files, config_file = read_companion_files(self.path), self.path / "config.json"
            if GENERATION in files:
                return json.loads(files[GENERATION])
            settings = json.loads(config_file.read_text("utf-8")) if config_file.is_file() else {}
        # Without a file, only the end tokens of the configuration count.
        ends = settings.get("eos_token_id")
        return {} if ends in (None, self.end) else {"eos_token_id": ends}

    @cached_property
    def opening(self) -> list[int]:
        """Tokens that the model's tokenizer adds before a text by default.

        BOS is left out where the model has a stored prefix, which stands in its place.
        """
        tokenizer = self.tokenizer
        if isinstance(tokenizer, Tokenizer):
            added = tokenizer.opening
        else:  # those before any text, here "a"
            text_ids = tokenizer.encode("a", add_special_tokens=False)
            added, _ = special_ids_around(tokenizer.encode("a"), text_ids)
        decoder = as_decoder(self.module)
        if decoder is None:
            # An export of ours that Transformers loaded has our configuration as `parts`.
            parts = getattr(self.module.config, "parts", {})
            prefix_length = parts.get("stored_prefix", 0)  # pyright: ignore
        else:
            prefix_length = decoder.config.stored_prefix
        return [token for token in added if token != self.bos] if prefix_length else added

    @property
    def adds_bos(self) -> bool:
        """True where the model's tokenizer begins a text with BOS by default."""
        return self.bos in self.opening

    @property
    def device(self) -> torch.device:
        """Device of the first weight."""
        return next(self.module.parameters()).device

    @property
    def is_quantized(self) -> bool:
        """True where layers or the cache are quantized, in memory or in the model's files."""
        config = getattr(self.module, "config", None)
        method = quantization_method(config) if isinstance(config, PreTrainedConfig) else ""
        # Transformers unpacks weights of the methods UNPACKED as it loads them.
        return method not in ("", *UNPACKED) or is_quantized(self.module)

    @property
    def blocks(self) -> nn.ModuleList:
        """The model's list of Transformer blocks."""
        return blocks_of(self.module)

    def logits(self, tokens: Int[Tensor, "B L"]) -> Float[Tensor, "B L V"]:
        """Return the logits of the next token at every position."""
        with evaluating(self.module):
            return logits_of(self.module, tokens)

    def start_tokens(self, bos: Bos = "auto") -> list[int]:
        """Return the tokens to put before a text: those of the tokenizer ("auto"), BOS ("on"), or
        none ("off").

        Raises:
            WakefulError: `bos` is none of these, or "on" for a model without a BOS token, or the
                model has no embedding of a token.
        """
        if bos not in BOS:
            raise WakefulError(f"bos = {bos!r}: must be one of {', '.join(BOS)}")
        if bos == "off":
            return []
        if bos == "auto":
            return self.check_tokens(self.opening)
        if self.bos is None:
            raise WakefulError(f'bos = "on", but {self.name} has no BOS token; use auto or off')
        return self.check_tokens([self.bos])

    def starts_with_bos(self, bos: Bos = "auto") -> bool:
        """Tell whether `start_tokens(bos)` includes BOS.

        Raises:
            WakefulError: as in `start_tokens`.
        """
        return self.bos in self.start_tokens(bos)

    def encode(self, text: str, bos: Bos = "auto") -> list[int]:
        """Return the tokens of a text, preceded by BOS as `bos` says."""
        return [*self.start_tokens(bos), *self.encode_plain(text)]

    def encode_plain(self, text: str) -> list[int]:
        """Return the tokens of a text, without BOS; special tokens spelled in it are plain text.

        Raises:
            WakefulError: a token has no embedding in the model, or the tokenizer fails.
        """
        if self._encoder is not None:
            return self.check_tokens(self._encoder.encode_batch([text])[0])
        tokenizer: Any = self.tokenizer  # a tokenizer of Transformers that is written in Python
        encoded = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        return self.check_tokens(encoded)

    def encode_plain_with_ends(self, text: str) -> tuple[list[int], list[int] | None]:
        """Return the tokens of a text alone, as `encode_plain` does, and the character offset at
        which each token ends; None in place of the offsets where the tokenizer gives none.
        """
        if self._encoder is None:
            return self.encode_plain(text), None
        tokens, ends = self._encoder.encode_with_ends(text)
        return self.check_tokens(tokens), ends

    @cached_property
    def _encoder(self) -> Encoder | None:
        """Encoder of plain text; None for a tokenizer that is written in Python."""
        tokenizer = self.tokenizer
        if isinstance(tokenizer, Tokenizer):
            return tokenizer.encoder
        backend = getattr(tokenizer, "backend_tokenizer", None)
        special = tokenizer.all_special_tokens
        return None if backend is None else Encoder(backend.to_str(), special)

    def check_tokens(self, tokens: list[int]) -> list[int]:
        """Return token ids unchanged, after checking that every id has an embedding.

        Raises:
            WakefulError: an id has none.
        """
        decoder = as_decoder(self.module)
        embedding = self.module.get_input_embeddings() if decoder is None else decoder.embed  # pyright: ignore
        vocab_size = len(embedding.weight)
        for token in (max(tokens, default=0), min(tokens, default=0)):  # the others lie between
            if not 0 <= token < vocab_size:
                raise WakefulError(
                    f"{self.name} is given token {token}, and has embeddings of {vocab_size} "
                    "tokens: load it with its own tokenizer"
                )
        return tokens

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Return the text of token ids; special tokens are left out unless `special`."""
        tokenizer = self.tokenizer
        if isinstance(tokenizer, Tokenizer):
            return tokenizer.decode(ids, special=special)
        # Like our tokenizer and streamed text, without a cleanup of spaces.
        decoding = {"skip_special_tokens": not special, "clean_up_tokenization_spaces": False}
        with wrap_errors(f"the tokenizer of {self.name} cannot decode its tokens"):
            return str(tokenizer.decode(list(ids), **decoding))

    def token_text(self, token: int) -> str:
        """Return the text of one token, also of a special token."""
        return self.decode([token], special=True)

    def decoder(self) -> Decoder:
        """Return the model as our decoder with shared weights, after comparing their logits.

        Raises:
            WakefulError: our decoder does not support its configuration (the field is named), or
                the logits differ.
        """
        return self._converted.module  # pyright: ignore[reportReturnType]

    @default_torch_state()
    def as_decoder_model(self) -> "Model":
        """Return the same model with our `Decoder` as its module, after comparing their logits.

        Raises:
            WakefulError: as in `decoder`.
        """
        if as_decoder(self.module) is not None:
            return self
        config: Any = self.module.config.get_text_config()  # pyright: ignore
        full_context = getattr(config, "max_position_embeddings", None) or 0
        # Keep a context that was shortened when the model was loaded; 0 means the full one.
        max_length = self.context if self.context < full_context else 0
        decoder = convert_hf_model(self.module, max_length)
        return dataclasses.replace(
            self, module=decoder, context=decoder.config.context, architecture="wakeful decoder",
            agreement=compare_logits(self.module, decoder),  # pyright: ignore[reportArgumentType]
            read_tokenizer=lambda: self.tokenizer, generation_source=self,
        )  # fmt: skip

    @cached_property
    def _converted(self) -> "Model":
        return self.as_decoder_model()

    def generate(self, prompt: str | Sequence[int], **options: Any) -> str:
        """Return the text that continues a prompt; options and errors are those of `stream`."""
        return "".join(self.stream(prompt, **options))

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        num_tokens: int = 100,
        temperature: float = 0.8,
        top_k: int = 50,
        top_p: float = 1.0,
        seed: int = 0,
        bos: Bos = "auto",
        chat: bool = False,
    ) -> Iterator[str]:
        """Return the continuation of a prompt as an iterator over pieces of whole characters.

        A prompt of token ids is used unchanged; a text is preceded by BOS as `bos` says, and an
        empty text by the token that begins a document. With `chat` the prompt is a user's message
        in the model's chat template, and the answer is returned. The other options are those of
        `wakeful.model.generate.generate_tokens`.

        Raises:
            WakefulError: an option is out of its range, the context too short, or the chat template
                cannot be used.
        """
        tokenizer, stop = self.wakeful_tokenizer, self.ends
        if chat:
            turn = self._chat_turn(prompt, bos)
            prompt_ids = turn.encode(str(prompt))
            if turn.answer_end is not None:
                stop |= {turn.answer_end}
        else:
            prompt_ids = self.encode(prompt, bos) if isinstance(prompt, str) else list(prompt)
        tokens = self.generate_ids(
            prompt_ids or [tokenizer.end_of_text], num_tokens=num_tokens, temperature=temperature,
            top_k=top_k, top_p=top_p, seed=seed, stop=stop,
        )  # fmt: skip
        # A continuation may begin inside a character of the prompt; an answer is a new text.
        return _decode_stream(StreamDecoder(tokenizer, () if chat else prompt_ids), tokens)

    def _chat_turn(self, prompt: str | Sequence[int], bos: Bos) -> Turn:
        """Return the user's turn of the tokenizer's chat template.

        Raises:
            WakefulError: the prompt is not a text, `bos` is not "auto", or there is no template.
        """
        if not isinstance(prompt, str):
            raise WakefulError("chat takes a text, and a prompt of token ids is taken as it is")
        if bos != "auto":
            raise WakefulError(f"bos = {bos}: the chat template decides that; leave out one")
        turn = user_turn(self.wakeful_tokenizer)
        if turn is None:
            raise WakefulError(
                f"the tokenizer of {self.name} has no chat template: leave out --chat"
            )
        return turn

    def generate_ids(self, prompt: Sequence[int], **options: Any) -> Iterator[int]:
        """Return an iterator over up to `num_tokens` token ids that continue `prompt`.

        `options` are num_tokens, temperature, top_k, top_p, seed and stop, as for
        `wakeful.model.generate.generate_tokens`. A model of Transformers uses its own cache of keys
        and values.
        """
        decoder, prompt = as_decoder(self.module), self.check_tokens(list(prompt))
        if decoder is not None:
            return self._evaluate_each(generate_tokens(decoder, prompt, **options))
        forward = HFForward(self.module)
        limits = {name: options.pop(name) for name in ("num_tokens", "stop") if name in options}
        sampling = Sampling(**options)
        tokens = continuation(
            forward, prompt, sampling, device=self.device, context=self.context, **limits
        )
        return self._evaluate_each(tokens)

    def _evaluate_each(self, tokens: Iterator[int]) -> Iterator[int]:
        """Yield the tokens of an iterator that computes them with the model's module.

        Only while a token is computed is the module in evaluation mode, and torch in its default
        state; in between both are as the caller has set them.
        """
        while True:
            with default_torch_state(), evaluating(self.module):
                token = next(tokens, None)
            if token is None:
                return
            yield token

    @property
    def export_dtype(self) -> torch.dtype:
        """Type to write the model's weights in: that of its files, else of its first weight in
        memory; float32 in place of float64 and integers.
        """
        first = next(self.module.parameters()).dtype
        dtype = self.stored or (first if first.is_floating_point else torch.float32)
        return torch.float32 if dtype == torch.float64 else dtype

    def save_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer's files and the generation settings into a folder; a tokenizer of
        Transformers gets the model's context as `model_max_length` if that is shorter.
        """
        tokenizer = self.tokenizer
        if isinstance(tokenizer, Tokenizer):
            tokenizer.save(folder)
            return
        tokenizer.save_pretrained(folder)
        if self.context < tokenizer.model_max_length:  # the model was loaded with a shorter context
            table = json.loads((folder / CONFIG).read_text("utf-8"))
            text = json.dumps(table | {"model_max_length": self.context}, indent=2)
            (folder / CONFIG).write_text(text + "\n", "utf-8")
        if self.generation:
            text = json.dumps(self.generation, indent=2) + "\n"
            (folder / GENERATION).write_text(text, "utf-8")


def _decode_stream(stream: StreamDecoder, tokens: Iterator[int]) -> Iterator[str]:
    """Yield the text of tokens in pieces of whole characters, as soon as they are complete."""
    for token in tokens:
        piece = stream.push(token)
        if piece:
            yield piece
    last_piece = stream.flush()
    if last_piece:
        yield last_piece
