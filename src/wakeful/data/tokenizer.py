"""Text to token ids and back: byte-level BPE, trained here or loaded from Hugging Face files."""

import base64
import contextlib
import functools
import hashlib
import json
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import huggingface_hub
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from wakeful.data.encoding import ANOTHER, Encoder, check_growth, pieces
from wakeful.errors import WakefulError
from wakeful.guard import wrap_errors
from wakeful.hub import hub_or_cache
from wakeful.paths import expand_home

END_OF_TEXT = "<|endoftext|>"
MIN_VOCAB_SIZE = 256 + 1  # every byte, and the end of a text
_MOST_TRAINED = 2**20
MOST_HOLES = 100  # ids for each token that there is
FILE = "tokenizer.json"
CONFIG, SPECIAL = "tokenizer_config.json", "special_tokens_map.json"
GENERATION = "generation_config.json"
TEMPLATE = "chat_template.jinja"
BESIDE = (CONFIG, SPECIAL, TEMPLATE, GENERATION)
"""Files beside a tokenizer.json that go where it goes."""
HUB = "hf:"
"""Prefix of the name of a tokenizer on the Hugging Face hub."""
TEMPLATES = "additional_chat_templates"
"""The folder beside a tokenizer.json of templates with names."""
_LARGEST_ID = 2**31 - 1
_LONG = re.compile(r"\S{1000}|\s{1000}")
_TEMPLATE_NAME = re.compile(r"[\w-]{1,64}")
"""A template with a name is a file of that name, where a model is written."""
_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


class Tokenizer:
    """A `tokenizers.Tokenizer` with an end-of-text id, that takes any text as mere text.

    It is saved as it was given: who reads its files, Transformers say, gives a text the same
    tokens as before. How `encode` reads a text is `Encoder`'s.
    """

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        *,
        end_of_text: str | None,
        beside: Mapping[str, str] | None = None,
    ) -> None:
        """Take over `inner`, whose `end_of_text` is None where no token ends a text.

        `beside` are the texts of the files, by name, that say what else belongs to it.

        Raises:
            WakefulError: it has no token `end_of_text`, or is damaged.
        """
        end = None if end_of_text is None else inner.token_to_id(end_of_text)
        if end_of_text is not None and end is None:
            raise WakefulError(
                f"the tokenizer has no token {end_of_text!r} to end a text: name one it has"
            )
        vocab = inner.get_vocab(with_added_tokens=True)
        highest = max(vocab.values())
        steps = {"normalizer": inner.normalizer, "decoder": inner.decoder}
        check_growth({part: json.loads(s.__getstate__()) for part, s in steps.items() if s})
        self.inner = inner
        self.end: int | None = end
        """The token that ends a text; None where there is none."""
        self.end_of_text_token = end_of_text
        self.vocab_size: int = 1 + highest
        """Rows an embedding needs: the highest id and one."""
        self.beside = dict(beside or {})
        self.table: dict[str, Any] = json.loads(self.beside.get(CONFIG, "{}"))
        self.bos: int | None = self._id_of("bos_token")
        """The token that begins a sequence, where one is named."""
        self.pad: int | None = self._id_of("pad_token")
        """The token that fills up a batch, where one is named."""
        named = (self._id_of(f"{role}_token") for role in _ROLES)
        added = inner.get_added_tokens_decoder()
        special = {token for token, added_token in added.items() if added_token.special}
        self.special_tokens: frozenset[int] = frozenset(
            special | {token for token in (end, *named) if token is not None}
        )

    @classmethod
    def train(
        cls, texts: Iterable[str], vocab_size: int, *, end_of_text: str = END_OF_TEXT
    ) -> "Tokenizer":
        """Return byte-level BPE over `texts`, the same for the same texts in any order.

        Id 0 is `end_of_text`, ids 1 to 256 the bytes. A pair must be seen twice to become a token,
        so few texts give a smaller vocabulary than `vocab_size`. A run of 1,000 characters without
        a space, or of spaces, is cut there: a word takes time by the square of its length.

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
        parts = (
            part for text in texts for piece in pieces(text) for part in _split_long_words(piece)
        )
        _interruptible(lambda: inner.train_from_iterator(parts, trainer))
        return cls(inner, end_of_text=end_of_text)

    @classmethod
    def load(cls, path: str | Path, *, ended: bool = True) -> "Tokenizer":
        """Read a `tokenizer.json`, the folder of one, ours or any from Hugging Face, or `hf:NAME`.

        Its end of text is the `eos_token` of `tokenizer_config.json` or `special_tokens_map.json`
        beside it, or "<|endoftext|>" where neither says; not `ended`, it may have none.

        Raises:
            WakefulError: the file is missing, is not a tokenizer or has no end of text, or the hub
                cannot be reached.
        """
        file = _fetch_from_hub(str(path)) if str(path).startswith(HUB) else expand_home(path)
        file = file / "tokenizer.json" if file.is_dir() else file
        if not file.is_file():
            raise WakefulError(f"no tokenizer at {path}: pass a tokenizer.json or its folder")
        beside = beside_of(file.parent)
        with wrap_errors(f"{file} is not a tokenizer.json", "; fetch it again"):
            text = file.read_text("utf-8")
            _check_ids(file, json.loads(text))
            inner = tokenizers.Tokenizer.from_str(text)
        end_of_text = _named_special_token(beside, "eos_token") or (END_OF_TEXT if ended else None)
        if end_of_text is not None and inner.token_to_id(end_of_text) is None:
            raise WakefulError(
                f"{file} has no token {end_of_text!r} to end a text: name its eos_token in a "
                "tokenizer_config.json beside it"
            )
        with wrap_errors(f"{file} is damaged", "; fetch it again"):
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
        }
        if not config.get("eos_token") and self.end_of_text_token is not None:
            config["eos_token"] = self.end_of_text_token
        config.pop("auto_map", None)  # code that does not go along
        table = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        for name, text in {**self.beside, CONFIG: table}.items():
            (file.parent / name).parent.mkdir(exist_ok=True)
            (file.parent / name).write_text(text, encoding="utf-8")

    @property
    def end_of_text(self) -> int:
        """The token that ends a text, or a `WakefulError` where there is none."""
        if self.end is None:
            raise WakefulError(
                "the tokenizer names no token that ends a text: name its eos_token in its "
                "tokenizer_config.json"
            )
        return self.end

    @property
    def chat_template(self) -> str:
        """The template of conversations that lies beside it; "" where there is none."""
        return self.chat_templates.get("default", "")

    @property
    def chat_templates(self) -> dict[str, str]:
        """All templates of conversations by name, the usual one as "default"."""
        templates = _read_templates(self.table)
        for file, text in self.beside.items():
            if file.endswith(".jinja"):
                templates["default" if file == TEMPLATE else Path(file).stem] = text
        return templates

    @property
    def opening(self) -> list[int]:
        """Ids that Transformers, left to itself, puts before a text here."""
        return self._put[0]

    @property
    def closing(self) -> list[int]:
        """Ids that Transformers, left to itself, puts behind a text here."""
        return self._put[1]

    @functools.cached_property
    def _put(self) -> tuple[list[int], list[int]]:
        inner = self._as_read
        with wrap_errors("the tokenizer cannot encode a text", ANOTHER):
            plain = inner.encode("a", add_special_tokens=False).ids
            return special_ids_around(inner.encode("a").ids, plain)

    @property
    def adds_bos(self) -> bool:
        """Return whether BOS is among what Transformers puts before a text here."""
        return self.bos in self.opening

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
        settings, table = self._tables_to_write()
        token = self.inner.id_to_token(self.begin)
        first, before = _adding_processor(self.inner, self.begin, None), settings["post_processor"]
        steps = {"type": "Sequence", "processors": [before, first]}
        settings["post_processor"] = steps if before else first
        return self._changed(settings, table | {"bos_token": token})

    def without_bos(self) -> "Tokenizer":
        """Return this tokenizer as one that, left to itself, puts no BOS before a text.

        Neither do its chat templates. It is for a model in which what a text begins with stands
        already, or that never saw BOS. A BOS that somebody asks for is still known.

        Raises:
            WakefulError: the tokenizer adds BOS in a way that cannot be taken out.
        """
        if self.bos is None:
            return self
        settings, table = self._tables_to_write()
        settings["post_processor"] = _without_opening_token(self.bos, settings["post_processor"])
        beside = dict(self.beside)
        for name, text in self.chat_templates.items():
            file = TEMPLATE if name == "default" else f"{TEMPLATES}/{name}.jinja"
            beside[file] = _remove_bos(text)
        table.pop("chat_template", None)
        changed = self._changed(settings, table, beside)
        if changed.adds_bos:
            raise WakefulError(
                f"the tokenizer's post-processor, a {settings['post_processor']['type']}, puts BOS "
                "before every text in a way that cannot be taken out: give the model a tokenizer "
                "that adds none"
            )
        return changed

    def _tables_to_write(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the tables of tokenizer.json and tokenizer_config.json, in which the former's
        post-processor alone decides about BOS and the end of text.

        The flags add_bos_token and add_eos_token of the second, of which Transformers makes a
        post-processor, are replaced by that post-processor.
        """
        settings: dict[str, Any] = json.loads(self._json())
        settings |= {"truncation": None, "padding": None}
        table = dict(self.table)
        adds_bos, adds_end = (table.pop(f"add_{role}_token", None) for role in ("bos", "eos"))
        if adds_bos is not None or adds_end is not None:
            ends = self.bos if adds_bos else None, self.end if adds_end else None
            settings["post_processor"] = _adding_processor(self.inner, *ends)
        return settings, table

    def _changed(
        self,
        settings: dict[str, Any],
        table: dict[str, Any],
        beside: Mapping[str, str] | None = None,
    ) -> "Tokenizer":
        return Tokenizer(
            tokenizers.Tokenizer.from_str(json.dumps(settings)),
            end_of_text=self.end_of_text_token,
            beside={**(beside or self.beside), CONFIG: json.dumps(table, ensure_ascii=False)},
        )

    def of_class(self, name: str) -> "Tokenizer":
        """Return this tokenizer as one that Transformers reads by its class of this name."""
        settings, table = self._tables_to_write()
        return self._changed(settings, table | {"tokenizer_class": name})

    @property
    def fingerprint(self) -> str:
        """Return the SHA-256 of the `tokenizer.json` that `save` writes."""
        return hashlib.sha256(self._json().encode("utf-8")).hexdigest()

    def same_tokens(self, tokenizer: "Tokenizer") -> bool:
        """Return whether ids mean the same: vocabularies and end-of-text tokens are equal."""
        vocabularies_match = self.inner.get_vocab() == tokenizer.inner.get_vocab()
        return vocabularies_match and self.end == tokenizer.end

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`, with no special ids; half a character is refused."""
        return self.encode_batch([text])[0]

    def encode_marked(self, text: str) -> list[int]:
        """Return the ids of a text in which the spelling of a special token means that token.

        For what a program writes, a chat template say; never for data.
        """
        with wrap_errors("the tokenizer cannot encode a text", ANOTHER):
            return self._as_read.encode(text, add_special_tokens=False).ids

    @functools.cached_property
    def _as_read(self) -> tokenizers.Tokenizer:
        """The tokenizer as Transformers reads it, without truncation and padding."""
        settings, _ = self._tables_to_write()
        with wrap_errors("the tokenizer is damaged", ANOTHER):
            return tokenizers.Tokenizer.from_str(json.dumps(settings))

    @functools.cached_property
    def encoder(self) -> Encoder:
        """The encoder of texts."""
        tokens = (self.inner.id_to_token(token) for token in self.special_tokens)
        return Encoder(self._json(), [token for token in tokens if token is not None])

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, encoded together."""
        return self.encoder.encode_batch(texts)

    def decode(self, tokens: Iterable[int], *, special: bool = False) -> str:
        """Return the text of `tokens`, special tokens left out unless `special`."""
        visible = [token for token in tokens if special or token not in self.special_tokens]
        with wrap_errors("the tokenizer cannot decode its tokens", ANOTHER):
            return self.inner.decode(visible, skip_special_tokens=False)

    def _id_of(self, role: str) -> int | None:
        """Return the id of the special token that the files beside name so."""
        named = _named_special_token(self.beside, role)
        return self.inner.token_to_id(named) if named else None

    def _json(self) -> str:
        return self.inner.to_str(pretty=False)


_BEFORE = 8
"""Ids before a stream that its first piece is read with."""


def _split_long_words(text: str) -> Iterator[str]:
    """Yield a text in parts, in none of which a word or a run of spaces is longer than that."""
    start = 0
    for long in _LONG.finditer(text):
        yield text[start : long.end()]
        start = long.end()
    yield text[start:]


def _interruptible(work: Callable[[], object]) -> None:
    """Do a library's work, which no signal reaches, in a thread: Ctrl-C ends the wait for it."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
    if errors:
        raise errors[0]


class StreamDecoder:
    """Pieces of text from ids that come one at a time; joined they are `tokenizer.decode` of all.

    That holds for every sequence of ids of byte-level tokenizers, broken UTF-8 included, and of
    others where the ids came from text. Special tokens are left out. What comes is
    read behind the ids `after` which it stands: words begin with a space there. The library's
    `tokenizers.decoders.DecodeStream` cannot serve: what is unfinished at the end it never gives
    out, and with byte fallback it raises ("Invalid prefix") where a byte makes those before it
    invalid that were decoded already, as a model may well have it.
    """

    def __init__(self, tokenizer: Tokenizer, after: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        before = [token for token in after if token not in tokenizer.special_tokens]
        self._held = before[-_BEFORE:]  # the ids whose text is still in the window
        self._num_old = len(self._held)  # how many of them are out
        text = tokenizer.decode(self._held)
        self._emitted = len(text.rstrip("\ufffd"))  # and how many characters of the window's text

    def push(self, token: int) -> str:
        """Return the text that is certain after one more id: none, or one or more characters."""
        # How an id decodes may depend on the one before (a leading space, a run of bytes), so the
        # window keeps the ids of the last piece that came out beside those still unfinished.
        if token in self._tokenizer.special_tokens:
            return ""
        self._held.append(token)
        text = self._tokenizer.decode(self._held)
        if text.endswith("\ufffd") or len(text) <= self._emitted:  # bytes not a character (yet)
            return ""
        new = text[self._emitted :]
        self._held = self._held[self._num_old :]
        self._num_old = len(self._held)
        self._emitted = len(self._tokenizer.decode(self._held))
        return new

    def flush(self) -> str:
        """Return the rest, unfinished characters as U+FFFD; the decoder is then as new."""
        rest = self._tokenizer.decode(self._held)[self._emitted :]
        self._held, self._num_old, self._emitted = [], 0, 0
        return rest


def _fetch_from_hub(name: str) -> Path:
    """Return the folder of the hub's cache with the tokenizer `hf:NAME`."""
    repository = name.removeprefix(HUB)
    try:
        with hub_or_cache():
            return Path(
                huggingface_hub.snapshot_download(
                    repository, allow_patterns=["tokenizer.json", *BESIDE, f"{TEMPLATES}/*.jinja"]
                )
            )
    except Exception as error:  # no connection, no such name, not allowed in: each its own
        reason = " ".join(str(error).split())[:200]
        raise WakefulError(
            f"the tokenizer {name} cannot be fetched ({type(error).__name__}: {reason}): check the "
            f"connection, or whether {repository} asks for a login; or put its tokenizer.json and "
            "tokenizer_config.json into a folder and name that as the tokenizer (data.tokenizer)"
        ) from error


def special_ids_around(ids: list[int], plain: list[int]) -> tuple[list[int], list[int]]:
    """Return the special ids before and after a text in `ids`; `plain` are the text's own ids.

    Of a text without ids, the first special id counts as before it and the rest as after it.
    """
    last_start = len(ids) - len(plain)
    matches = (start for start in range(last_start + 1) if ids[start : start + len(plain)] == plain)
    text_start = next(matches, 0) if plain else 1
    return ids[:text_start], ids[text_start + len(plain) :]


def _adding_processor(
    inner: tokenizers.Tokenizer, first: int | None, last: int | None
) -> dict[str, Any]:
    """Return the post-processor that Transformers makes to put these tokens around a text."""
    begin, end = (None if token is None else inner.id_to_token(token) for token in (first, last))
    single = [begin, "$A", end]
    pair = [begin, "$A:0", end, begin and f"{begin}:1", "$B:1", end and f"{end}:1"]
    template = processors.TemplateProcessing(
        single=" ".join(filter(None, single)),
        pair=" ".join(filter(None, pair)),
        special_tokens=[(name, token) for name, token in ((begin, first), (end, last)) if name],
    )
    return json.loads(template.__getstate__())


def _without_opening_token(token: int, processor: Any) -> Any:
    """Return a tokenizer.json post-processor that does not put `token` before a text."""
    match processor:
        case {"type": "Sequence", "processors": parts}:
            return {
                **processor,
                "processors": [_without_opening_token(token, part) for part in parts],
            }
        case {"type": "BertProcessing" | "RobertaProcessing" as kind, "cls": cls, "sep": sep}:
            if cls[1] != token:
                return processor
            bert, end = kind == "BertProcessing", sep[0]
            template = processors.TemplateProcessing(
                single=f"$A {end}",
                pair=f"$A {end} $B:1 {end}:1" if bert else f"$A {end} {end} $B:0 {end}",
                special_tokens=[tuple(sep)],
            )
            return json.loads(template.__getstate__())
        case {"type": "TemplateProcessing", "special_tokens": known}:
            special = {name for name, entry in known.items() if entry["ids"] == [token]}
            named = {
                name: _without_opening_pieces(special, processor[name])
                for name in ("single", "pair")
            }
            return processor | named
        case _:
            return processor


def _without_opening_pieces(
    special: Collection[str], template: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return a template's pieces without the `special` tokens that precede its last text."""
    last_text = max((n for n, piece in enumerate(template) if "Sequence" in piece), default=-1)
    return [
        piece
        for n, piece in enumerate(template)
        if n > last_text or piece.get("SpecialToken", {}).get("id") not in special
    ]


def _remove_bos(template: str) -> str:
    """Return a chat template to which the token that begins a text is nothing."""
    return "{% set bos_token = '' %}" + template if "bos_token" in template else template


def beside_of(folder: Path) -> dict[str, str]:
    """Return the texts of the files beside a tokenizer.json, each a JSON object or a template."""
    files: dict[str, str] = {}
    named = sorted(f"{TEMPLATES}/{file.name}" for file in (folder / TEMPLATES).glob("*.jinja"))
    for name in (*BESIDE, *named):
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
        files[name] = text
    return files


def token_ids(table: Mapping[str, Any], name: str) -> list[int]:
    """Return the token ids of a setting of generation, without negative ones, which are no token.

    Raises:
        WakefulError: one of them is not a whole number, or larger than any token's.
    """
    value = table.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(token) is not int or token > _LARGEST_ID for token in ids):
        raise WakefulError(
            f"{name} = {value!r}, in the model's {GENERATION} or config.json, must be a token id, "
            "a list of them or null"
        )
    return [token for token in ids if token >= 0]


def check_beside(folder: Path) -> None:
    """Raise `WakefulError` for what no tokenizer's files hold, before a library believes them."""
    for name in (FILE, CONFIG):
        table: object = None
        with contextlib.suppress(OSError, ValueError, RecursionError):  # which says that better
            table = json.loads((folder / name).read_text("utf-8"))
        if isinstance(table, dict):
            (_check_ids if name == FILE else _check_config)(folder / name, table)


def _check_ids(file: Path, table: Any) -> None:
    """Raise `WakefulError` for an id that is far past the number of tokens: each below it takes
    memory.
    """
    model, added = table.get("model"), table.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else []
    count = len(vocabulary) if isinstance(vocabulary, dict | list) else 0
    if isinstance(added, list):
        ids += [token.get("id") for token in added if isinstance(token, dict)]
        count += len(added)
    for step in _steps(table.get("normalizer")):
        charsmap = step.get("precompiled_charsmap")
        if isinstance(charsmap, str) and not _is_whole(charsmap):
            raise WakefulError(
                f"{file} has a precompiled_charsmap that is not whole: it is damaged"
            )
    highest = max((token for token in ids if isinstance(token, int)), default=0)
    if highest > MOST_HOLES * count:
        raise WakefulError(f"{file} has an id {highest} and {count} tokens: it is damaged")


def _steps(part: object) -> Iterator[dict[str, Any]]:
    """Yield a part of a tokenizer.json and the steps that it is a sequence of."""
    if isinstance(part, dict):
        yield part
        for step in part.get("normalizers") or ():
            yield from _steps(step)


def _is_whole(charsmap: str) -> bool:
    """Tell whether a map of characters has as many bytes as it announces, which take memory."""
    try:
        content = base64.b64decode(charsmap, validate=True)
    except ValueError:
        return False
    return len(content) >= 4 and int.from_bytes(content[:4], "little") <= len(content) - 4


def _check_config(file: Path, table: dict[str, Any]) -> None:
    try:
        _read_templates(table)
    except WakefulError as error:
        raise WakefulError(f"{file}: {error}") from None


def _read_templates(table: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates of tokenizer_config.json by name."""
    value = table.get("chat_template")
    several = value if isinstance(value, list) else [{"name": "default", "template": value}]
    templates: dict[str, str] = {}
    for entry in several:
        if not isinstance(entry, dict) or not entry.get("template"):
            continue
        name, text = entry.get("name"), entry["template"]
        if not (isinstance(name, str) and _TEMPLATE_NAME.fullmatch(name) and isinstance(text, str)):
            raise WakefulError(
                f"the chat template {name!r} must have a name of letters, digits, _ and -, and a "
                "text"
            )
        templates[name] = text
    return templates


def _named_special_token(files: Mapping[str, str], role: str) -> str:
    """Return the text of a special token, such as "<s>" for `bos_token`, or "" for none.

    tokenizer_config.json is asked before special_tokens_map.json; `files` are their JSON texts.
    """
    for name in (CONFIG, SPECIAL):
        token = json.loads(files.get(name, "{}")).get(role)
        token = token.get("content") if isinstance(token, dict) else token
        if token and isinstance(token, str):
            return token
    return ""
