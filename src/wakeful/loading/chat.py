"""What a chat template puts around a user's message: the turns of a conversation, as tokens."""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from wakeful.data.tokenizer import Tokenizer
from wakeful.errors import WakefulError

_MESSAGE = "\ue000"
"""Stands for what the user says, in no text of anybody's."""


@dataclass(frozen=True)
class Turn:
    """A user's turn, without what the user says."""

    before: list[int]
    """Everything before the message, a system message included."""
    after: list[int]
    """From the message's end to where the answer begins."""
    end: int | None
    """The token that ends the message; None where the template ends it with ordinary text."""


def user_turn(tokenizer: Tokenizer, *, otherwise: str = "give --chat off") -> Turn | None:
    """Return a user's first turn by the tokenizer's chat template; None where it has none.

    `otherwise` is how to do without it, for messages.

    Raises:
        WakefulError: the template cannot be rendered, or does not hold the message as it is.
    """
    if not tokenizer.chat_template:
        return None
    begin = None if tokenizer.bos is None else tokenizer.inner.id_to_token(tokenizer.bos)
    renderer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.inner, bos_token=begin, eos_token=tokenizer.end_of_text_token
    )
    said = [{"role": "user", "content": _MESSAGE}]
    try:
        text = renderer.apply_chat_template(
            said, chat_template=tokenizer.chat_template, tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # a template is a program, and fails as one
        raise WakefulError(
            f"the chat template cannot be rendered ({' '.join(str(error).split())[:200]}): mend "
            f"it, or {otherwise}"
        ) from None
    before, message, after = str(text).partition(_MESSAGE)
    if not message or _MESSAGE in after:
        raise WakefulError(
            "the chat template does not hold a user's message once and as it is: mend it, or "
            f"{otherwise}"
        )
    ids = tokenizer.encode_marked(after)
    added = tokenizer.inner.get_added_tokens_decoder()
    ends = [token for token in ids if token in tokenizer.special_tokens]
    ends = ends or [token for token in ids if token in added]
    return Turn(tokenizer.encode_marked(before), ids, ends[0] if ends else None)
