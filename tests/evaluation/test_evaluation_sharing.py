"""Questions asked together against each by itself, and against lm-eval's own class."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import LlamaForCausalLM, OPTConfig, OPTForCausalLM

import wakeful
from evaluation.models import LAMBADA, loaded_llama, write_lines
from wakeful.config.model import ModelConfig
from wakeful.evaluation.adapter import Adapter, Transformer, asked_model
from wakeful.evaluation.batching import Question, answers
from wakeful.evaluation.tasks import quiet
from wakeful.loading.load import load
from wakeful.loading.model import Model
from wakeful.model.decoder import Decoder
from wakeful.model.generate import generate, greedy_batch
from wakeful.model.initialize import initialize

CONTEXT = "the quick brown fox jumps over it"
ENDINGS = (" a", " b", " ab", " abc", " a much longer way", " é", " b")
PAIRS = [
    *((CONTEXT, ending) for ending in ENDINGS),
    *((CONTEXT + " and on", ending) for ending in ENDINGS[:3]),
    *(("one", ending) for ending in ENDINGS[2:5]),
    *(("x" * 90 + " end", ending) for ending in ENDINGS),  # which loses its beginning
    ("", " from nothing"),
    ("", " from nowhere"),
    ("a space at the end ", "of it"),
    ("alone", " here"),
    ("another one, alone and longer", " here"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return loaded_llama(tmp_path_factory.mktemp("models") / "llama", dtype=torch.float32)


def instances(kind: Any, arguments: list[Any]) -> list[Instance]:
    return [
        Instance(request_type=kind, doc={}, arguments=each, idx=n)
        for n, each in enumerate(arguments)
    ]


def silent(done: int, total: int) -> None: ...


def own_class(model: Model) -> Any:
    theirs: Any = HFLM  # Its registering decorator hides its type.
    with quiet():
        return theirs(
            pretrained=model.module, tokenizer=model.tokenizer, batch_size=1, add_bos_token=False
        )


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_likelihoods_are_those_of_lm_evals_own_class(model: Model, batch_size: int) -> None:
    lm = asked_model(model, bos=False, batch_size=batch_size, progress=silent)
    assert isinstance(lm, Adapter)
    theirs = own_class(model)
    questions = instances("loglikelihood", PAIRS)
    with quiet():
        found, expected = lm.loglikelihood(questions), theirs.loglikelihood(questions)
        texts = instances("loglikelihood_rolling", [("short",), (CONTEXT * 5,), ("é" * 64,)])
        rolled, wanted = lm.loglikelihood_rolling(texts), theirs.loglikelihood_rolling(texts)
    assert [nats for nats, _ in found] == pytest.approx([nats for nats, _ in expected], abs=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert rolled == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_texts_are_those_of_lm_evals_own_class(model: Model, batch_size: int) -> None:
    plain = Adapter(model).generate_until(
        instances("generate_until", [("the ", {"until": [], "max_gen_toks": 20})])
    )[0]
    asks = [
        (context, {"until": until, "max_gen_toks": limit})
        for context in ("the ", "a longer context, of many words", "x" * 90, "b")
        for until, limit in (([], 20), ([plain[5:7], "\n"], 20), (["\n\n"], 7))
    ]
    lm = asked_model(model, bos=False, batch_size=batch_size, progress=silent)
    with quiet():
        found = lm.generate_until(instances("generate_until", asks))
        expected = own_class(model).generate_until(instances("generate_until", asks))
    assert found == expected
    assert len(set(map(len, found))) > 1


def test_a_model_with_its_own_way_of_writing_is_written_with_by_lm_evals_class(
    tmp_path: Path,
) -> None:
    model = loaded_llama(tmp_path / "llama", dtype=torch.float32)
    ask = instances("generate_until", [("the ", {"until": [], "max_gen_toks": 20})])
    plain = Adapter(model).generate_until(ask)
    model.module.generation_config.repetition_penalty = 5.0  # pyright: ignore
    with quiet():
        found = Adapter(model).generate_until(ask)
        assert found == own_class(model).generate_until(ask)
    assert found != plain


def random_decoder(**over: Any) -> Decoder:
    config = ModelConfig(
        num_layers=3, num_heads=4, num_kv_heads=2, width=16, mlp_width=24, vocab_size=50,
        max_length=64, **over,
    )  # fmt: skip
    decoder = initialize(Decoder(config), 0).double().eval()
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return decoder


@pytest.mark.parametrize(
    "over",
    [
        {},
        {"local_layers": (0, 2), "window": 5},
        {"normalizer": "softmax1", "route": "resformer"},
        {"stored_prefix": 2},
        {"positions": "learned", "logit_cap": 3.0},
    ],
    ids=str,
)
def test_what_is_shared_changes_no_answer(over: dict[str, Any]) -> None:
    decoder = random_decoder(**over)
    generator = torch.Generator().manual_seed(0)

    def some(number: int) -> list[int]:
        return torch.randint(1, 50, (number,), generator=generator).tolist()

    questions: list[Question] = []
    for length in (40, 37, 30, 33, 12, 1):
        context = some(length)
        for answer in (some(1), some(1), [7, 8], [7, 8, 9], some(6)):
            questions.append(Question(len(questions), [*context, *answer[:-1]], answer))
    wanted = {place: (nats, greedy) for place, nats, greedy in
              answers(decoder, questions, batch_size=1, alone=True)}  # fmt: skip
    with torch.no_grad():
        logits = decoder(torch.tensor([questions[4].inputs]))[0, -6:].log_softmax(-1)
    by_hand = logits.gather(1, torch.tensor(questions[4].answer)[:, None]).sum()
    assert wanted[4][0] == pytest.approx(float(by_hand), abs=1e-9)
    for batch_size in (2, 8):
        found = list(answers(decoder, questions, batch_size=batch_size))
        assert sorted(place for place, _, _ in found) == list(range(len(questions)))
        for place, nats, greedy in found:
            assert nats == pytest.approx(wanted[place][0], abs=1e-9)
            assert greedy == wanted[place][1]


def test_a_context_is_run_once_and_few_positions_have_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = random_decoder()
    seen: list[int] = []
    hidden = decoder.hidden

    def counting(tokens: torch.Tensor, **named: Any) -> torch.Tensor:
        seen.append(tokens.numel())
        return hidden(tokens, **named)

    monkeypatch.setattr(decoder, "hidden", counting)
    rows: list[int] = []
    decoder.head.register_forward_hook(lambda _m, args, _o: rows.append(len(args[0])))
    context = list(range(1, 41))
    four = [[41, 42], [43], [44, 45, 46], [41, 47]]
    questions = [Question(n, [*context, *a[:-1]], a) for n, a in enumerate(four)]
    list(answers(decoder, questions, batch_size=4))
    assert seen == [39, 2 * 3]  # two questions ride on rows that begin with their inputs
    assert sum(rows) == 3 + 2
    # Choices of one token need the context alone.
    seen.clear()
    rows.clear()
    letters = [Question(n, context, [41 + n]) for n in range(4)]
    list(answers(decoder, letters, batch_size=4))
    assert (seen, rows) == ([40], [1])


def test_several_prompts_are_continued_as_each_alone() -> None:
    decoder = random_decoder(local_layers=(1,), window=6)
    prompts = [list(range(1, n)) for n in (9, 4, 20, 20)]
    stop = greedy_batch(decoder, prompts, num_tokens=12, stop=())[0][7]
    for ends in ((), (stop,)):
        found = greedy_batch(decoder, prompts, num_tokens=12, stop=ends)
        assert found == [
            list(generate(decoder, each, num_tokens=12, temperature=0.0, stop=ends))
            for each in prompts
        ]
    short = greedy_batch(
        decoder, prompts, num_tokens=12, stop=(), ended=lambda row, tokens: len(tokens) > row
    )
    whole = greedy_batch(decoder, prompts, num_tokens=12, stop=())
    assert short == [tokens[: n + 1] for n, tokens in enumerate(whole)]


class Doubled(LlamaForCausalLM):
    """A user's own class with a known configuration."""

    def forward(self, *rest: Any, **named: Any) -> Any:
        output: Any = super().forward(*rest, **named)
        output.logits = 2 * output.logits
        return output


def opt() -> OPTForCausalLM:
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=258, hidden_size=16, ffn_dim=24, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, word_embed_proj_dim=16,
    )  # fmt: skip
    return OPTForCausalLM(config).eval()


def test_what_our_decoder_cannot_be_is_asked_by_lm_evals_class_and_said(model: Model) -> None:
    said: list[str] = []
    assert isinstance(model.module, LlamaForCausalLM)
    double = Doubled(model.module.config)
    double.load_state_dict(model.module.state_dict())
    for other in (opt(), double.eval()):
        module = load(other, tokenizer=model.tokenizer)
        lm = asked_model(module, bos=False, batch_size=2, progress=silent, apart=said.append)
        assert isinstance(lm, Transformer)
    assert "our decoder cannot be a opt" in said[0]
    assert "of this Doubled gives other logits" in said[1]
    asked_model(model, bos=False, batch_size=2, progress=silent, apart=said.append)
    assert len(said) == 2
    same = dataclasses.replace(model, module=model.decoder())
    assert isinstance(asked_model(same, bos=False, batch_size=2, progress=silent), Adapter)


def test_the_verb_says_whom_lm_evals_class_asked(model: Model, tmp_path: Path) -> None:
    lambada = write_lines(tmp_path / "l.jsonl", LAMBADA[:2])
    for module, other in ((opt(), True), (model.module, False)):
        found = wakeful.evaluate(module, tokenizer=model.tokenizer, lambada=lambada, device="cpu")
        said = found.method.get("Asked by lm-eval's own class", "")
        assert ("because our decoder cannot be a opt" in said) == other
        assert bool(said) == other
