"""Continuing texts, one token at a time."""

import math
from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from wakeful.errors import WakefulError
from wakeful.model.cache import Cache
from wakeful.model.decoder import Decoder
from wakeful.model.finite import check_logits


def generate(
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
    """Return up to `num_tokens` token ids that continue `prompt`, each as soon as it is known.

    The prompt is read once and the key/value cache does the rest. `temperature` 0 is greedy;
    `top_k` keeps the likeliest tokens (0: all), `top_p` the smallest set of them whose
    probabilities reach it. Generation ends early at a token of `stop`, which is not yielded.

    Raises:
        WakefulError: an empty prompt, more tokens than the context holds, or logits that are not
            finite.
    """
    cache: Cache | None = None

    def step(tokens: Tensor) -> Tensor:
        nonlocal cache
        if cache is None:  # made only once the request is known to fit
            cache = decoder.new_cache(1, len(prompt) + num_tokens)
        # Only the last token's logits are wanted, and the head is the widest matrix.
        return decoder.logits(decoder.hidden(tokens, cache=cache)[:, -1])[0]

    return continuation(
        step,
        prompt,
        device=decoder.embed.weight.device,
        context=decoder.config.context,
        num_tokens=num_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=stop,
    )


@torch.inference_mode()
def greedy_batch(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    num_tokens: int,
    stop: Container[int],
    ended: Callable[[int, list[int]], bool] = lambda row, tokens: False,
) -> list[list[int]]:
    """Return the likeliest tokens after each of several prompts, as `generate` does for one.

    Prompts are padded at their beginning, and a row leaves the batch at a token of `stop`, which is
    not returned, after `num_tokens`, or once `ended`, given its number and tokens, says so.

    Raises:
        WakefulError: an empty prompt, or more tokens than the context holds.
    """
    longest = max(map(len, prompts))
    if not all(prompts):
        raise WakefulError("an empty prompt has nothing to continue; give at least one token")
    device = decoder.embed.weight.device
    padding = torch.tensor([longest - len(prompt) for prompt in prompts])
    tokens = torch.tensor(
        [[*[0] * (longest - len(prompt)), *prompt] for prompt in prompts], device=device
    )
    # Without padding no mask is needed, which is what fused attention is fast at.
    valid = None
    if bool(padding.any()):
        valid = (torch.arange(longest + num_tokens) >= padding[:, None]).to(device)
    cache = decoder.new_cache(len(prompts), longest + num_tokens)
    written: list[list[int]] = [[] for _ in prompts]
    active = list(range(len(prompts)))
    for _ in range(num_tokens):
        seen = None if valid is None else valid[:, : cache.length + tokens.shape[1]]
        states = decoder.hidden(tokens, cache=cache, valid=seen)
        likeliest = check_logits(decoder.logits(states[:, -1])).argmax(1).tolist()
        stay: list[int] = []
        for place, (row, token) in enumerate(zip(active, likeliest, strict=True)):
            if token in stop:
                continue
            written[row].append(token)
            if not ended(row, written[row]):
                stay.append(place)
        if not stay:
            break
        if len(stay) < len(active):
            rows = torch.tensor(stay, device=device)
            cache.reorder(rows)
            valid = None if valid is None else valid[rows]
            active = [active[place] for place in stay]
        tokens = torch.tensor([[written[row][-1]] for row in active], device=device)
    return written


def continuation(
    step: Callable[[Tensor], Tensor],
    prompt: list[int],
    *,
    device: torch.device,
    context: int,
    num_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    stop: Container[int],
) -> Iterator[int]:
    """Return token ids as `generate` does, from a model that is a function.

    `step` takes the tokens (1, L) that follow those it has seen and returns the logits (V,) of the
    next one.
    """
    if not prompt:
        raise WakefulError("an empty prompt has nothing to continue; give at least one token")
    if not 0 <= temperature < math.inf or top_k < 0 or not 0 < top_p <= 1:
        raise WakefulError(
            f"temperature and top_k must not be negative and top_p must be in (0, 1], got "
            f"{temperature}, {top_k} and {top_p}"
        )
    if num_tokens < 0 or not 0 <= seed < 2**63:
        raise WakefulError(
            f"num_tokens must not be negative and seed must be between 0 and 2**63 - 1, got "
            f"{num_tokens} and {seed}"
        )
    if len(prompt) + num_tokens > context:
        raise WakefulError(
            f"{len(prompt)} prompt tokens and {num_tokens} new ones are more than the model's "
            f"context of {context}"
        )
    generator = torch.Generator().manual_seed(seed)
    pick = partial(
        choose_token, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator
    )
    tokens = torch.tensor([prompt], device=device)
    return _tokens(step, tokens, num_tokens=num_tokens, pick=pick, stop=stop)


@torch.inference_mode()
def _tokens(
    step: Callable[[Tensor], Tensor],
    tokens: Tensor,
    *,
    num_tokens: int,
    pick: Callable[[Tensor], int],
    stop: Container[int],
) -> Iterator[int]:
    for _ in range(num_tokens):
        token = pick(step(tokens).float().cpu())
        if token in stop:
            return
        yield token
        tokens = torch.tensor([[token]], device=tokens.device)


@torch.inference_mode()
def side_by_side(
    step: Callable[[Tensor, list[int]], Tensor],
    prompts: Sequence[Sequence[int]],
    *,
    device: torch.device,
    length: int,
    ends: Container[int],
    reply: Sequence[int] = (),
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
) -> list[list[int]]:
    """Return every prompt with its continuation, each of up to `length` tokens in all.

    A row ends with the first token of `ends`. Where there is a `reply`, it takes the place of that
    first token, and the next one ends the row: a question is written, and then its answer.

    No row is padded: the shortest prompt is read at once, and what longer ones and replies have
    more is read token by token while other rows go on. `step` takes the new tokens (B, L) and which
    rows of the step before they belong to, and returns the logits (B, V) of the next.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = [list(prompt) for prompt in prompts]
    asks = [bool(reply)] * len(rows)
    alive = list(range(len(rows)))
    kept, read = alive, min(map(len, rows))
    tokens = [row[:read] for row in rows]
    while alive:
        logits = step(torch.tensor(tokens, device=device), kept).float().cpu()
        chosen = choose_each(
            logits, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator
        )
        ended: set[int] = set()
        for row, token in zip(alive, chosen.tolist(), strict=True):
            if len(rows[row]) > read:
                continue
            if token not in ends:
                rows[row].append(token)
            elif asks[row]:
                asks[row] = False
                rows[row] += reply
            else:
                rows[row].append(token)
                ended.add(row)
        if read + 1 >= length:
            break
        kept = [place for place, row in enumerate(alive) if row not in ended]
        alive = [alive[place] for place in kept]
        tokens = [[rows[row][read]] for row in alive]
        read += 1
    return [row[:length] for row in rows]


def choose_token(
    logits: Float[Tensor, "V"],
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    generator: torch.Generator,
) -> int:
    """Return one token id drawn from softmax(logits / temperature), cut to top_k and top_p."""
    one = choose_each(
        logits.unsqueeze(0), temperature=temperature, top_k=top_k, top_p=top_p, generator=generator
    )
    return int(one)


def choose_each(
    logits: Float[Tensor, "B V"],
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    generator: torch.Generator,
) -> Int[Tensor, "B"]:
    """Return a token id for every row, as `choose_token` does."""
    check_logits(logits)
    if temperature == 0:
        return logits.argmax(-1)
    # In double and less the largest, so that no temperature is too low for it.
    count = min(top_k or logits.shape[-1], logits.shape[-1])
    if count == logits.shape[-1] and top_p == 1.0:  # nothing to sort for
        highest = logits.amax(-1, keepdim=True).double()
        probabilities = ((logits.double() - highest) / temperature).softmax(-1)
        return torch.multinomial(probabilities, 1, generator=generator)[:, 0]
    kept, ids = logits.topk(count, sorted=True)
    probabilities = ((kept.double() - kept[:, :1].double()) / temperature).softmax(-1)
    # A token stays if those before it have not reached top_p; the first always stays.
    before = probabilities.cumsum(-1) - probabilities
    probabilities[before >= top_p] = 0.0
    return ids.gather(-1, torch.multinomial(probabilities, 1, generator=generator))[:, 0]
