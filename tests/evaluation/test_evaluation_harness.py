"""lm-eval on tiny models: by hand, and by its own class for Transformers as it is."""

import copy
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("lm_eval")

import lm_eval.tasks
import yaml
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import apply_template

import wakeful
from evaluation.models import CHOICES, CPU, LAMBADA, loaded_llama, save_llama, write_lines
from training.runs import text, tiny
from wakeful.errors import WakefulError
from wakeful.evaluation import tasks as tasks_module
from wakeful.evaluation.examples import TaskSet, read_choices, read_lambada
from wakeful.evaluation.harness import HarnessModel, run_tasks
from wakeful.evaluation.tasks import choices_task, lambada_task, named_tasks, quiet
from wakeful.loading.load import load, read_decoder
from wakeful.loading.model import Model
from wakeful.model.decoder import Decoder
from wakeful.quantization import quantize_module
from wakeful.scores import Score
from wakeful.training.loop import train_run

__all__ = ["text"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return loaded_llama(tmp_path_factory.mktemp("models") / "llama", dtype=torch.float32)


@pytest.fixture
def ours(text: Path, tmp_path: Path) -> Model:
    run = train_run(tiny(text, model={"max_length": 200}), tmp_path / "run")
    return load(str(run.path), device=CPU, dtype=torch.float32)


def local_tasks(folder: Path) -> TaskSet:
    lambada = read_lambada(write_lines(folder / "l.jsonl", LAMBADA))
    choices = read_choices(write_lines(folder / "c.jsonl", CHOICES))
    return TaskSet({"lambada": lambada_task(lambada), "choices": choices_task(choices)})


def logits_of(loaded: Model, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        found: Any = loaded.module(torch.tensor([tokens]))
    return (found if isinstance(loaded.module, Decoder) else found.logits)[0].double()


def by_hand(loaded: Model, context: str, continuation: str, bos: bool) -> tuple[float, bool]:
    """Return log p(continuation | context) and whether greedy decoding writes it, unbatched."""
    first = [loaded.bos] if bos else []
    given = [*first, *loaded.encode_plain(context)]
    whole = [*first, *loaded.encode_plain(context + continuation)]
    logits = logits_of(loaded, whole[-loaded.context - 1 : -1])
    total, greedy = 0.0, True
    for offset in range(1, len(whole) - len(given) + 1):
        row, token = logits[-offset], whole[-offset]
        total += float(row.log_softmax(0)[token])
        greedy = greedy and int(row.argmax()) == token
    return total, greedy


def figures(scores: list[Score]) -> dict[tuple[str, str], Score]:
    return {(score.task, score.metric): score for score in scores}


@pytest.mark.parametrize("bos", [False, True])
def test_accuracies_are_those_by_hand(model: Model, tmp_path: Path, bos: bool) -> None:
    lm = HarnessModel(model, bos=bos, batch_size=2)
    found = figures(run_tasks("m", lm, local_tasks(tmp_path)))
    completions = read_lambada(tmp_path / "l.jsonl")
    answers = [by_hand(model, each.context, each.target, bos) for each in completions]
    perplexity = found["lambada", "perplexity"]
    assert perplexity.values.tolist() == pytest.approx([-nats for nats, _ in answers], rel=1e-4)
    mean = sum(nats for nats, _ in answers) / len(answers)
    assert perplexity.figure == pytest.approx(math.exp(-mean), rel=1e-4)
    assert found["lambada", "acc"].values.tolist() == [float(greedy) for _, greedy in answers]
    right, right_norm = [], []
    for each in read_choices(tmp_path / "c.jsonl"):
        sums = [by_hand(model, each.context, f" {choice}", bos)[0] for choice in each.choices]
        norms = [total / len(c) for total, c in zip(sums, each.choices, strict=True)]
        right.append(float(sums.index(max(sums)) == each.answer))
        right_norm.append(float(norms.index(max(norms)) == each.answer))
    assert found["choices", "acc"].values.tolist() == right
    assert found["choices", "acc_norm"].values.tolist() == right_norm
    assert found["choices", "acc"].error == pytest.approx(
        math.sqrt(sum((r - sum(right) / 4) ** 2 for r in right) / 12)
    )


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("as_decoder", [False, True])
def test_figures_are_those_of_lm_evals_own_class(
    model: Model, tmp_path: Path, batch_size: int, as_decoder: bool
) -> None:
    tasks = local_tasks(tmp_path)
    expected = figures(run_tasks("m", own_class(model), tasks))
    asked = model.as_decoder_model() if as_decoder else model
    found = figures(run_tasks("m", HarnessModel(asked, batch_size=batch_size), tasks))
    assert found.keys() == expected.keys()
    for name, score in found.items():
        assert score.values.tolist() == pytest.approx(expected[name].values.tolist(), rel=1e-4)
        assert score.keys == expected[name].keys
        assert score.higher_is_better == (name[1] != "perplexity")


def own_class(model: Model) -> Any:
    """Return lm-eval's class as it is, on a model whose tokenizer adds nothing to a text."""
    theirs: Any = HFLM  # Its registering decorator hides its type.
    with quiet():
        return theirs(
            pretrained=model.module, tokenizer=copy.deepcopy(model.tokenizer), batch_size=1,
            add_bos_token=False,
        )  # fmt: skip


@pytest.mark.parametrize("bos", [False, True])
def test_a_run_is_asked(ours: Model, tmp_path: Path, bos: bool) -> None:
    ours.wakeful_tokenizer.bos = 3
    lm = HarnessModel(ours, bos=bos, batch_size=3)
    found = figures(run_tasks("m", lm, local_tasks(tmp_path)))
    answers = [
        by_hand(ours, each.context, each.target, bos) for each in read_lambada(tmp_path / "l.jsonl")
    ]
    nats = found["lambada", "perplexity"].values.tolist()
    assert nats == pytest.approx([-total for total, _ in answers], rel=1e-4)
    assert found["lambada", "acc"].values.tolist() == [float(greedy) for _, greedy in answers]


def test_the_model_and_its_tokenizer_stay_as_they_were(tmp_path: Path) -> None:
    model = loaded_llama(tmp_path / "llama")
    module: Any = model.module
    module.config.tie_word_embeddings = True  # as of a checkpoint that holds another head
    HarnessModel(model)
    assert module.lm_head.weight is not module.model.embed_tokens.weight
    assert "tie_weights" not in vars(module)
    assert model.tokenizer.pad_token_id is None  # pyright: ignore


def test_a_special_token_that_a_text_spells_is_text(model: Model) -> None:
    lm = HarnessModel(model)
    tokens, mask = lm.tok_batch_encode(["a <eos> b", "x"], left_truncate_len=60)
    assert tokens[0].tolist() == lm.tok_encode("a <eos> b") == model.encode_plain("a <eos> b")
    assert 256 not in tokens[0]
    assert mask.sum(1).tolist() == [9, 1]


@pytest.mark.parametrize("as_decoder", [False, True])
def test_padding_never_enters_a_per_tensor_scale(
    model: Model, tmp_path: Path, as_decoder: bool
) -> None:
    module: nn.Module = model.decoder() if as_decoder else model.module
    small = dataclasses.replace(model, module=quantize_module(module, "coarse"))
    tasks = local_tasks(tmp_path)
    found = [
        figures(run_tasks("m", HarnessModel(small, batch_size=size), tasks)) for size in (1, 3)
    ]
    for name, score in found[0].items():
        assert found[1][name].values.tolist() == pytest.approx(score.values.tolist(), rel=1e-6)
    answers = [
        by_hand(small, each.context, each.target, False)
        for each in read_lambada(tmp_path / "l.jsonl")
    ]
    nats = found[1]["lambada", "perplexity"].values.tolist()
    assert nats == pytest.approx([-total for total, _ in answers], rel=1e-4)


@pytest.mark.slow
def test_a_quantized_decoder_writes(model: Model) -> None:
    small = dataclasses.replace(model, module=quantize_module(model.decoder(), "w4"))
    lm = HarnessModel(small, batch_size=2)
    settings = {"until": [], "max_gen_toks": 12}
    prompts = ["the ", "a longer one "]
    with quiet():
        texts = lm.generate_until([instance("generate_until", each, settings) for each in prompts])
    assert texts == [
        small.decode(small.generate_ids(small.encode_plain(each), num_tokens=12, temperature=0.0))
        for each in prompts
    ]


def test_a_long_context_loses_its_beginning(model: Model) -> None:
    request = instance("loglikelihood", "x" * 100 + " end", " of it")
    expected, _ = by_hand(model, "x" * 100 + " end", " of it", bos=False)
    with quiet():
        assert HarnessModel(model).loglikelihood([request])[0][0] == pytest.approx(
            expected, rel=1e-5
        )
    with quiet(), pytest.raises(WakefulError, match="answer is 70 of llama's tokens"):
        HarnessModel(model).loglikelihood([instance("loglikelihood", "a", "b" * 70)])


def test_rolling_and_empty_contexts_are_as_lm_evals_own(model: Model) -> None:
    texts = ["short", "a text that is longer than the context of the model, " * 3]
    rolling = [instance("loglikelihood_rolling", each) for each in texts]
    empty = [instance("loglikelihood", "", " from nothing")]
    theirs = own_class(model)
    for bos in (False, True):
        ours = HarnessModel(model, bos=bos, batch_size=2)
        with quiet():
            assert ours.loglikelihood_rolling(rolling) == pytest.approx(
                theirs.loglikelihood_rolling(rolling), rel=1e-5
            )
            assert ours.loglikelihood(empty)[0] == pytest.approx(
                theirs.loglikelihood(empty)[0], rel=1e-5
            )


def instance(kind: Any, *arguments: Any) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


@pytest.mark.slow
def test_text_ends_at_any_of_the_tokens_that_the_model_names(tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "llama")
    written = list(
        load(str(folder), device=CPU).generate_ids([1, 2], num_tokens=12, temperature=0.0)
    )
    end = written[6]
    said = {"eos_token_id": [256, end]}
    (folder / "generation_config.json").write_text(json.dumps(said))
    wakeful.export(str(folder), tmp_path / "exported")
    for place in (folder, tmp_path / "exported"):
        for model in (load(str(place), device=CPU), read_decoder(str(place))):
            assert model.ends == {256, end}
            named = HarnessModel(model).model.generation_config.eos_token_id
            assert sorted(named) == sorted([256, end])
            text = model.generate([1, 2], num_tokens=12, temperature=0.0)
            whole = model.decode([1, 2, *written[: written.index(end)]])
            assert text == whole.removeprefix(model.decode([1, 2]))  # the space between is its own


@pytest.mark.slow
def test_generation_stops_where_a_task_says(ours: Model) -> None:
    lm = HarnessModel(ours)
    settings = {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": False, "temperature": 0.0}
    tokens = list(ours.generate_ids(ours.encode_plain("def "), num_tokens=12, temperature=0.0))
    plain = str(ours.tokenizer.decode(tokens))
    assert lm.generate_until([instance("generate_until", "def ", settings)]) == [plain]
    stop = plain[3:5]
    cut = settings | {"until": stop}
    expected = plain[: plain.index(stop)]
    assert lm.generate_until([instance("generate_until", "def ", cut)]) == [expected]
    long = instance("generate_until", "def " * 400, settings)
    assert len(lm.generate_until([long])) == 1
    with pytest.raises(AssertionError, match="must be less than model's maximum sequence length"):
        lm.generate_until([instance("generate_until", "x", {"until": []})])


def test_prompts_are_those_of_lm_evals_own_tasks(tmp_path: Path) -> None:
    folder = Path(lm_eval.tasks.__file__).parent
    lambada = yaml.safe_load((folder / "lambada" / "lambada_openai.yaml").read_text())
    completions = read_lambada(write_lines(tmp_path / "l.jsonl", LAMBADA))
    for row, each in zip(LAMBADA, completions, strict=True):
        assert each.context == apply_template(lambada["doc_to_text"], row)
        assert each.target == apply_template(lambada["doc_to_target"], row)
    assert {metric["metric"] for metric in lambada["metric_list"]} == {"acc", "perplexity"}
    piqa = yaml.safe_load((folder / "piqa" / "piqa.yaml").read_text())
    row = CHOICES[2]
    (each,) = read_choices(write_lines(tmp_path / "c.jsonl", [row]))
    assert each.context == apply_template(piqa["doc_to_text"], row)
    assert str(list(each.choices)) == apply_template(piqa["doc_to_choice"], row)
    assert {metric["metric"] for metric in piqa["metric_list"]} == {"acc", "acc_norm"}


def test_limit_takes_the_first(model: Model, tmp_path: Path) -> None:
    tasks = local_tasks(tmp_path)
    every = figures(run_tasks("m", HarnessModel(model), tasks))
    first = figures(run_tasks("m", HarnessModel(model), tasks, limit=2))
    for name, score in first.items():
        assert score.keys == every[name].keys[:2]
        assert score.values == pytest.approx(every[name].values[:2])


class Index:
    """Stands for lm-eval's index of tasks, which takes seconds to build."""

    def __init__(self, error: Exception) -> None:
        self.all_tasks = ["piqa", "lambada_openai"]
        self._error = error

    def load(self, names: list[str]) -> dict[str, Any]:
        raise self._error


def test_tasks_that_cannot_be_had_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    unreachable = ConnectionError("Couldn't reach 'baber/piqa'\non the Hub")
    monkeypatch.setattr(tasks_module, "TaskManager", lambda: Index(unreachable))
    with pytest.raises(WakefulError, match="is the Hugging Face hub reachable") as raised:
        named_tasks(["piqa"])
    assert "\n" not in str(raised.value)
    with pytest.raises(WakefulError, match="no task 'pica'; did you mean piqa"):
        named_tasks(["pica"])


def test_solved_examples_stand_before_a_question(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Found(Index):
        def load(self, names: list[str]) -> dict[str, Any]:
            return {"tasks": {"piqa": local_tasks(tmp_path).tasks["choices"]}}

    monkeypatch.setattr(tasks_module, "TaskManager", lambda: Found(OSError()))
    asked_of: list[str] = []

    class Listening(HarnessModel):
        def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
            asked_of.extend(str(request.args[0]) for request in requests)
            return super().loglikelihood(requests)

    for named, count in (("piqa", 0), ("piqa@2", 2), ("piqa@1", 1), ("piqa@0", 0)):
        asked_of.clear()
        (first, *_) = run_tasks("m", Listening(model), named_tasks([named]), limit=1)
        # The question itself, and as many solved ones before it.
        assert {text.count("\n\n") for text in asked_of} == {count}
        assert first.shots == count
        assert first.title == ["piqa: acc", "piqa, 1 shot: acc", "piqa, 2 shots: acc"][count]


def test_a_task_without_solved_examples_keeps_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Found(Index):
        def load(self, names: list[str]) -> dict[str, Any]:
            task = local_tasks(tmp_path).tasks["choices"]
            if names == ["piqa"]:
                task.set_config(key="num_fewshot", value=0)
            return {"tasks": {"choices": task}}

    monkeypatch.setattr(tasks_module, "TaskManager", lambda: Found(OSError()))
    with pytest.raises(WakefulError, match="choices is defined without few-shot examples"):
        named_tasks(["piqa@5"])
    with pytest.raises(WakefulError, match="asked for with 0 and with 3 shots"):
        named_tasks(["piqa", "lambada_openai@3"])


def test_a_figure_that_is_no_mean_stands_alone(model: Model, tmp_path: Path) -> None:
    task = local_tasks(tmp_path).tasks["choices"]
    task._aggregation_list["acc"] = max  # a median, a BLEU: no ratio over examples
    found = figures(run_tasks("m", HarnessModel(model), TaskSet({"choices": task})))
    own = found["choices", "acc"]
    assert own.keys == ("all",)
    assert own.figure == 1.0
    assert math.isnan(own.error)
    assert len(found["choices", "acc_norm"].keys) == len(CHOICES)
