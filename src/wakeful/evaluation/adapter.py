"""Models that lm-eval can ask: what our decoder can be by an adapter, others by lm-eval's HFLM.

Both encode exactly as they say: no BOS, or one BOS before every context. HFLM alone would leave
that to the tokenizer's template, which may also add an end, or nothing when asked for BOS.
"""

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from wakeful.display import Passed, unseen
from wakeful.errors import WakefulError
from wakeful.evaluation.batching import Question, answers
from wakeful.evaluation.tasks import quiet
from wakeful.loading.model import Model
from wakeful.model.finite import check_logits
from wakeful.model.generate import greedy_batch
from wakeful.probes.running import as_decoder
from wakeful.quant import quantized_layers

Request = tuple[Any, list[int], list[int]]
"""What was asked, the context's tokens and the continuation's."""
_MAX_NEW_TOKENS = 256
"""What lm-eval generates where a task names no number."""
_GREEDY = {"until", "max_gen_toks", "do_sample", "temperature"}
_OF_GREEDY = {
    "bos_token_id", "eos_token_id", "pad_token_id", "max_length", "max_new_tokens", "do_sample",
    "temperature", "top_k", "top_p", "min_p", "typical_p", "use_cache", "transformers_version",
    "cache_implementation", "output_attentions", "output_hidden_states", "return_dict_in_generate",
}  # fmt: skip
"""What a model may say of generation that leaves greedy text what it is."""


class Adapter(TemplateLM):
    """A model that our decoder can be, asked for log-likelihoods and greedy text."""

    def __init__(
        self,
        loaded: Model,
        *,
        bos: bool = False,
        batch_size: int = 4,
        alone: bool = False,
        progress: Passed = unseen,
    ) -> None:
        """Ask `batch_size` rows at a time; `alone`: every question by itself.

        Raises:
            WakefulError: our decoder cannot be the model.
        """
        super().__init__()
        self.loaded = loaded
        self.decoder = loaded.decoder()
        self.batch_size = 1 if alone else batch_size
        self._alone = alone
        self._bos = [loaded.bos] if bos and loaded.bos is not None else []
        self._progress = progress

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        end = self.loaded.end
        if not isinstance(end, int):
            raise WakefulError(f"{self.loaded.name}'s tokenizer names no token that ends a text")
        return end

    @property
    def prefix_token_id(self) -> int:
        """What stands for an empty context: BOS, or else the end of the text before."""
        first = self.eot_token_id if self.loaded.bos is None else self.loaded.bos
        return self.loaded.checked([first])[0]

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: object
    ) -> list[int]:
        """Return a text's tokens, after BOS where that was asked for."""
        first = [] if add_special_tokens is False else self._bos
        return [*first, *self.loaded.plain(string)]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return each text's log-likelihood, in disjoint windows as long as the context."""
        rows: list[Request] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            cut = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0], add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.loaded.context,
                context_len=1,
            )
            windows = [("", *make_disjoint_window(window)) for window in cut]
            rows += windows
            owners += [number] * len(windows)
        sums = [0.0] * len(requests)
        found = self._loglikelihood_tokens(rows)
        for owner, (likelihood, _) in zip(owners, found, strict=True):
            sums[owner] += likelihood
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return what the model writes greedily after each context.

        Where a task, or the model's own settings, ask for another way of writing, lm-eval's own
        class writes for a model of Transformers.

        Raises:
            WakefulError: a decoder of ours would have to write otherwise than greedily, or a task
                asks for more tokens than the context.
        """
        texts: list[str] = [""] * len(requests)
        prompts: dict[int, list[int]] = {}
        settings: dict[int, dict[str, Any]] = {}
        others: list[int] = []
        for place, request in enumerate(requests):
            wanted: Any = normalize_gen_kwargs(request.args[1], _MAX_NEW_TOKENS)  # pyright: ignore
            if self._is_greedy(wanted):
                settings[place] = wanted
                prompts[place] = self._prompt(request.args[0], wanted["max_gen_toks"])
            else:
                others.append(place)
        done = 0
        order = sorted(prompts, key=lambda place: -len(prompts[place]))
        for limit in {wanted["max_gen_toks"]: 0 for wanted in settings.values()}:
            alike = [place for place in order if settings[place]["max_gen_toks"] == limit]
            for start in range(0, len(alike), self.batch_size):
                batch = alike[start : start + self.batch_size]
                stops = [settings[place]["until"] for place in batch]
                written = self._written([prompts[place] for place in batch], stops, limit)
                for place, text in zip(batch, written, strict=True):
                    texts[place] = text
                done += len(batch)
                self._progress(done, len(requests))
        if others:
            written = self._own_class.generate_until([requests[place] for place in others])
            for place, text in zip(others, written, strict=True):
                texts[place] = text
        return texts

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, **_: object
    ) -> list[tuple[float, bool]]:
        questions: list[Question] = []
        for place, (_, context, continuation) in enumerate(requests):
            check_answer(self.loaded, context, continuation)
            # A context too long loses its beginning.
            row = [*context, *continuation][-(self.loaded.context + 1) :]
            questions.append(Question(place, row[:-1], continuation))
        found: dict[int, tuple[float, bool]] = {}
        for place, likelihood, greedy in answers(
            self.decoder, questions, batch_size=self.batch_size, alone=self._alone
        ):
            found[place] = likelihood, greedy
            self._progress(len(found), len(questions))
        return [found[place] for place in range(len(requests))]

    def _is_greedy(self, settings: dict[str, Any]) -> bool:
        """Tell whether greedy text is what is asked for, and what the model's own settings give."""
        if settings.get("do_sample", False) and settings.get("temperature", 1.0) > 0:
            return False
        said = getattr(self.loaded.module, "generation_config", None)
        own = said.to_diff_dict() if isinstance(said, GenerationConfig) else {}
        unusual = {name for name in own if not name.startswith("_")} - _OF_GREEDY
        return not unusual and settings.keys() <= _GREEDY

    @cached_property
    def _own_class(self) -> "Transformer":
        if as_decoder(self.loaded.module) is not None:
            raise WakefulError(
                f"a task samples its answers or searches for them, and {self.loaded.name} only "
                "continues greedily"
            )
        return Transformer(
            self.loaded, bos=bool(self._bos), batch_size=self.batch_size, progress=self._progress
        )

    def _prompt(self, context: str, limit: int) -> list[int]:
        room = self.loaded.context - limit
        if room < 1:
            raise WakefulError(
                f"a task asks for {limit} new tokens, and the context of {self.loaded.name} is "
                f"{self.loaded.context}"
            )
        return (self.tok_encode(context) or [self.prefix_token_id])[-room:]

    def _written(self, prompts: list[list[int]], stops: list[list[str]], limit: int) -> list[str]:
        end = self.loaded.text_of(self.eot_token_id)

        def ended(row: int, tokens: list[int]) -> bool:
            text = self.loaded.decode(tokens, special=True)
            return any(stop in text for stop in stops[row] if stop)

        written = greedy_batch(
            self.decoder, prompts, num_tokens=limit, stop=self._ends, ended=ended
        )
        return [
            postprocess_generated_text(self.loaded.decode(tokens), [*until, end], None)
            for tokens, until in zip(written, stops, strict=True)
        ]

    @cached_property
    def _ends(self) -> frozenset[int]:
        """The tokens that end a text: the tokenizer's, and those the model's settings name."""
        return self.loaded.ends | {self.eot_token_id}


def check_answer(loaded: Model, context: list[int], continuation: list[int]) -> None:
    """Raise `WakefulError` where an answer has no token, or more than the model's context."""
    if not context or not 0 < len(continuation) <= loaded.context:
        raise WakefulError(
            f"an example's answer is {len(continuation)} of {loaded.name}'s tokens, and its "
            f"context holds {loaded.context}"
        )


_HFLM: Any = HFLM  # Its registering decorator hides its type.


class Transformer(_HFLM):
    """lm-eval's own class for Transformers models, with BOS as said and our progress."""

    def __init__(self, loaded: Model, *, bos: bool, batch_size: int, progress: Passed) -> None:
        assert isinstance(loaded.tokenizer, PreTrainedTokenizerBase)
        super().__init__(
            pretrained=loaded.module,
            tokenizer=loaded.tokenizer,
            backend="causal",
            batch_size=batch_size,
            softmax_dtype=torch.float32,
            add_bos_token=False,
        )
        self._loaded = loaded
        self._first = [loaded.bos] if bos and loaded.bos is not None else []
        self._progress = progress
        self._seen = 0

    def tok_encode(
        self,
        string: str,
        add_special_tokens: bool | None = None,
        left_truncate_len: int | None = None,
        **_: object,
    ) -> list[int]:
        """Return a text's tokens, after BOS where that was asked for."""
        first = [] if add_special_tokens is False else self._first
        tokens = [*first, *self._loaded.plain(string)]
        return tokens[-left_truncate_len:] if left_truncate_len else tokens

    def tok_batch_encode(
        self, strings: Sequence[str], left_truncate_len: int | None = None, **_: object
    ) -> tuple[Tensor, Tensor]:
        """Return prompts' tokens, as `tok_encode` does, padded on the left, and where they are."""
        rows = [self.tok_encode(text, left_truncate_len=left_truncate_len) for text in strings]
        padded = self.tokenizer.pad({"input_ids": rows}, padding_side="left", return_tensors="pt")
        return padded["input_ids"], padded["attention_mask"]

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], *rest: Any, **named: Any
    ) -> list[tuple[float, bool]]:
        for _, context, continuation in requests:
            check_answer(self._loaded, context, continuation)
        return super()._loglikelihood_tokens(requests, *rest, **named)

    def _model_call(self, inps: Tensor, *rest: Any, **named: Any) -> Tensor:
        logits = check_logits(super()._model_call(inps, *rest, **named))
        self._seen += len(inps)
        self._progress(self._seen, 0)
        return logits


def asked_model(
    loaded: Model,
    *,
    bos: bool,
    batch_size: int,
    progress: Passed,
    apart: Callable[[str], None] = lambda why: None,
) -> TemplateLM:
    """Return a loaded model as lm-eval asks it, one question at a time where padding counts.

    `apart` is told why, where lm-eval's own class must ask it.
    """
    alone = any(layer.sees_padding for layer in quantized_layers(loaded.module).values())
    make: Callable[..., TemplateLM] = partial(Adapter, alone=alone)
    if as_decoder(loaded.module) is None:
        try:
            loaded.decoder()
        except WakefulError as error:
            apart(str(error))
            make, batch_size = Transformer, 1 if alone else batch_size
    with quiet():
        return make(loaded, bos=bos, batch_size=batch_size, progress=progress)
