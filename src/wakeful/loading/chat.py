"""Turns of a conversation as tokens: a user's message within the chat template."""

from collections.abc import Callable
from dataclasses import dataclass

from wakeful.data.tokenizer import Tokenizer
from wakeful.errors import WakefulError
from wakeful.loading.template import render_template

_MESSAGE = "\ue000"
"""Placeholder of the user's message, a private character that no text contains."""
_ANSWER = "\ue001"
"""Placeholder of the model's answer."""


@dataclass(frozen=True)
class Turn:
    """A user's turn in a chat template: the tokens around a message, and a function that encodes
    the turn with a given message.
    """

    before: list[int]
    """Tokens before the message, including a system message."""
    after: list[int]
    """Tokens between the message and the answer."""
    answer_end: int | None
    """Token that ends the model's answer, or the user's message where the template shows no end of
    an answer; None where the end is ordinary text.
    """
    encode: Callable[[str], list[int]]
    """Function from a message to the tokens of the turn, up to where the answer begins.

    The tokens are those of Transformers: the template may strip the message, and the text across
    both its ends is encoded together. A message that spells a special token is encoded separately,
    as plain text. Raises `WakefulError` where the template cannot hold the message.
    """


def user_turn(tokenizer: Tokenizer) -> Turn | None:
    """Return the user's first turn in the tokenizer's chat template; None without a template.

    The template is rendered with placeholders in place of the message and the answer, and the text
    is split there.

    Raises:
        WakefulError: the template cannot be rendered, or alters the message.
    """
    if not tokenizer.chat_template:
        return None
    render = _make_renderer(tokenizer)
    before, placeholder, after = render(_MESSAGE).partition(_MESSAGE)
    if not placeholder or _MESSAGE in after:
        raise _altered_message_error()
    after_ids = tokenizer.encode_marked(after)
    added = tokenizer.inner.get_added_tokens_decoder()
    special_texts = [added[token].content for token in tokenizer.special_tokens]

    def encode(message: str) -> list[int]:
        """Return the tokens of the turn with this message."""
        text = render(message)
        if not any(special in message for special in special_texts):
            return tokenizer.encode_marked(text)
        # `encode_marked` would read special tokens that the message spells: so the message alone is
        # encoded by `encode`, as plain text.
        if not (text.startswith(before) and text.endswith(after)):
            raise _altered_message_error()
        rendered_message = text[len(before) : len(text) - len(after)]
        encoded_message = tokenizer.encode(rendered_message)
        return [*tokenizer.encode_marked(before), *encoded_message, *after_ids]

    try:
        _, placeholder, after_answer = render(_MESSAGE, _ANSWER).partition(_ANSWER)
    except WakefulError:  # a template for questions alone
        placeholder, after_answer = "", ""
    # Where the template shows no end of an answer, take what ends the user's message.
    end_ids = tokenizer.encode_marked(after_answer) if placeholder else after_ids
    answer_end = _first_special(tokenizer, end_ids)
    return Turn(tokenizer.encode_marked(before), after_ids, answer_end, encode)


def _make_renderer(tokenizer: Tokenizer) -> Callable[..., str]:
    """Return a function that renders a tokenizer's chat template with a user's message, up to where
    the answer begins, or with a message and the model's answer. It raises `WakefulError` if the
    template fails.
    """
    bos = None if tokenizer.bos is None else tokenizer.inner.id_to_token(tokenizer.bos)
    variables = {"bos_token": bos, "eos_token": tokenizer.end_of_text_token}
    special_tokens = {name: token for name, token in variables.items() if token is not None}

    def render(message: str, answer: str | None = None) -> str:
        turns = [{"role": "user", "content": message}]
        if answer is not None:
            turns.append({"role": "assistant", "content": answer})
        try:
            return render_template(
                tokenizer.chat_template, turns, add_generation_prompt=answer is None,
                **special_tokens,
            )  # fmt: skip
        except ValueError as error:
            raise WakefulError(
                f"the chat template cannot be rendered ({str(error)[:200]}): mend it, or leave out "
                "--chat"
            ) from None

    return render


def _first_special(tokenizer: Tokenizer, ids: list[int]) -> int | None:
    """Return the first special token in `ids`; if there is none, the first token that was added to
    the tokenizer's model; if there is none either, None.
    """
    added = tokenizer.inner.get_added_tokens_decoder()
    special_ids = [token for token in ids if token in tokenizer.special_tokens]
    added_ids = [token for token in ids if token in added]
    return next(iter(special_ids + added_ids), None)


def _altered_message_error() -> WakefulError:
    return WakefulError(
        "the chat template does not contain a user's message once and unchanged: mend it, or leave "
        "out --chat"
    )
