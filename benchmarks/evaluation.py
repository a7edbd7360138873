"""Asking a model lm-eval's questions: our adapter against lm-eval's own class, same answers.

LAMBADA's form, a passage whose last word is asked for, and multiple choice of four endings a
context, both of the running Python's library.
"""

import random
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.diagnose import load as smollm2_shaped
from benchmarks.timing import Ratio, compare
from wakeful.data.sources import read_documents
from wakeful.errors import WakefulError
from wakeful.evaluation.adapter import Adapter, Transformer
from wakeful.evaluation.tasks import quiet
from wakeful.loading.load import load
from wakeful.loading.model import Model

QUESTIONS, CHOICES = 200, 50
WORDS = (50, 110)
"""The words of a passage; LAMBADA's have 75 on average."""
BATCH = 8


def ratios() -> Iterator[Ratio]:
    """Yield both kinds of questions on SmolLM2, or on a random model of its shape."""
    yield from against_own_class(model(), QUESTIONS, CHOICES)


def model() -> Model:
    """Return SmolLM2; where it is not installed, random weights and a tokenizer of bytes."""
    try:
        return load("smollm2", device="cpu")
    except WakefulError:
        return load(smollm2_shaped(""), tokenizer=byte_tokenizer())


def against_own_class(
    loaded: Model, questions: int, choices: int, rounds: int = 3
) -> Iterator[Ratio]:
    """Compare the two on LAMBADA's form and on multiple choice, after checking their answers."""
    assert isinstance(loaded.module, LlamaForCausalLM)
    given = {"bos": False, "batch_size": BATCH, "progress": lambda done, total: None}
    with quiet():
        ours, theirs = Adapter(loaded, **given), Transformer(loaded, **given)
        asked = {
            f"{questions} LAMBADA questions": completions(questions),
            f"{choices} questions of 4 choices": endings(choices),
        }
        for name, requests in asked.items():
            np.testing.assert_allclose(
                likelihoods(ours, requests[:8]), likelihoods(theirs, requests[:8]), rtol=1e-4
            )
            yield compare(
                name, partial(likelihoods, ours, requests), "lm-eval's HFLM",
                partial(likelihoods, theirs, requests), rounds=rounds, warmup=0, target="<= 0.80",
            )  # fmt: skip


def likelihoods(asked: Any, requests: Sequence[Instance]) -> list[float]:
    return [nats for nats, _ in asked.loglikelihood(list(requests))]


def completions(count: int) -> list[Instance]:
    """Return passages whose last word is asked for."""
    passages = (passage.rpartition(" ") for passage in _passages(count))
    return _instances((context, f" {word}") for context, _, word in passages)


def endings(count: int) -> list[Instance]:
    """Return passages with four endings of several words each, in turn."""
    chooser = random.Random(1)

    def four(passage: str) -> Iterator[tuple[str, str]]:
        words = passage.split(" ")
        for _ in range(4):
            ending = chooser.sample(words, chooser.randint(3, 12))
            yield " ".join(words[:-5]), " " + " ".join(ending)

    return _instances(pair for passage in _passages(count) for pair in four(passage))


def _passages(count: int) -> list[str]:
    chooser = random.Random(0)
    words = next(
        words for document in read_documents("python-stdlib")
        if len(words := document.text.split()) > 10_000
    )  # fmt: skip
    starts = (chooser.randrange(len(words) - WORDS[1]) for _ in range(count))
    return [" ".join(words[start : start + chooser.randint(*WORDS)]) for start in starts]


def _instances(pairs: Any) -> list[Instance]:
    return [
        Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=n)
        for n, pair in enumerate(pairs)
    ]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are bytes."""
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<eos>"]
    inner = Tokenizer(models.BPE(vocab={name: n for n, name in enumerate(names)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")
