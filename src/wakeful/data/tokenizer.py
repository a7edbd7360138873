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

from wakeful.data.encoding import USE_ANOTHER_TOKENIZER, Encoder, check_growth, split_into_pieces
from wakeful.errors import WakefulError
from wakeful.guard import wrap_errors
from wakeful.hub import hub_or_cache
from wakeful.paths import expand_home

END_OF_TEXT = "<|endoftext|>"
MIN_VOCAB_SIZE = 256 + 1  # every byte, and the end of a text
_MOST_TRAINED = 2**20
MAX_IDS_PER_TOKEN = 100
"""Largest ratio of the highest id to the number of tokens: each id takes memory."""
FILE = "tokenizer.json"
CONFIG, SPECIAL = "tokenizer_config.json", "special_tokens_map.json"
GENERATION = "generation_config.json"
TEMPLATE = "chat_template.jinja"
COMPANION_FILES = (CONFIG, SPECIAL, TEMPLATE, GENERATION)
"""Files beside a tokenizer.json that are read and written together with it."""
HUB = "hf:"
"""Prefix of the name of a tokenizer on the Hugging Face hub."""
TEMPLATES = "additional_chat_templates"
"""Folder beside a tokenizer.json with named chat templates."""
_LARGEST_ID = 2**31 - 1
_LONG = re.compile(r"\S{1000}|\s{1000}")
_TEMPLATE_NAME = re.compile(r"[\w-]{1,64}")
"""Allowed names of chat templates; each is written as a file of its name."""
_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


class Tokenizer:
    """A `tokenizers.Tokenizer` with an end-of-text id, for which a special token that is spelled in
    a text is ordinary text (see `Encoder`).

    It is saved as it was loaded, so that Transformers reads the same tokenizer from its files.
    """

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        *,
        end_of_text: str | None,
        companion_files: Mapping[str, str] | None = None,
    ) -> None:
        """Wrap `inner`; `end_of_text` is the token that ends a text, or None if there is none.

        `companion_files` has the contents, by name, of the files beside its tokenizer.json, such as
        tokenizer_config.json.

        Raises:
            WakefulError: `inner` has no token `end_of_text`, or is damaged.
        """
        end = None if end_of_text is None else inner.token_to_id(end_of_text)
        if end_of_text is not None and end is None:
            raise WakefulError(
                f"the tokenizer has no token {end_of_text!r} to end a text: name one it has"
            )
        highest_id = max(inner.get_vocab(with_added_tokens=True).values())
        # A damaged normalizer or decoder could make a text many times as long.
        steps = {"normalizer": inner.normalizer, "decoder": inner.decoder}
        check_growth(
            {name: json.loads(step.__getstate__()) for name, step in steps.items() if step}
        )
        self.inner = inner
        self.end: int | None = end
        """The token that ends a text; None where there is none."""
        self.end_of_text_token = end_of_text
        self.vocab_size: int = 1 + highest_id
        """Rows an embedding needs: the highest id plus 1, as ids may have gaps."""
        self.companion_files = dict(companion_files or {})
        self.table: dict[str, Any] = json.loads(self.companion_files.get(CONFIG, "{}"))
        """The settings in tokenizer_config.json; empty without this file."""
        self.bos: int | None = self._id_of("bos_token")
        """The token that begins a sequence, where one is named."""
        self.pad: int | None = self._id_of("pad_token")
        """The token that fills up a batch, where one is named."""
        marked_ids = [token for token, added in inner.get_added_tokens_decoder().items()
                      if added.special]  # fmt: skip
        role_ids = [self._id_of(f"{role}_token") for role in _ROLES]
        self.special_tokens: frozenset[int] = frozenset(
            token for token in (*marked_ids, end, *role_ids) if token is not None
        )

    @classmethod
    def train(
        cls, texts: Iterable[str], vocab_size: int, *, end_of_text: str = END_OF_TEXT
    ) -> "Tokenizer":
        """Train a byte-level BPE tokenizer on `texts`; their order has no effect.

        Id 0 is `end_of_text`, ids 1 to 256 are the bytes. A pair must occur twice to become a
        token, so few texts give a smaller vocabulary than `vocab_size`. Words and runs of white
        space are cut after 1,000 characters, because the time per word grows with its square.

        Raises:
            WakefulError: `vocab_size` is less than 257, or too large.
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
        # Cutting texts into pieces bounds the memory, cutting long words the time.
        pieces = (piece for text in texts for piece in split_into_pieces(text))
        parts = (part for piece in pieces for part in _split_long_words(piece))
        _run_interruptibly(lambda: inner.train_from_iterator(parts, trainer))
        return cls(inner, end_of_text=end_of_text)

    @classmethod
    def load(cls, path: str | Path, *, require_end: bool = True) -> "Tokenizer":
        """Load a tokenizer from a `tokenizer.json`, a folder with one, or the hub (`hf:NAME`).

        The token that ends a text is the `eos_token` of `tokenizer_config.json` or
        `special_tokens_map.json` beside the file. If neither names one it is "<|endoftext|>", or,
        without `require_end`, there is none.

        Raises:
            WakefulError: the file is missing, is not a tokenizer or has no token that ends a text,
                or the hub cannot be reached.
        """
        file = _fetch_from_hub(str(path)) if str(path).startswith(HUB) else expand_home(path)
        file = file / "tokenizer.json" if file.is_dir() else file
        if not file.is_file():
            raise WakefulError(f"no tokenizer at {path}: pass a tokenizer.json or its folder")
        companion_files = read_companion_files(file.parent)
        with wrap_errors(f"{file} is not a tokenizer.json", "; fetch it again"):
            text = file.read_text("utf-8")
            _check_ids(file, json.loads(text))  # before the library takes memory for them
            inner = tokenizers.Tokenizer.from_str(text)
        default_end = END_OF_TEXT if require_end else None
        end_of_text = _named_special_token(companion_files, "eos_token") or default_end
        if end_of_text is not None and inner.token_to_id(end_of_text) is None:
            raise WakefulError(
                f"{file} has no token {end_of_text!r} to end a text: name its eos_token in a "
                "tokenizer_config.json beside it"
            )
        with wrap_errors(f"{file} is damaged", "; fetch it again"):
            return cls(inner, end_of_text=end_of_text, companion_files=companion_files)

    def save(self, path: str | Path) -> None:
        """Write the tokenizer as Transformers reads it: `tokenizer.json`, `tokenizer_config.json`,
        and the other companion files it was loaded with.

        `path` is a folder, which is created if it is missing, or a tokenizer.json file. The token
        that ends a text becomes the `eos_token` in tokenizer_config.json if none is named there.
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
        config.pop("auto_map", None)  # names code that is not copied
        table = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        for name, text in {**self.companion_files, CONFIG: table}.items():
            (file.parent / name).parent.mkdir(exist_ok=True)  # the folder of chat templates
            (file.parent / name).write_text(text, encoding="utf-8")

    @property
    def end_of_text(self) -> int:
        """The id of the token that ends a text; raises `WakefulError` where there is none."""
        if self.end is None:
            raise WakefulError(
                "the tokenizer names no token that ends a text: name its eos_token in its "
                "tokenizer_config.json"
            )
        return self.end

    @property
    def chat_template(self) -> str:
        """The default chat template of the tokenizer's files; "" where there is none."""
        return self.chat_templates.get("default", "")

    @property
    def chat_templates(self) -> dict[str, str]:
        """All chat templates of the tokenizer's files by name; the usual one is "default".

        A template in a .jinja file replaces the one of the same name in tokenizer_config.json.
        """
        templates = _read_templates(self.table)
        for file, text in self.companion_files.items():
            if file.endswith(".jinja"):
                templates["default" if file == TEMPLATE else Path(file).stem] = text
        return templates

    @property
    def opening(self) -> list[int]:
        """Special ids that Transformers puts before a text with this tokenizer."""
        return self._added_ids[0]

    @property
    def closing(self) -> list[int]:
        """Special ids that Transformers puts after a text with this tokenizer."""
        return self._added_ids[1]

    @functools.cached_property
    def _added_ids(self) -> tuple[list[int], list[int]]:
        """The special ids that Transformers puts before and after a text: those that "a" gets."""
        inner = self._transformers_tokenizer
        with wrap_errors("the tokenizer cannot encode a text", USE_ANOTHER_TOKENIZER):
            text_ids = inner.encode("a", add_special_tokens=False).ids
            return special_ids_around(inner.encode("a").ids, text_ids)

    @property
    def adds_bos(self) -> bool:
        """Whether BOS is among the ids that Transformers puts before a text."""
        return self.bos in self.opening

    @property
    def start_token(self) -> int:
        """The id that begins a sequence: BOS, or the token that ends a text where no BOS is named
        (as in GPT-2).
        """
        return self.end_of_text if self.bos is None else self.bos

    def with_bos(self) -> "Tokenizer":
        """Return a copy of this tokenizer that puts `start_token` before every text and names it as
        BOS; a tokenizer that puts BOS there already returns itself.

        Raises:
            WakefulError: the tokenizer names neither BOS nor a token that ends a text.
        """
        if self.adds_bos:
            return self
        settings, table = self._tables_to_write()
        processor = _make_post_processor(self.inner, self.start_token, None)
        if old_processor := settings["post_processor"]:  # keep what it adds, such as an end
            processor = {"type": "Sequence", "processors": [old_processor, processor]}
        settings["post_processor"] = processor
        bos_token = self.inner.id_to_token(self.start_token)
        return self._with_tables(settings, table | {"bos_token": bos_token})

    def without_bos(self) -> "Tokenizer":
        """Return a copy of this tokenizer that puts no BOS before a text, and whose chat templates
        write none; a tokenizer without BOS returns itself.

        It is for a model that was trained without BOS, or that has a stored prefix or learned sinks
        in its place. The token BOS stays in the vocabulary.

        Raises:
            WakefulError: the tokenizer adds BOS in a way that cannot be removed.
        """
        if self.bos is None:
            return self
        settings, table = self._tables_to_write()
        settings["post_processor"] = _without_opening_token(self.bos, settings["post_processor"])
        companion_files = dict(self.companion_files)
        for name, text in self.chat_templates.items():
            file = TEMPLATE if name == "default" else f"{TEMPLATES}/{name}.jinja"
            companion_files[file] = _remove_bos(text)
        table.pop("chat_template", None)  # the templates are now in files of their own
        changed = self._with_tables(settings, table, companion_files)
        if changed.adds_bos:
            raise WakefulError(
                f"the tokenizer's post-processor, a {settings['post_processor']['type']}, puts BOS "
                "before every text in a way that cannot be taken out: give the model a tokenizer "
                "that adds none"
            )
        return changed

    def _tables_to_write(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return changed copies of the tables of tokenizer.json and tokenizer_config.json.

        The post-processor in tokenizer.json then decides alone which special tokens are added
        around a text: it replaces the flags add_bos_token and add_eos_token of
        tokenizer_config.json, from which Transformers makes the same post-processor. Truncation
        and padding are off.
        """
        settings: dict[str, Any] = json.loads(self._json())
        settings |= {"truncation": None, "padding": None}
        table = dict(self.table)
        adds_bos, adds_end = table.pop("add_bos_token", None), table.pop("add_eos_token", None)
        if adds_bos is not None or adds_end is not None:  # without a flag tokenizer.json decides
            settings["post_processor"] = _make_post_processor(
                self.inner, self.bos if adds_bos else None, self.end if adds_end else None
            )
        return settings, table

    def _with_tables(
        self,
        settings: dict[str, Any],
        table: dict[str, Any],
        companion_files: Mapping[str, str] | None = None,
    ) -> "Tokenizer":
        """Return a copy with other tables of tokenizer.json (`settings`) and tokenizer_config.json
        (`table`), and with other companion files where they are given.
        """
        files = dict(companion_files or self.companion_files)
        files[CONFIG] = json.dumps(table, ensure_ascii=False)
        return Tokenizer(
            tokenizers.Tokenizer.from_str(json.dumps(settings)),
            end_of_text=self.end_of_text_token,
            companion_files=files,
        )

    def with_class(self, name: str) -> "Tokenizer":
        """Return a copy whose tokenizer_config.json names this class of Transformers."""
        settings, table = self._tables_to_write()
        return self._with_tables(settings, table | {"tokenizer_class": name})

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the `tokenizer.json` that `save` writes."""
        return hashlib.sha256(self._json().encode("utf-8")).hexdigest()

    def same_tokens(self, tokenizer: "Tokenizer") -> bool:
        """Return whether both tokenizers have the same vocabulary and the same end of text."""
        vocabularies_match = self.inner.get_vocab() == tokenizer.inner.get_vocab()
        return vocabularies_match and self.end == tokenizer.end

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without special ids; half a surrogate pair is refused."""
        return self.encode_batch([text])[0]

    def encode_marked(self, text: str) -> list[int]:
        """Return the ids of a text; where it spells a special token, it has that token's id.

        Use it for text that a program writes, such as a chat template, never for data. No special
        ids are added around the text.
        """
        with wrap_errors("the tokenizer cannot encode a text", USE_ANOTHER_TOKENIZER):
            return self._transformers_tokenizer.encode(text, add_special_tokens=False).ids

    @functools.cached_property
    def _transformers_tokenizer(self) -> tokenizers.Tokenizer:
        """The tokenizer as Transformers runs it: it adds the special tokens that
        tokenizer_config.json asks for. It neither truncates nor pads.

        Raises:
            WakefulError: the tokenizer is damaged.
        """
        tokenizer_json, _ = self._tables_to_write()
        with wrap_errors("the tokenizer is damaged", USE_ANOTHER_TOKENIZER):
            return tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json))

    @functools.cached_property
    def encoder(self) -> Encoder:
        """The encoder of texts, which never encodes part of a text as a special token."""
        spellings = (self.inner.id_to_token(token) for token in self.special_tokens)
        return Encoder(self._json(), [text for text in spellings if text is not None])

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, encoded together."""
        return self.encoder.encode_batch(texts)

    def decode(self, tokens: Iterable[int], *, special: bool = False) -> str:
        """Return the text of the ids `tokens`, without special tokens unless `special` is set."""
        ids = [token for token in tokens if special or token not in self.special_tokens]
        with wrap_errors("the tokenizer cannot decode its tokens", USE_ANOTHER_TOKENIZER):
            # Special tokens that are not wanted are already left out.
            return self.inner.decode(ids, skip_special_tokens=False)

    def _id_of(self, role: str) -> int | None:
        """Return the id of the token that the companion files name for a role, such as "bos_token";
        None where they name none, or one that the vocabulary lacks.
        """
        spelling = _named_special_token(self.companion_files, role)
        return self.inner.token_to_id(spelling) if spelling else None

    def _json(self) -> str:
        return self.inner.to_str(pretty=False)


_CONTEXT_IDS = 8
"""Ids before a stream of ids with which its first piece is decoded."""


def _split_long_words(text: str) -> Iterator[str]:
    """Yield a text in parts, cut after every 1,000 characters of one word or of white space."""
    start = 0
    for match in _LONG.finditer(text):
        yield text[start : match.end()]
        start = match.end()
    yield text[start:]


def _run_interruptibly(work: Callable[[], object]) -> None:
    """Run `work` in a thread and wait for it, so that Ctrl-C ends the wait.

    In the main thread, Python would handle no signal until the library's call returns. An error
    that `work` raises is raised here.
    """
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
    """Decode ids one at a time into pieces of text, which joined equal `tokenizer.decode` of all.

    This holds for any ids of byte-level tokenizers, broken UTF-8 included, and of other tokenizers
    if the ids come from text. Special tokens are left out. The ids are decoded as a continuation of
    the ids `after`, so that a word begins with a space. `tokenizers.decoders.DecodeStream` cannot
    be used: it never returns unfinished characters at the end, and with byte fallback it raises
    ("Invalid prefix") where a byte makes earlier, already decoded bytes invalid.
    """

    def __init__(self, tokenizer: Tokenizer, after: Sequence[int] = ()) -> None:
        """Begin to decode ids that continue the ids `after`, whose text is not returned."""
        self._tokenizer = tokenizer
        context = [token for token in after if token not in tokenizer.special_tokens]
        self._window = context[-_CONTEXT_IDS:]  # ids that are decoded together
        self._num_emitted_ids = len(self._window)  # of the window, from its beginning
        text = tokenizer.decode(self._window)
        # Characters of the window's text, without U+FFFD at its end: an unfinished character, which
        # `push` may complete.
        self._num_emitted_characters = len(text.rstrip("\ufffd"))

    def push(self, token: int) -> str:
        """Add one id and return the text that it completes; "" while a character is unfinished, and
        for a special token, which is left out.
        """
        # How an id decodes may depend on the one before (a leading space, a run of bytes), so the
        # window holds the ids of the last emitted piece and those that are still unfinished.
        if token in self._tokenizer.special_tokens:
            return ""
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        is_unfinished = text.endswith("\ufffd") or len(text) <= self._num_emitted_characters
        if is_unfinished:
            return ""
        piece = text[self._num_emitted_characters :]
        self._window = self._window[self._num_emitted_ids :]  # the ids of this piece
        self._num_emitted_ids = len(self._window)
        self._num_emitted_characters = len(self._tokenizer.decode(self._window))
        return piece

    def flush(self) -> str:
        """Return the remaining text, with U+FFFD for unfinished characters, and forget all ids."""
        rest = self._tokenizer.decode(self._window)[self._num_emitted_characters :]
        self._window, self._num_emitted_ids, self._num_emitted_characters = [], 0, 0
        return rest


def _fetch_from_hub(name: str) -> Path:
    """Download the files of the tokenizer `hf:NAME`; return their folder in the hub's cache.

    Without a network the folder must be in the cache already.

    Raises:
        WakefulError: the tokenizer cannot be downloaded and is not in the cache.
    """
    repository = name.removeprefix(HUB)
    try:
        with hub_or_cache():
            return Path(
                huggingface_hub.snapshot_download(
                    repository,
                    allow_patterns=["tokenizer.json", *COMPANION_FILES, f"{TEMPLATES}/*.jinja"],
                )
            )
    except Exception as error:  # each cause, such as no connection or no access, has its own class
        reason = " ".join(str(error).split())[:200]
        raise WakefulError(
            f"the tokenizer {name} cannot be fetched ({type(error).__name__}: {reason}): check the "
            f"connection, or whether {repository} asks for a login; or put its tokenizer.json and "
            "tokenizer_config.json into a folder and name that as the tokenizer (data.tokenizer)"
        ) from error


def special_ids_around(ids: list[int], text_ids: list[int]) -> tuple[list[int], list[int]]:
    """Return the special ids before and after a text's own ids, `text_ids`, within `ids`.

    If the text has no ids, the first of `ids` stands before it and the rest after it. If `ids` do
    not contain `text_ids`, the text is taken to be the first len(text_ids) of them.
    """
    length = len(text_ids)
    starts = (n for n in range(len(ids) - length + 1) if ids[n : n + length] == text_ids)
    start = next(starts, 0) if text_ids else 1
    return ids[:start], ids[start + length :]


def _make_post_processor(
    inner: tokenizers.Tokenizer, first: int | None, last: int | None
) -> dict[str, Any]:
    """Return a post-processor of tokenizer.json, as Transformers makes it, that puts the id `first`
    before a text and `last` after it; None adds nothing.
    """
    begin, end = (None if token is None else inner.id_to_token(token) for token in (first, last))
    # In a template, $A and $B are the texts, and ":1" gives a token the type of the second text.
    second_begin = f"{begin}:1" if begin else None
    second_end = f"{end}:1" if end else None
    single = [begin, "$A", end]
    pair = [begin, "$A:0", end, second_begin, "$B:1", second_end]
    template = processors.TemplateProcessing(
        single=" ".join(filter(None, single)),
        pair=" ".join(filter(None, pair)),
        special_tokens=[(name, token) for name, token in ((begin, first), (end, last)) if name],
    )
    return json.loads(template.__getstate__())


def _without_opening_token(token: int, processor: Any) -> Any:
    """Return a post-processor of tokenizer.json without the id `token` before a text; one of an
    unknown type is returned as it is.
    """
    match processor:
        case {"type": "Sequence", "processors": parts}:
            return {
                **processor,
                "processors": [_without_opening_token(token, part) for part in parts],
            }
        case {"type": "BertProcessing" | "RobertaProcessing" as kind, "cls": cls, "sep": sep}:
            if cls[1] != token:  # both are (spelling, id)
                return processor
            end = sep[0]
            # The same templates as the two types have, without `cls` at the front.
            pair = f"$A {end} {end} $B:0 {end}"
            if kind == "BertProcessing":
                pair = f"$A {end} $B:1 {end}:1"
            template = processors.TemplateProcessing(
                single=f"$A {end}", pair=pair, special_tokens=[tuple(sep)]
            )
            return json.loads(template.__getstate__())
        case {"type": "TemplateProcessing", "special_tokens": entries}:
            names = {name for name, entry in entries.items() if entry["ids"] == [token]}
            templates = {
                key: _without_opening_pieces(names, processor[key]) for key in ("single", "pair")
            }
            return processor | templates
        case _:
            return processor


def _without_opening_pieces(
    special: Collection[str], template: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return a template's pieces without the `special` tokens, given by spelling, that precede its
    last text.
    """
    # A piece is {"Sequence": ...}, a text, or {"SpecialToken": {"id": SPELLING}}.
    last_text = max((n for n, piece in enumerate(template) if "Sequence" in piece), default=-1)
    return [
        piece
        for n, piece in enumerate(template)
        if n > last_text or piece.get("SpecialToken", {}).get("id") not in special
    ]


def _remove_bos(template: str) -> str:
    """Return a chat template in which `bos_token` is the empty string."""
    return "{% set bos_token = '' %}" + template if "bos_token" in template else template


def read_companion_files(folder: Path) -> dict[str, str]:
    """Read the files that belong to a folder's tokenizer.json; return their contents by name.

    Files that are missing are left out.

    Raises:
        WakefulError: a file is not text, or a `.json` file is not a JSON object.
    """
    files: dict[str, str] = {}
    templates = sorted(f"{TEMPLATES}/{file.name}" for file in (folder / TEMPLATES).glob("*.jinja"))
    for name in (*COMPANION_FILES, *templates):
        file = folder / name
        if not file.is_file():
            continue
        try:
            text = file.read_text(encoding="utf-8")
            table = json.loads(text) if name.endswith(".json") else {}
            json.dumps(table, ensure_ascii=False).encode()  # raises for half a surrogate pair
        except (ValueError, RecursionError) as error:
            raise WakefulError(f"{file} is not JSON or not text: fetch it again") from error
        if not isinstance(table, dict):
            raise WakefulError(f"{file} must hold a JSON object: fetch it again")
        files[name] = text
    return files


def token_ids(table: Mapping[str, Any], name: str) -> list[int]:
    """Return the token ids that a configuration `table` has in the field `name` (an id, a list or
    null), without negative ones, which stand for no token.

    Raises:
        WakefulError: an id is not an integer, or larger than `_LARGEST_ID`.
    """
    value = table.get(name)
    if value is None:
        return []
    ids: list[Any] = value if isinstance(value, list) else [value]
    if any(type(token) is not int or token > _LARGEST_ID for token in ids):
        raise WakefulError(
            f"{name} = {value!r}, in the model's {GENERATION} or config.json, must be a token id, "
            "a list of them or null"
        )
    return [token for token in ids if token >= 0]


def check_tokenizer_files(folder: Path) -> None:
    """Check a folder's tokenizer.json and tokenizer_config.json before a library uses them.

    Files that are missing or not a JSON object are passed over.

    Raises:
        WakefulError: an id is far too large, the normalizer's table is incomplete, or a chat
            template is not allowed.
    """
    for name in (FILE, CONFIG):
        table: object = None
        # The library that loads an unreadable file has the better error message.
        with contextlib.suppress(OSError, ValueError, RecursionError):
            table = json.loads((folder / name).read_text("utf-8"))
        if not isinstance(table, dict):
            continue
        if name == FILE:
            _check_ids(folder / name, table)
        else:
            _check_config(folder / name, table)


def _check_ids(file: Path, table: Any) -> None:
    """Raise `WakefulError` for a damaged tokenizer.json, whose content is `table`.

    It is damaged if an id is far above the number of tokens (every id below it would take memory),
    or if a precompiled_charsmap (a normalizer's table in base64) is incomplete.
    """
    model, added = table.get("model"), table.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    # In a list of tokens an id is a position, which cannot be too large.
    ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else []
    num_tokens = len(vocabulary) if isinstance(vocabulary, dict | list) else 0
    if isinstance(added, list):
        ids += [token.get("id") for token in added if isinstance(token, dict)]
        num_tokens += len(added)
    for step in _steps(table.get("normalizer")):
        charsmap = step.get("precompiled_charsmap")
        if isinstance(charsmap, str) and not _is_complete_charsmap(charsmap):
            raise WakefulError(
                f"{file} has a precompiled_charsmap that is not whole: it is damaged"
            )
    highest = max((token for token in ids if isinstance(token, int)), default=0)
    if highest > MAX_IDS_PER_TOKEN * num_tokens:
        raise WakefulError(f"{file} has an id {highest} and {num_tokens} tokens: it is damaged")


def _steps(part: object) -> Iterator[dict[str, Any]]:
    """Yield a normalizer of tokenizer.json and, recursively, the normalizers that it contains."""
    if isinstance(part, dict):
        yield part
        for step in part.get("normalizers") or ():
            yield from _steps(step)


def _is_complete_charsmap(charsmap: str) -> bool:
    """Return whether a precompiled_charsmap (base64) has as many bytes as its header announces."""
    try:
        content = base64.b64decode(charsmap, validate=True)
    except ValueError:
        return False
    return len(content) >= 4 and int.from_bytes(content[:4], "little") <= len(content) - 4


def _check_config(file: Path, table: dict[str, Any]) -> None:
    """Raise `WakefulError`, with the file's name, for a chat template that is not allowed."""
    try:
        _read_templates(table)
    except WakefulError as error:
        raise WakefulError(f"{file}: {error}") from None


def _read_templates(table: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates in the table of a tokenizer_config.json, by name.

    Entries without a template are passed over.

    Raises:
        WakefulError: a template is not a text, or its name cannot be a file's name.
    """
    value = table.get("chat_template")
    entries = value if isinstance(value, list) else [{"name": "default", "template": value}]
    templates: dict[str, str] = {}
    for entry in entries:
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
    """Return the text of the special token for a role, such as "<s>" for `bos_token`; "" for none.

    `files` has JSON texts by file name; tokenizer_config.json precedes special_tokens_map.json.
    """
    for name in (CONFIG, SPECIAL):
        token = json.loads(files.get(name, "{}")).get(role)
        token = token.get("content") if isinstance(token, dict) else token
        if token and isinstance(token, str):
            return token
    return ""
