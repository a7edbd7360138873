"""Generation of text, one token at a time."""

import math
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from wakeful.errors import WakefulError
from wakeful.model.cache import Cache
from wakeful.model.decoder import Decoder
from wakeful.model.finite import check_logits


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings of random sampling.

    Tokens are drawn from softmax(logits / `temperature`), 0 being greedy; `top_k` keeps the
    likeliest tokens (0: all), `top_p` the smallest set of them whose probabilities reach it.

    Raises:
        WakefulError: a number is out of its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise `WakefulError` if a number is out of its range."""
        if not 0 <= self.temperature < math.inf or self.top_k < 0 or not 0 < self.top_p <= 1:
            raise WakefulError(
                "temperature and top_k must not be negative and top_p must be in (0, 1], got "
                f"{self.temperature}, {self.top_k} and {self.top_p}"
            )
        if not 0 <= self.seed < 2**63:
            raise WakefulError(f"seed must be between 0 and 2**63 - 1, got {self.seed}")

    @property
    def generator(self) -> torch.Generator:
        """A new generator with the seed."""
        return torch.Generator().manual_seed(self.seed)

    def choose(self, logits: Float[Tensor, "B V"], generator: torch.Generator) -> Int[Tensor, "B"]:
        """Return a token id for each row of logits: the likeliest at temperature 0, else a sample
        by `temperature`, `top_k` and `top_p`.

        Raises:
            Diverged: a row's largest logit is not finite.
        """
        check_logits(logits)
        if self.temperature == 0:
            return logits.argmax(-1)
        vocabulary = logits.shape[-1]
        num_tokens = min(self.top_k or vocabulary, vocabulary)  # a top_k of 0 keeps all
        # In float64 and minus the largest logit, so that low temperatures do not overflow.
        if num_tokens == vocabulary and self.top_p == 1.0:  # nothing to sort for
            highest = logits.amax(-1, keepdim=True).double()
            probabilities = ((logits.double() - highest) / self.temperature).softmax(-1)
            return torch.multinomial(probabilities, 1, generator=generator)[:, 0]
        top_logits, ids = logits.topk(num_tokens, sorted=True)
        scaled = (top_logits.double() - top_logits[:, :1].double()) / self.temperature
        probabilities = scaled.softmax(-1)
        # A token stays if likelier ones do not reach top_p together; the first always stays.
        sum_of_likelier = probabilities.cumsum(-1) - probabilities
        probabilities[sum_of_likelier >= self.top_p] = 0.0
        return ids.gather(-1, torch.multinomial(probabilities, 1, generator=generator))[:, 0]


class CachedForward:
    """Forward pass that returns the logits of the last token and keeps the cache between calls.

    The first call allocates the cache for a sequence of up to `length` tokens.
    """

    def __init__(self, decoder: Decoder, length: int) -> None:
        self._decoder, self._length = decoder, length
        self._cache: Cache | None = None

    def __call__(self, tokens: Int[Tensor, "1 L"]) -> Float[Tensor, "1 V"]:
        """Return the logits of the token after `tokens`, which continue those of earlier calls."""
        if self._cache is None:
            self._cache = self._decoder.new_cache(1, self._length)
        # Only the last token's logits are needed, and the head is the widest matrix.
        return self._decoder.logits(self._decoder.hidden(tokens, cache=self._cache)[:, -1])


def generate_tokens(
    decoder: Decoder,
    prompt: list[int],
    *,
    num_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop: Container[int] = (),
) -> Iterator[int]:
    """Return an iterator over up to `num_tokens` token ids that continue `prompt`.

    The model reads each token once, with a key/value cache. `temperature`, `top_k`, `top_p` and
    `seed` are as in `Sampling`. Generation ends early at a token of `stop`, which is not yielded.

    Raises:
        WakefulError: at once, for an empty prompt, more tokens than the context holds, or a number
            out of its range; during the iteration, for logits that are not finite.
    """
    step = CachedForward(decoder, len(prompt) + num_tokens)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    return continuation(
        step, prompt, sampling, device=decoder.embed.weight.device, context=decoder.config.context,
        num_tokens=num_tokens, stop=stop,
    )  # fmt: skip


def continuation(
    step: Callable[[Tensor], Tensor],
    prompt: list[int],
    sampling: Sampling,
    *,
    device: torch.device,
    context: int,
    num_tokens: int,
    stop: Container[int] = (),
) -> Iterator[int]:
    """Return an iterator over up to `num_tokens` token ids that continue a prompt, for any model.

    `step` takes the next tokens (1, L), on `device`, and returns the logits (1, V) of the token
    after them; it keeps the state of earlier tokens. `sampling` draws each token. A token of `stop`
    ends the text and is not yielded.

    Raises:
        WakefulError: at once, for an empty prompt, a negative number of tokens, or more tokens than
            the context holds.
    """
    if not prompt:
        raise WakefulError("an empty prompt has nothing to continue; give at least one token")
    if num_tokens < 0:
        raise WakefulError(f"num_tokens must not be negative, got {num_tokens}")
    if len(prompt) + num_tokens > context:
        raise WakefulError(
            f"{len(prompt)} prompt tokens and {num_tokens} new ones are more than the model's "
            f"context of {context}"
        )
    # The iterator starts with its first token, the checks above run at once.
    return _sample_tokens(step, prompt, sampling, device, num_tokens, stop)


@torch.inference_mode()
def _sample_tokens(
    step: Callable[[Tensor], Tensor],
    tokens: list[int],
    sampling: Sampling,
    device: torch.device,
    num_tokens: int,
    stop: Container[int],
) -> Iterator[int]:
    """Yield sampled token ids that continue `tokens`: `num_tokens`, or fewer if a token of `stop`
    comes, which is not yielded.

    Every step runs in inference mode, whatever mode the caller is in.
    """
    generator = sampling.generator
    for _ in range(num_tokens):
        logits = step(torch.tensor([tokens], device=device))
        token = int(sampling.choose(logits.float().cpu(), generator))
        if token in stop:
            return
        yield token
        tokens = [token]  # `step` keeps the state of earlier ones
