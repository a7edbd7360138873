"""Models that lm-eval can ask: our decoder by an adapter, Transformers models by lm-eval's HFLM.

Both encode exactly as they say: no BOS, or one BOS before every context. HFLM alone would leave
that to the tokenizer's template, which may also add an end, or nothing when asked for BOS.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from wakeful.data.tokenizer import Tokenizer
from wakeful.errors import WakefulError
from wakeful.evaluation.perplexity import check_numbers, log_likelihoods
from wakeful.evaluation.tasks import quiet
from wakeful.loading.model import Model
from wakeful.model.decoder import IGNORED
from wakeful.probes.running import as_decoder
from wakeful.quant import quantized_layers

Request = tuple[Any, list[int], list[int]]
"""What was asked, the context's tokens and the continuation's."""
_MAX_NEW_TOKENS = 256
"""What lm-eval generates where a task names no number."""


class Adapter(TemplateLM):
    """Any loaded model, asked for log-likelihoods; a decoder of ours also for greedy text."""

    def __init__(
        self,
        loaded: Model,
        *,
        bos: bool = False,
        batch_size: int = 4,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        super().__init__()
        self.loaded = loaded
        self.batch_size = batch_size
        self._bos = [loaded.bos] if bos and loaded.bos is not None else []
        self._progress = progress

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        tokenizer = self.loaded.tokenizer
        if isinstance(tokenizer, Tokenizer):
            return tokenizer.end_of_text
        end = tokenizer.eos_token_id
        if not isinstance(end, int):
            raise WakefulError(f"{self.loaded.name}'s tokenizer names no token that ends a text")
        return end

    @property
    def prefix_token_id(self) -> int:
        """What stands for an empty context: BOS, or else the end of the text before."""
        return self.eot_token_id if self.loaded.bos is None else self.loaded.bos

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
        sums: list[float] = []
        for request in requests:
            cut = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0], add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.loaded.context,
                context_len=1,
            )
            rows = [("", *make_disjoint_window(window)) for window in cut]
            sums.append(sum(likelihood for likelihood, _ in self._loglikelihood_tokens(rows)))
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return what a decoder of ours writes greedily after each context."""
        texts: list[str] = []
        for done, request in enumerate(requests, start=1):
            arguments: Any = request.args
            texts.append(self._written(arguments[0], arguments[1]))
            self._progress(done, len(requests))
        return texts

    @torch.inference_mode()
    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, **_: object
    ) -> list[tuple[float, bool]]:
        # The longest first: rows of like length waste little padding, and memory fails early.
        order = sorted(range(len(requests)), key=lambda n: -sum(map(len, requests[n][1:])))
        answers: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        for start in range(0, len(order), self.batch_size):
            places = order[start : start + self.batch_size]
            inputs, targets = self._batch([requests[place] for place in places])
            likelihoods, greedy = log_likelihoods(self.loaded.module, inputs, targets)
            for row, place in enumerate(places):
                answers[place] = float(likelihoods[row].sum()), bool(greedy[row].all())
            self._progress(start + len(places), len(order))
        return answers

    def _batch(self, requests: Sequence[Request]) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, padded at the end; a context too long loses its beginning."""
        rows: list[tuple[list[int], list[int]]] = []
        for _, context, continuation in requests:
            check_answer(self.loaded, context, continuation)
            row = [*context, *continuation][-(self.loaded.context + 1) :]
            rows.append((row[:-1], continuation))
        longest = max(len(row) for row, _ in rows)
        inputs = torch.zeros(len(rows), longest, dtype=torch.long)
        targets = torch.full((len(rows), longest), IGNORED)
        for n, (row, continuation) in enumerate(rows):
            inputs[n, : len(row)] = torch.tensor(row)
            targets[n, len(row) - len(continuation) : len(row)] = torch.tensor(continuation)
        device = next(self.loaded.module.parameters()).device
        return inputs.to(device), targets.to(device)

    def _written(self, context: str, settings: dict[str, Any]) -> str:
        if settings.get("do_sample", False) and settings.get("temperature", 1.0) > 0:
            raise WakefulError(f"a task samples its answers, and {self.loaded.name} only continues")
        until = settings.get("until", [])
        until = [until] if isinstance(until, str) else until
        limit = settings.get("max_gen_toks", _MAX_NEW_TOKENS)
        room = self.loaded.context - limit
        if room < 1:
            raise WakefulError(
                f"a task asks for {limit} new tokens, and the context of {self.loaded.name} is "
                f"{self.loaded.context}"
            )
        prompt = (self.tok_encode(context) or [self.prefix_token_id])[-room:]
        tokens: list[int] = []
        text = ""
        for token in self.loaded.tokens_after(
            prompt, num_tokens=limit, temperature=0.0, stop=self.eot_token_id
        ):
            tokens.append(token)
            text = str(self.loaded.tokenizer.decode(tokens))
            if any(stop in text for stop in until):
                break
        return text[: min((text.find(stop) for stop in until if stop in text), default=None)]


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

    def __init__(
        self,
        loaded: Model,
        *,
        bos: bool,
        batch_size: int,
        progress: Callable[[int, int], None],
    ) -> None:
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

    def tok_batch_encode(self, strings: list[str], *rest: Any, **named: Any) -> Any:
        """Return padded prompts to generate from, after BOS where that was asked for."""
        first = self.tokenizer.bos_token if self._first else ""
        return super().tok_batch_encode([f"{first}{text}" for text in strings], *rest, **named)

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], *rest: Any, **named: Any
    ) -> list[tuple[float, bool]]:
        for _, context, continuation in requests:
            check_answer(self._loaded, context, continuation)
        return super()._loglikelihood_tokens(requests, *rest, **named)

    def _model_call(self, inps: Tensor, *rest: Any, **named: Any) -> Tensor:
        logits = check_numbers(super()._model_call(inps, *rest, **named))
        self._seen += len(inps)
        self._progress(self._seen, 0)
        return logits


def asked(
    loaded: Model, *, bos: bool, batch_size: int, progress: Callable[[int, int], None]
) -> TemplateLM:
    """Return a loaded model as lm-eval asks it, one question at a time where padding counts."""
    if any(layer.sees_padding for layer in quantized_layers(loaded.module).values()):
        batch_size = 1
    kind = Transformer if as_decoder(loaded.module) is None else Adapter
    with quiet():
        return kind(loaded, bos=bos, batch_size=batch_size, progress=progress)
