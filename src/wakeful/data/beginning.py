"""The beginning of a text: as much as so many tokens can need, and no more."""

import math

from wakeful.data.sources import read_documents

_CHARACTERS_A_TOKEN = 64
"""More than any tokenizer averages: enough text is read and no more."""


def beginning_of(source: str, num_tokens: int) -> str:
    """Return text from a source's beginning, enough for `num_tokens` tokens of any tokenizer.

    With `num_tokens` 0 it is all of the text. Raises what `read_documents` raises.
    """
    enough = _CHARACTERS_A_TOKEN * num_tokens or math.inf
    parts: list[str] = []
    size = 0
    for document in read_documents(source):
        parts.append(document.text)
        size += len(document.text)
        if size >= enough:
            break
    text = "\n".join(parts)
    return text if enough == math.inf else text[: int(enough)]
