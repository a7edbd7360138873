"""`wakeful generate --chat`: what a user says and what the model answers, by its chat template."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from evaluation.models import save_llama
from hf.gguf_models import sentencepiece
from test_cli import fails
from wakeful.cli import main
from wakeful.data.tokenizer import Tokenizer
from wakeful.errors import WakefulError
from wakeful.generation.tool import generate
from wakeful.loading.chat import user_turn
from wakeful.loading.load import load

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
    answer = model.generate([int(i) for i in ids], **greedy).removeprefix(" ")  # it begins a text
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
        "wakeful.loading.model.Model.generate_ids",
        lambda _, prompt, **choice: seen.update(choice, prompt=prompt) or iter(()),
    )
    model = load(instruct, device="cpu")
    Path(instruct, "chat_template.jinja").write_text(
        "[{{ messages[0].content }}<bos>{% if add_generation_prompt %}:{% endif %}"
    )
    load(instruct, device="cpu").generate("a <eos>", chat=True)
    plain, end = model.wakeful_tokenizer.encode, model.bos
    assert seen["prompt"] == [*plain("["), *plain("a <eos>"), end, *plain(":")]
    assert end not in model.ends
    assert seen["stop"] == {end, *model.ends}


def kept(message: str, *, spaces: bool) -> str:
    """Return how a template of a known family writes a message: Llama 2's, or Gemma's, trimmed."""
    return f"'a ' + {message} + ' qu'" if spaces else f"'</s>qu' + {message} | trim + '</s>qu'"


@pytest.mark.parametrize("spaces", [True, False])
@pytest.mark.parametrize("prefix", [True, False])
def test_a_turn_has_the_tokens_that_transformers_gives_it(
    prefix: bool, spaces: bool, tmp_path: Path
) -> None:
    """SentencePiece writes the space before a word with it, and some put one before a text."""
    said = kept("message.content", spaces=spaces)
    template = f"{{% for message in messages %}}{{{{ {said} }}}}{{% endfor %}}"
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=sentencepiece(prefix=prefix).inner, bos_token="<s>", eos_token="</s>",
        chat_template="{{ bos_token }}" + template,
    )  # fmt: skip
    theirs.save_pretrained(tmp_path)
    turn = user_turn(Tokenizer.load(tmp_path))
    assert turn is not None
    for message in ("a qu", " a", "qu\n", " a  a ", ""):
        turns = [{"role": "user", "content": message}]
        ids = theirs.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        assert turn.encode(message) == ids, message
    spelled = turn.encode("a</s>")
    assert spelled.count(theirs.eos_token_id) == (0 if spaces else 2)


def test_a_message_that_spells_a_special_token_is_trimmed_as_any_other(instruct: str) -> None:
    Path(instruct, "chat_template.jinja").write_text("[{{ messages[0].content | trim }}<bos>:")
    tokenizer = load(instruct, device="cpu").wakeful_tokenizer
    turn = user_turn(tokenizer)
    assert turn is not None
    assert turn.encode(" <eos> ") == turn.encode("<eos>")
    assert turn.encode("<eos>")[1:-2] == tokenizer.encode("<eos>")


def test_an_answer_may_hold_what_ends_a_message(
    instruct: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As gpt-oss's: what it thinks ends like a message, and then comes what it says."""
    theirs = AutoTokenizer.from_pretrained(instruct)
    theirs.add_special_tokens({"additional_special_tokens": ["<|end|>", "<|return|>"]})
    theirs.chat_template = (
        "{% for message in messages %}{{ message.role }}:{{ message.content }}"
        "{{ '<|return|>' if message.role == 'assistant' else '<|end|>' }}{% endfor %}"
    )
    theirs.save_pretrained(instruct)
    seen: dict[str, Any] = {}
    monkeypatch.setattr(
        "wakeful.loading.model.Model.generate_ids",
        lambda _, prompt, **choice: seen.update(choice, prompt=prompt) or iter(()),
    )
    model = load(instruct, device="cpu")
    model.generate("why?", chat=True)
    end, returned = (theirs.convert_tokens_to_ids(each) for each in ("<|end|>", "<|return|>"))
    assert end in seen["prompt"]
    assert seen["stop"] == {returned, *model.ends}


def test_the_usual_one_of_several_templates_is_taken(instruct: str, tmp_path: Path) -> None:
    file = Path(instruct, "tokenizer_config.json")
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": TEMPLATE}]
    Path(instruct, "chat_template.jinja").unlink()
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": several}))
    tokenizer = Tokenizer.load(instruct)
    assert tokenizer.chat_template == TEMPLATE
    turn = user_turn(tokenizer)
    assert turn is not None
    said = [{"role": "user", "content": "why?"}]
    theirs = AutoTokenizer.from_pretrained(instruct)
    ids = theirs.apply_chat_template(said, add_generation_prompt=True, return_dict=False)
    assert turn.encode("why?") == ids


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


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ messages[0].content | upper }}{{ messages[0].content }}{{ eos_token }}", "once"),
        ("nothing{{ eos_token }}", "once and unchanged"),
        ("{% for", "cannot be rendered"),
        ("{{ raise_exception('system first') }}", "system first"),
    ],
)
def test_templates_that_cannot_serve_are_refused(
    template: str, message: str, instruct: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(instruct, "chat_template.jinja").write_text(template)
    error = fails(capsys, "generate", instruct, "--chat", "--prompt", "a")
    assert message in error
    assert error.endswith("mend it, or leave out --chat")
