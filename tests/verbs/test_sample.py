"""`wakeful data generate`: a model's own text as prepared data, from the first token to an heir."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from evaluation.models import save_llama
from test_cli import fails
from wakeful.cli import main
from wakeful.data.tokens import PreparedData
from wakeful.errors import WakefulError
from wakeful.generation import sample as verb
from wakeful.generation.sample import sample_data
from wakeful.loading.chat import user_turn
from wakeful.loading.load import load
from wakeful.loading.sampling import sample
from wakeful.model.decoder import Decoder

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}] {{ message.content }}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
FEW: dict[str, Any] = {
    "tokens": 700,
    "length": 32,
    "batch_size": 4,
    "device": "cpu",
    "validation_fraction": 0.2,
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WAKEFUL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save_llama(tmp_path / "llama")


@pytest.fixture
def instruct(llama: Path) -> Path:
    (llama / "chat_template.jinja").write_text(TEMPLATE)
    return llama


def few(**over: Any) -> dict[str, Any]:
    return {**FEW, **over}


def documents(data: PreparedData) -> list[list[int]]:
    """Return all documents, those for training first."""
    found: list[list[int]] = []
    for split in (data.train, data.validation):
        starts = [*split.documents.tolist(), split.num_tokens]
        tokens = split.tokens.tolist()
        found += [tokens[a:b] for a, b in itertools.pairwise(starts)]
    return found


def test_an_heir_is_trained_on_what_its_reference_wrote(llama: Path, tmp_path: Path) -> None:
    out, numbers = str(tmp_path / "own"), [f"--{k}={v}" for k, v in FEW.items()]
    assert main(["data", "generate", str(llama), "--out", out, *numbers]) == 0
    data = PreparedData.open(out, verify=True)
    rows = documents(data)
    assert 700 <= sum(map(len, rows)) == data.train.num_tokens + data.validation.num_tokens < 733
    for row in rows:
        assert row.index(data.info["tokenizer"]["end_of_text"]) == len(row) - 1 < 32
    assert data.info["settings"]["model"] == "llama"
    cut = data.info["sampled"]["cut"]
    assert 0 < cut <= sum(len(row) == 32 for row in rows)
    assert data.info["sampled"] == {"documents": len(rows), "cut": cut}
    assert data.info["source"] == ["samples of llama"]
    assert list(tmp_path.glob(".own*")) == []
    heir = ["--steps", "2", "--layers", "1", "--length", "16", "--batch_size", "2", "--device",
            "cpu", "--diagnose_length", "16"]  # fmt: skip
    assert main(
        ["inherit", str(llama), "--data.source", out, "--out", str(tmp_path / "heir"), *heir]
    ) == 0  # fmt: skip
    assert (
        main(["generate", str(tmp_path / "heir/heir-1"), "--prompt", "a", "--num_tokens", "4"]) == 0
    )


def test_rows_side_by_side_are_those_of_each_alone(llama: Path) -> None:
    model = load(str(llama), device="cpu", dtype=torch.float64)
    prompts = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10, 11, 12, 13]]
    greedy: dict[str, Any] = {"length": 24, "ends": {200}, "temperature": 0.0}
    rows = sample(model, prompts, **greedy)
    assert rows == [sample(model, [prompt], **greedy)[0] for prompt in prompts]
    end = rows[0][9]  # a row that ends goes, and the others do not notice
    cut = sample(model, prompts, **{**greedy, "ends": {end}})
    for prompt, row, shorter in zip(prompts, rows, cut, strict=True):
        ends = [place for place, token in enumerate(row) if token == end and place >= len(prompt)]
        assert shorter == row[: ends[0] + 1] if ends else row


def test_transformers_writes_what_our_decoder_does(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(str(llama), device="cpu", dtype=torch.float64)
    prompts = [[1, 2, 3], [4], [5, 6]]
    choice: dict[str, Any] = {
        "length": 24, "ends": {60, 70, 80}, "reply": [9, 8, 7], "seed": 3, "top_p": 0.8
    }  # fmt: skip
    ours = sample(model, prompts, **choice)

    def cannot(_: object) -> Decoder:
        raise WakefulError("it is a mixture of experts")

    monkeypatch.setattr(type(model), "decoder", cannot)
    assert sample(model, prompts, **choice) == ours


def test_a_reply_takes_the_place_of_the_first_end(llama: Path) -> None:
    model = load(str(llama), device="cpu", dtype=torch.float64)
    plain = sample(model, [[1, 2]], length=40, ends=set(), temperature=0.0)[0]
    end = plain[8]
    first = plain.index(end, 2)
    (row,) = sample(model, [[1, 2]], length=40, ends={end}, reply=[5, 5, 5, 6], temperature=0.0)
    assert row[: first + 4] == [*plain[:first], 5, 5, 5, 6]
    (alone,) = sample(model, [[*plain[:first], 5, 5, 5, 6]], length=40, ends={end}, temperature=0.0)
    assert row == alone


def test_an_instruct_model_writes_question_and_answer(instruct: Path, tmp_path: Path) -> None:
    model = load(str(instruct), device="cpu")
    tokenizer = model.own_tokenizer
    turn = user_turn(tokenizer)
    assert turn is not None
    bos, eos = model.bos, tokenizer.end_of_text
    assert turn.before == [bos, *tokenizer.encode("[user] ")]
    assert turn.after == [eos, *tokenizer.encode("[assistant] ")]
    assert turn.end == eos
    data = sample_data(str(instruct), out=tmp_path / "own", **few(length=64, tokens=1500))
    rows = documents(data)
    answered = [row for row in rows if eos in row[:-1]]
    assert answered
    for row in rows:
        assert row[: len(turn.before)] == turn.before
    for row in answered:
        place = row.index(eos)
        assert place > len(turn.before)
        assert row[place:-1][: len(turn.after)] == turn.after[: len(row) - 1 - place]
    assert data.info["settings"]["chat"] is True


def test_a_prompt_is_what_a_user_says(instruct: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("why\n\nis <eos> mere text\n")
    out = {"out": tmp_path / "own", "prompts": prompts}
    data = sample_data(str(instruct), **few(length=60, **out))
    tokenizer = data.tokenizer
    turn = user_turn(tokenizer)
    assert turn is not None
    begins = [
        [*turn.before, *tokenizer.encode(line), *turn.after]
        for line in ("why", "is <eos> mere text")
    ]
    counts = [sum(row[: len(begin)] == begin for row in documents(data)) for begin in begins]
    assert sum(counts) == len(documents(data))
    assert min(counts) > 0
    plain = sample_data(str(instruct), **few(**{**out, "out": tmp_path / "b", "chat": "off"}))
    starts = {tuple(row[:3]) for row in documents(plain)}
    assert starts == {tuple(tokenizer.encode(text)) for text in ("why", "is ")}
    assert plain.info["settings"]["chat"] is False


def test_an_answer_to_a_prompt_ends_as_the_template_ends_one(
    instruct: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the model's own settings name another token, it would go on with the next question."""
    (instruct / "chat_template.jinja").write_text(TEMPLATE.replace("{{ eos_token }}", "<bos>"))
    (tmp_path / "prompts.txt").write_text("why\n")
    seen: dict[str, Any] = {}

    def stopped(*_: object, **choice: Any) -> list[list[int]]:
        seen.update(choice)
        raise KeyboardInterrupt

    monkeypatch.setattr(verb, "sample", stopped)
    with pytest.raises(KeyboardInterrupt):
        sample_data(
            str(instruct), out=tmp_path / "own", prompts=tmp_path / "prompts.txt", **few(length=60)
        )
    model = load(str(instruct), device="cpu")
    assert model.bos not in model.ends
    assert seen["ends"] == {model.bos, *model.ends}


def test_a_document_begins_as_the_tokenizer_begins_one(llama: Path, tmp_path: Path) -> None:
    tokenizer = load(str(llama), device="cpu").own_tokenizer
    data = sample_data(str(llama), out=tmp_path / "own", **FEW)
    assert not any(row[0] == tokenizer.bos for row in documents(data))
    data = sample_data(str(llama), out=tmp_path / "b", **FEW, tokenizer=tokenizer.beginning())
    for row in documents(data):
        assert row[0] == tokenizer.bos
        assert row.index(tokenizer.end_of_text) == len(row) - 1 < 33


def test_the_seed_decides_and_the_same_is_not_written_twice(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = sample_data(str(llama), out=tmp_path / "a", **FEW)
    second = sample_data(str(llama), out=tmp_path / "b", **FEW)
    assert second.info == first.info
    other = sample_data(str(llama), out=tmp_path / "c", **FEW, seed=1)
    assert other.info["corpora_sha256"] != first.info["corpora_sha256"]
    monkeypatch.setattr(verb, "sample", None)  # what is there is taken
    assert sample_data(str(llama), out=tmp_path / "a", **FEW).info == first.info
    with pytest.raises(WakefulError, match="was prepared with another seed"):
        sample_data(str(llama), out=tmp_path / "a", **FEW, seed=1)


def test_a_setting_that_came_later_is_neutral_in_what_was_written_before(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = sample_data(str(llama), out=tmp_path / "a", **FEW)
    file = tmp_path / "a" / "data.json"
    info = json.loads(file.read_text())
    assert info["settings"].pop("top_p") == 1.0
    file.write_text(json.dumps(info))
    monkeypatch.setattr(verb, "sample", None)  # what is there is taken
    again = sample_data(str(llama), out=tmp_path / "a", **FEW)
    assert again.corpus_sha256 == first.corpus_sha256
    with pytest.raises(WakefulError, match="was prepared with another top_p"):
        sample_data(str(llama), out=tmp_path / "a", **FEW, top_p=0.5)
    info["settings"]["min_p"] = 0.1  # of a later version than this one
    file.write_text(json.dumps(info))
    with pytest.raises(WakefulError, match="was prepared with another min_p"):
        sample_data(str(llama), out=tmp_path / "a", **FEW)


def test_what_was_cut_off_goes_on(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 10

    def failing(*arguments: Any, **choice: Any) -> list[list[int]]:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return sample(*arguments, **choice)

    monkeypatch.setattr(verb, "sample", failing)
    whole = sample_data(str(llama), out=tmp_path / "whole", **FEW)
    made, calls = calls - 10, 0
    with pytest.raises(KeyboardInterrupt):
        sample_data(str(llama), out=tmp_path / "cut", **FEW)
    assert not (tmp_path / "cut").exists()
    assert len(list((tmp_path / ".cut.sampling").glob("part-*"))) == 2
    with pytest.raises(WakefulError, match="was begun with another seed"):
        sample_data(str(llama), out=tmp_path / "cut", **FEW, seed=1)
    calls = 3
    assert sample_data(str(llama), out=tmp_path / "cut", **FEW).info == whole.info
    assert not (tmp_path / ".cut.sampling").exists()
    assert calls - 3 + 2 == made  # it did not begin anew


def test_a_damaged_part_is_named(llama: Path, tmp_path: Path) -> None:
    place = tmp_path / ".own.sampling"
    place.mkdir()
    (place / "part-000000.json").write_text('[["no"]]')
    with pytest.raises(WakefulError, match=r"part-000000\.json is damaged"):
        sample_data(str(llama), out=tmp_path / "own", **FEW)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 65}, "past llama's context of 64"),
        ({"tokens": 60}, "two documents"),
        ({"temperature": 0.0}, r"temperature must be in \(0, inf\), got 0.0"),
        ({"top_p": 1.1}, r"top_p must be in \(0, 1\], got 1.1"),
        ({"validation_fraction": 0.0}, r"validation_fraction must be in \(0, 1\), got 0.0"),
        ({"validation_fraction": 1.0}, r"validation_fraction must be in \(0, 1\), got 1.0"),
        ({"chat": "on"}, "no chat template"),
        ({"prompts": "nowhere.txt"}, "cannot be read"),
        ({"prompts": "empty.txt"}, "no line"),
        ({"prompts": "long.txt"}, "leaves no room"),
    ],
)
def test_what_cannot_be_is_refused_before_sampling(
    options: dict[str, Any], message: str, llama: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(verb, "sample", None)
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "long.txt").write_text("a" * 40)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(WakefulError, match=message):
        sample_data(str(llama), out="own", **few(**options))
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages[0].content }} [answer] ", "ordinary text"),
        ("{{ messages[0].content | upper }}{{ messages[0].content }}{{ eos_token }}", "once"),
        ("nothing{{ eos_token }}", "once and as it is"),
        ("{% for", "cannot be rendered"),
        ("{{ raise_exception('system first') }}", "system first"),
    ],
)
def test_templates_that_cannot_serve_are_refused(
    template: str, message: str, llama: Path, tmp_path: Path
) -> None:
    (llama / "chat_template.jinja").write_text(template)
    with pytest.raises(WakefulError, match=message):
        sample_data(str(llama), out=tmp_path / "own", **FEW)
    assert not (tmp_path / "own").exists()


def test_a_model_that_repeats_itself_or_says_nothing_is_named(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verb, "sample", lambda _, prompts, **__: [[256, 5, 6, 256]] * len(prompts))
    with pytest.raises(WakefulError, match="the same over and over"):
        sample_data(str(llama), out=tmp_path / "own", **FEW)
    monkeypatch.setattr(verb, "sample", lambda _, prompts, **__: [[*p, 256] for p in prompts])
    with pytest.raises(WakefulError, match="ended 100 documents in a row"):
        sample_data(str(llama), out=tmp_path / "other", **FEW)
    assert not (tmp_path / "own").exists()


def test_the_command_names_its_parts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "did you mean 'data generate'" in fails(capsys, "data", "genrate")
    assert "name one model" in fails(capsys, "data", "generate", "--out", str(tmp_path / "o"))


def test_facts_lie_in_the_folder(llama: Path, tmp_path: Path) -> None:
    data = sample_data(str(llama), out=tmp_path / "own", **FEW, top_k=20)
    settings = json.loads((tmp_path / "own/data.json").read_text())["settings"]
    assert settings == data.info["settings"]
    assert (settings["top_k"], settings["seed"], settings["length"]) == (20, 0, 32)
    assert len(settings["weights_sha256"]) == 64
