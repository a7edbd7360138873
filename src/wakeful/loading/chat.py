"""What a chat template puts around a user's message: the turns of a conversation, as tokens."""

from collections.abc import Callable
from dataclasses import dataclass

from wakeful.data.tokenizer import Tokenizer
from wakeful.errors import WakefulError
from wakeful.loading.template import Template

_MESSAGE = "\ue000"
"""Stands for what the user says, in no text of anybody's."""
_ANSWER = "\ue001"
"""Stands for what the model answers."""


@dataclass(frozen=True)
class Turn:
    """A user's turn: what is around the message, and the whole with a message in it."""

    before: list[int]
    """Everything before a message that the model writes, a system message included."""
    after: list[int]
    """From such a message's end to where the answer begins."""
    end: int | None
    """The token that ends the message; None where the template ends it with ordinary text."""
    answer_end: int | None
    """The token that ends the answer; `end` where the template does not tell."""
    around: Callable[[str], list[int]]
    """Returns the turn with a message in it, up to where the answer begins.

    The tokens are those that Transformers gives: the template may strip the message, and text on
    both sides of its ends is encoded together. A message that holds the spelling of a special token
    is encoded by itself, as mere text. Raises `WakefulError` where the template cannot hold it.
    """


def user_turn(tokenizer: Tokenizer, *, otherwise: str = "give --chat off") -> Turn | None:
    """Return a user's first turn by the tokenizer's chat template; None where it has none.

    `otherwise` is how to do without it, for messages.

    Raises:
        WakefulError: the template cannot be rendered, or does not hold the message as it is.
    """
    if not tokenizer.chat_template:
        return None
    render = _renderer(tokenizer, otherwise)
    before, message, after = render(_MESSAGE).partition(_MESSAGE)
    if not message or _MESSAGE in after:
        raise _not_held(otherwise)
    ids = tokenizer.encode_marked(after)
    end = _first_special(tokenizer, ids)
    added = tokenizer.inner.get_added_tokens_decoder()
    specials = [added[token].content for token in tokenizer.special_tokens]

    def around(message: str) -> list[int]:
        text = render(message)
        if not any(special in message for special in specials):
            return tokenizer.encode_marked(text)
        # Encoded by itself, the message can be no special token.
        if not (text.startswith(before) and text.endswith(after)):
            raise _not_held(otherwise)
        said = text[len(before) : len(text) - len(after)]
        return [*tokenizer.encode_marked(before), *tokenizer.encode(said), *ids]

    try:
        _, answer, rest = render(_MESSAGE, _ANSWER).partition(_ANSWER)
    except WakefulError:  # a template for questions alone
        answer, rest = "", ""
    answer_end = _first_special(tokenizer, tokenizer.encode_marked(rest)) if answer else end
    return Turn(tokenizer.encode_marked(before), ids, end, answer_end, around)


def _renderer(tokenizer: Tokenizer, otherwise: str) -> Callable[..., str]:
    """Return what fills the template in: a question, or a question and its answer."""
    begin = None if tokenizer.bos is None else tokenizer.inner.id_to_token(tokenizer.bos)
    ends = {"bos_token": begin, "eos_token": tokenizer.end_of_text_token}
    special = {name: token for name, token in ends.items() if token is not None}
    compiled: list[Template] = []

    def render(*said: str) -> str:
        turns = [
            {"role": role, "content": text}
            for role, text in zip(("user", "assistant"), said, strict=False)
        ]
        try:
            if not compiled:
                compiled.append(Template(tokenizer.chat_template))
            return compiled[0].render(turns, add_generation_prompt=len(said) == 1, **special)
        except Exception as error:  # a template is a program, and fails as one
            raise WakefulError(
                f"the chat template cannot be rendered ({' '.join(str(error).split())[:200]}): "
                f"mend it, or {otherwise}"
            ) from None

    return render


def _first_special(tokenizer: Tokenizer, ids: list[int]) -> int | None:
    """Return the first special token, or else the first added one; None where neither is there."""
    added = tokenizer.inner.get_added_tokens_decoder()
    found = [token for token in ids if token in tokenizer.special_tokens]
    found = found or [token for token in ids if token in added]
    return found[0] if found else None


def _not_held(otherwise: str) -> WakefulError:
    return WakefulError(
        "the chat template does not hold a user's message once and as it is: mend it, or "
        f"{otherwise}"
    )
