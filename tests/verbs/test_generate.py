"""`wakeful generate --chat`: what a user says and what the model answers, by its chat template."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from evaluation.models import save_llama
from test_cli import fails
from wakeful.cli import main
from wakeful.errors import WakefulError
from wakeful.loading.load import load
from wakeful.verbs.generate import generate

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}] {{ message.content }}"
    "{{ eos_token }}{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.fixture
def instruct(tmp_path: Path) -> str:
    folder = save_llama(tmp_path / "llama")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return str(folder)


def test_the_answer_follows_the_template_as_transformers_fills_it_in(
    instruct: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = [{"role": "user", "content": "why?"}]
    theirs = AutoTokenizer.from_pretrained(instruct)
    ids = theirs.apply_chat_template(said, add_generation_prompt=True, return_dict=False)
    greedy: dict[str, Any] = {"num_tokens": 12, "temperature": 0.0}
    model = load(instruct, device="cpu", dtype="auto")
    answer = model.generate([int(i) for i in ids], **greedy)
    assert answer != model.generate("why?", **greedy)
    assert generate(instruct, "why?", chat=True, device="cpu", **greedy) == answer
    command = ["generate", instruct, "--chat", "--prompt", "why?", "--device", "cpu"]
    assert main([*command, "--num_tokens", "12", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == answer + "\n"  # what the user said is left out


def test_a_message_is_mere_text_and_the_end_of_a_turn_ends_the_answer(
    instruct: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(
        "wakeful.loading.model.Model.tokens_after",
        lambda _, prompt, **choice: seen.update(choice, prompt=prompt) or iter(()),
    )
    model = load(instruct, device="cpu")
    Path(instruct, "chat_template.jinja").write_text(
        "[{{ messages[0].content }}<bos>{% if add_generation_prompt %}:{% endif %}"
    )
    load(instruct, device="cpu").generate("a <eos>", chat=True)
    plain, end = model.own_tokenizer.encode, model.bos
    assert seen["prompt"] == [*plain("["), *plain("a <eos>"), end, *plain(":")]
    assert end not in model.ends
    assert seen["stop"] == {end, *model.ends}


def test_chat_that_cannot_be_had_is_refused(
    instruct: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = str(save_llama(tmp_path / "bare"))
    message = fails(capsys, "generate", bare, "--chat", "--prompt", "a")
    assert "the tokenizer of bare has no chat template: leave out --chat" in message
    message = fails(capsys, "generate", instruct, "--chat", "--bos", "off", "--prompt", "a")
    assert "bos = off: the chat template decides that" in message
    with pytest.raises(WakefulError, match="chat takes a text"):
        load(instruct, device="cpu").generate([1, 2], chat=True)
    Path(instruct, "chat_template.jinja").write_text("{% for")
    message = fails(capsys, "generate", instruct, "--chat", "--prompt", "a")
    assert message.endswith("mend it, or leave out --chat")
