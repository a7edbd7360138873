"""Text to token ids and back: byte-level BPE, trained here or loaded from Hugging Face files."""

import functools
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from wakeful.errors import WakefulError
from wakeful.hub import hub_or_cache

END_OF_TEXT = "<|endoftext|>"
MIN_VOCAB_SIZE = 256 + 1  # every byte, and the end of a text
_MOST_TRAINED = 2**20
MOST_HOLES = 100  # ids for each token that there is
CONFIG, SPECIAL = "tokenizer_config.json", "special_tokens_map.json"
GENERATION = "generation_config.json"
TEMPLATE = "chat_template.jinja"
BESIDE = (CONFIG, SPECIAL, TEMPLATE, GENERATION)
"""What lies beside a tokenizer.json and goes where it goes."""
HUB = "hf:"
"""What the name of a tokenizer on the Hugging Face hub begins with."""
PIECE_CHARACTERS = 2**18  # of a long text, encoded at a time


class Tokenizer:
    """A `tokenizers.Tokenizer` with an end-of-text id, that takes any text as mere text.

    The spelling of a special token inside a text ("<|endoftext|>" in a page about tokenizers) is
    encoded as ordinary characters: special ids come from the program, never from the data.
    Nothing is added around a text, and nothing is truncated or padded.
    """

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        *,
        end_of_text: str,
        beside: Mapping[str, str] | None = None,
    ) -> None:
        """Take over `inner`, which is changed.

        `beside` are the texts of the files in `BESIDE` that say what else belongs to it.

        Raises:
            WakefulError: it has no token `end_of_text`, or is damaged.
        """
        end = inner.token_to_id(end_of_text)
        if end is None:
            raise WakefulError(
                f"the tokenizer has no token {end_of_text!r} to end a text: name one it has"
            )
        vocab = inner.get_vocab(with_added_tokens=True)
        highest = max(vocab.values())
        if highest > MOST_HOLES * len(vocab):  # each id below it takes memory
            raise WakefulError(
                f"the tokenizer has an id {highest} and {len(vocab)} tokens: it is damaged"
            )
        inner.no_truncation()
        inner.no_padding()
        inner.add_special_tokens([end_of_text])
        inner.encode_special_tokens = True
        self.inner = inner
        self.end_of_text: int = end
        self.end_of_text_token = end_of_text
        self.vocab_size: int = 1 + highest
        """Rows an embedding needs: the highest id and one."""
        self.special_tokens: frozenset[int] = frozenset(
            token for token, added in inner.get_added_tokens_decoder().items() if added.special
        )
        self.beside = dict(beside or {})
        self.table: dict[str, Any] = json.loads(self.beside.get(CONFIG, "{}"))
        self.bos: int | None = self._id_of("bos_token")
        """The token that begins a sequence, where one is named."""
        self.pad: int | None = self._id_of("pad_token")
        """The token that fills up a batch, where one is named."""
        self._cuts_are_free = _cuts_are_free(inner)

    @classmethod
    def train(
        cls, texts: Iterable[str], vocab_size: int, *, end_of_text: str = END_OF_TEXT
    ) -> "Tokenizer":
        """Return byte-level BPE over `texts`, the same for the same texts in any order.

        Id 0 is `end_of_text`, ids 1 to 256 the bytes. A pair must be seen twice to become a token,
        so few texts give a smaller vocabulary than `vocab_size`.

        Raises:
            WakefulError: `vocab_size` does not hold even the bytes.
        """
        if vocab_size < MIN_VOCAB_SIZE:
            raise WakefulError(
                f"vocab_size is {vocab_size}: it must be at least {MIN_VOCAB_SIZE}, "
                "the 256 bytes and the end of a text"
            )
        if vocab_size > _MOST_TRAINED:
            raise WakefulError(
                f"vocab_size is {vocab_size}: at most {_MOST_TRAINED:,} tokens are trained, since "
                "memory is set aside for all of them"
            )
        inner = tokenizers.Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            special_tokens=[end_of_text],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        pieces = (piece for text in texts for piece in _pieces(text))
        inner.train_from_iterator(pieces, trainer)
        return cls(inner, end_of_text=end_of_text)

    @classmethod
    def load(cls, path: str | Path) -> "Tokenizer":
        """Read a `tokenizer.json`, the folder of one, ours or any from Hugging Face, or `hf:NAME`.

        Its end of text is the `eos_token` of `tokenizer_config.json` or `special_tokens_map.json`
        beside it, or "<|endoftext|>" where neither says.

        Raises:
            WakefulError: the file is missing, is not a tokenizer or has no end of text, or the hub
                cannot be reached.
        """
        file = _fetched(str(path)) if str(path).startswith(HUB) else Path(path)
        file = file / "tokenizer.json" if file.is_dir() else file
        if not file.is_file():
            raise WakefulError(f"no tokenizer at {path}: pass a tokenizer.json or its folder")
        try:
            inner = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing narrower
            reason = " ".join(str(error).split())[:200]
            raise WakefulError(
                f"{file} is not a tokenizer.json ({reason}): fetch it again"
            ) from error
        beside = _beside(file.parent)
        end_of_text = _named(beside, "eos_token") or END_OF_TEXT
        if inner.token_to_id(end_of_text) is None:
            raise WakefulError(
                f"{file} has no token {end_of_text!r} to end a text: name its eos_token in a "
                "tokenizer_config.json beside it"
            )
        return cls(inner, end_of_text=end_of_text, beside=beside)

    def save(self, path: str | Path) -> None:
        """Write `tokenizer.json` and, beside it, the `tokenizer_config.json` that names the end.

        So are the other files that it was loaded with: special tokens, the chat template, how to
        generate. `path` is the folder, or the file where it ends in `.json`. Transformers reads
        them all.
        """
        file = Path(path)
        file = file if file.suffix == ".json" else file / "tokenizer.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(self._json(), encoding="utf-8")
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **self.table,
            "eos_token": self.table.get("eos_token") or self.end_of_text_token,
        }
        config.pop("auto_map", None)  # code that does not go along
        table = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        for name, text in {**self.beside, CONFIG: table}.items():
            file.with_name(name).write_text(text, encoding="utf-8")

    @property
    def chat_template(self) -> str:
        """The template of conversations that lies beside it; "" where there is none."""
        named = self.table.get("chat_template")
        if isinstance(named, list):  # several by name, as tokenizers said them before files
            of = {
                each.get("name"): each.get("template") for each in named if isinstance(each, dict)
            }
            named = of.get("default")
        return self.beside.get(TEMPLATE, named if isinstance(named, str) else "")

    @property
    def adds_bos(self) -> bool:
        """Return whether Transformers, left to itself, begins a text with BOS here."""
        if self.bos is None:
            return False
        said = self.table.get("add_bos_token")
        if isinstance(said, bool):
            return said
        with_all, plain = (self.inner.encode("a", add_special_tokens=s).ids for s in (True, False))
        return with_all[:1] == [self.bos] != plain[:1]

    @property
    def begin(self) -> int:
        """Return what a sequence that is to begin with BOS begins with: as GPT-2's, where no BOS
        is named, with the end of the text before.
        """
        return self.end_of_text if self.bos is None else self.bos

    def beginning(self) -> "Tokenizer":
        """Return this tokenizer as one that, left to itself, begins a text with `begin`."""
        if self.adds_bos:
            return self
        inner = tokenizers.Tokenizer.from_str(self._json())
        token = inner.id_to_token(self.begin)
        template = processors.TemplateProcessing(
            single=f"{token} $A", pair=f"{token} $A $B", special_tokens=[(token, self.begin)]
        )
        before = inner.post_processor
        inner.post_processor = processors.Sequence([before, template]) if before else template
        table = json.dumps({**self.table, "bos_token": token, "add_bos_token": True})
        return Tokenizer(
            inner, end_of_text=self.end_of_text_token, beside={**self.beside, CONFIG: table}
        )

    def without_bos(self) -> "Tokenizer":
        """Return this tokenizer as one that, left to itself, puts no BOS before a text.

        Neither does its chat template. It is for a model in which what a text begins with stands
        already. A BOS that somebody asks for is still known.

        Raises:
            WakefulError: the tokenizer adds BOS in a way that cannot be taken out.
        """
        if self.bos is None:
            return self
        beside, table, taken = dict(self.beside), dict(self.table), json.loads(self._json())
        bare = _without(self.bos, taken["post_processor"])
        if self.adds_bos or bare != taken["post_processor"]:
            ids = self.inner.encode("a").ids
            taken["post_processor"] = bare
            # Where a table names one of the two, Transformers makes a post-processor of both.
            table |= {"add_bos_token": False, "add_eos_token": ids[-1] == self.end_of_text}
        if self.chat_template:
            beside[TEMPLATE] = _without_bos(self.chat_template)
            table.pop("chat_template", None)
        inner = tokenizers.Tokenizer.from_str(json.dumps(taken))
        if inner.encode("a").ids[:1] == [self.bos]:
            raise WakefulError(
                f"the tokenizer's post-processor, a {taken['post_processor']['type']}, puts BOS "
                "before every text in a way that cannot be taken out: give the model a tokenizer "
                "that adds none"
            )
        return Tokenizer(
            inner,
            end_of_text=self.end_of_text_token,
            beside={**beside, CONFIG: json.dumps(table, ensure_ascii=False)},
        )

    @property
    def fingerprint(self) -> str:
        """Return the SHA-256 of the `tokenizer.json` that `save` writes."""
        return hashlib.sha256(self._json().encode("utf-8")).hexdigest()

    def same_tokens(self, other: "Tokenizer") -> bool:
        """Return whether ids mean the same: the vocabularies are equal, and what ends a text."""
        ours, theirs = self.inner.get_vocab(), other.inner.get_vocab()
        return ours == theirs and self.end_of_text == other.end_of_text

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, with no special ids.

        Raises:
            WakefulError: it holds half a character.
        """
        return self.encode_batch([text])[0]

    def encode_marked(self, text: str) -> list[int]:
        """Return the ids of a text in which the spelling of a special token means that token.

        For what a program writes, a chat template say; never for data.
        """
        return self._marked.encode(text, add_special_tokens=False).ids

    @functools.cached_property
    def _marked(self) -> tokenizers.Tokenizer:
        return tokenizers.Tokenizer.from_str(self._json())

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, encoded together."""
        encoded: list[list[int]] = []
        waiting: list[str] = []
        for text in texts:
            if len(text) > PIECE_CHARACTERS:
                encoded += self._encode(waiting)
                waiting = []
                encoded.append([i for part in self.pieces(text) for i in self._encode([part])[0]])
            else:
                waiting.append(text)
        return encoded + self._encode(waiting)

    def pieces(self, text: str) -> Iterator[str]:
        """Return `text` in parts whose ids, one after the other, are its ids.

        A long text need not be encoded as a whole, which takes some 100 bytes a token. There is
        one part where no cut is safe.
        """
        return _pieces(text) if self._cuts_are_free else iter([text])

    def decode(self, tokens: Iterable[int], *, special: bool = False) -> str:
        """Return the text of `tokens`, special tokens left out unless `special`."""
        return self.inner.decode(list(tokens), skip_special_tokens=not special)

    def _encode(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        try:
            encodings = self.inner.encode_batch_fast(texts, add_special_tokens=False)
        except (TypeError, UnicodeEncodeError) as error:
            raise WakefulError(
                "a text to encode holds half a surrogate pair, which is not Unicode text: mend it"
            ) from error
        rows = [encoding.ids for encoding in encodings]
        return [
            self._without_end(text) if self.end_of_text in row else row
            for text, row in zip(texts, rows, strict=True)
        ]

    def _without_end(self, text: str) -> list[int]:
        # Some vocabularies (Unigram's) hold the special token's spelling as an ordinary entry:
        # cut inside it, and no part can become the token.
        first, rest = self.end_of_text_token[:1], self.end_of_text_token[1:]
        parts = text.split(self.end_of_text_token)
        cut = [
            (rest if place else "") + part + (first if place < len(parts) - 1 else "")
            for place, part in enumerate(parts)
        ]
        encodings = self.inner.encode_batch_fast(cut, add_special_tokens=False)
        return [i for encoding in encodings for i in encoding.ids if i != self.end_of_text]

    def _id_of(self, role: str) -> int | None:
        """Return the id of the special token that the files beside name so."""
        named = _named(self.beside, role)
        return self.inner.token_to_id(named) if named else None

    def _json(self) -> str:
        return self.inner.to_str(pretty=False)


class StreamDecoder:
    """Pieces of text from ids that come one at a time; joined they are `tokenizer.decode` of all.

    That holds for every sequence of ids of byte-level tokenizers, broken UTF-8 included, and of
    others where the ids came from text. Special tokens are left out unless `special`. The library's
    `tokenizers.decoders.DecodeStream` cannot serve: what is unfinished at the end it never gives
    out, and with byte fallback it raises ("Invalid prefix") where a byte makes those before it
    invalid that were decoded already, as a model may well have it.
    """

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._held: list[int] = []  # the ids whose text is still in the window
        self._num_old = 0  # how many of them are out
        self._emitted = 0  # and how many characters of the window's text

    def push(self, token: int) -> str:
        """Return the text that is certain after one more id: none, or one or more characters."""
        # How an id decodes may depend on the one before (a leading space, a run of bytes), so the
        # window keeps the ids of the last piece that came out beside those still unfinished.
        if not self._special and token in self._tokenizer.special_tokens:
            return ""
        self._held.append(token)
        text = self._text()
        if text.endswith("\ufffd") or len(text) <= self._emitted:  # bytes not a character (yet)
            return ""
        new = text[self._emitted :]
        self._held = self._held[self._num_old :]
        self._num_old = len(self._held)
        self._emitted = len(self._text())
        return new

    def flush(self) -> str:
        """Return the rest, unfinished characters as U+FFFD; the decoder is then as new."""
        rest = self._text()[self._emitted :]
        self._held, self._num_old, self._emitted = [], 0, 0
        return rest

    def _text(self) -> str:
        return self._tokenizer.decode(self._held, special=self._special)


def _fetched(name: str) -> Path:
    """Return the folder of the hub's cache with the tokenizer `hf:NAME`."""
    repository = name.removeprefix(HUB)
    try:
        with hub_or_cache():
            return Path(
                huggingface_hub.snapshot_download(
                    repository, allow_patterns=["tokenizer.json", *BESIDE]
                )
            )
    except Exception as error:  # no connection, no such name, not allowed in: each its own
        reason = " ".join(str(error).split())[:200]
        raise WakefulError(
            f"the tokenizer {name} cannot be fetched ({type(error).__name__}: {reason}): check the "
            f"connection, or whether {repository} asks for a login; or put its tokenizer.json and "
            "tokenizer_config.json into a folder and name that as the tokenizer (data.tokenizer)"
        ) from error


def _pieces(text: str) -> Iterator[str]:
    """Return `text` in pieces of about PIECE_CHARACTERS, cut where byte-level BPE cuts anyway.

    GPT-2's pattern lets white space only begin a word, so between a visible character and a space
    or a newline there is always a cut, whatever stands around.
    """
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        end = start + PIECE_CHARACTERS
        while end < len(text) and not (text[end] in " \n" and not text[end - 1].isspace()):
            end += 1
        yield text[start:end]
        start = end
    if start < len(text) or not text:
        yield text[start:]


def _cuts_are_free(inner: tokenizers.Tokenizer) -> bool:
    """Return whether encoding the `_pieces` of a text is encoding it; for GPT-2's kind it is."""
    description: dict[str, Any] = json.loads(inner.to_str())
    split = description["pre_tokenizer"] or {}
    plain = all(token["special"] for token in description["added_tokens"])
    return (
        plain  # other added tokens may hold spaces, and a cut might go through one
        and description["normalizer"] is None
        and split.get("type") == "ByteLevel"
        and split.get("use_regex", True)
        and not split.get("add_prefix_space", True)
    )


def _without(token: int, processor: Any) -> Any:
    """Return the description of a post-processor that puts no such token before a text."""
    match processor:
        case {"type": "Sequence", "processors": parts}:
            return {**processor, "processors": [_without(token, part) for part in parts]}
        case {"type": "TemplateProcessing", "special_tokens": known}:
            special = {name for name, each in known.items() if each["ids"] == [token]}
            return processor | {
                name: [
                    piece
                    for piece, after in itertools.zip_longest(processor[name], processor[name][1:])
                    if piece.get("SpecialToken", {}).get("id") not in special
                    or "Sequence" not in (after or {})
                ]
                for name in ("single", "pair")
            }
        case _:
            return processor


def _without_bos(template: str) -> str:
    """Return a chat template to which the token that begins a text is nothing."""
    return "{% set bos_token = '' %}" + template if "bos_token" in template else template


def _beside(folder: Path) -> dict[str, str]:
    """Return the texts of the files beside a tokenizer.json, each a JSON object or a template."""
    found: dict[str, str] = {}
    for name in BESIDE:
        file = folder / name
        if not file.is_file():
            continue
        try:
            text = file.read_text(encoding="utf-8")
            table = json.loads(text) if name.endswith(".json") else {}
            json.dumps(table, ensure_ascii=False).encode()  # half a character is not text
        except (ValueError, RecursionError) as error:
            raise WakefulError(f"{file} is not JSON or not text: fetch it again") from error
        if not isinstance(table, dict):
            raise WakefulError(f"{file} must hold a JSON object: fetch it again")
        found[name] = text
    return found


def _named(beside: Mapping[str, str], role: str) -> str:
    """Return how the token of a role is written that the files name, "" where they name none."""
    for name in (CONFIG, SPECIAL):
        token = json.loads(beside.get(name, "{}")).get(role)
        token = token.get("content") if isinstance(token, dict) else token
        if token and isinstance(token, str):
            return token
    return ""
