"""The beginning of a text: as much as so many tokens need, whoever counts them."""

import math
from collections.abc import Callable, Sequence

from wakeful.data.sources import read_documents

_CHARACTERS_A_TOKEN = 64
"""What is read at first; a tokenizer whose tokens are longer gets more."""

Encode = Callable[[str], Sequence[int]]


class Beginning:
    """A text's beginning, read on where somebody's tokens are longer than most."""

    def __init__(self, text: str, more: Callable[[], str | None] = lambda: None) -> None:
        self.text = text
        """All that has been read."""
        self._more = more

    def tokens(self, encode: Encode, count: int) -> list[int]:
        """Return the first `count` tokens of the text, or all of them where it has no more.

        A token that the end of what was read may have cut is not among them.
        """
        return list(encode(self.text_of(encode, count)))[:count]

    def text_of(self, encode: Encode, count: int) -> str:
        """Return a beginning of the text with more than `count` tokens, or all of it; 0 is all."""
        size = _CHARACTERS_A_TOKEN * count or math.inf
        while self.reach(size):
            beginning = self.text[: int(size)]
            if len(encode(beginning)) > count:
                return beginning
            size *= 2
        return self.text

    def reach(self, size: float) -> bool:
        """Read until there are `size` characters, and no further; return whether there are."""
        while len(self.text) < size:
            more = self._more()
            if more is None:
                return False
            self.text += "\n" + more
        return True


def beginning_of(source: str, num_tokens: int) -> Beginning:
    """Return a source's beginning, read as far as `num_tokens` tokens mostly need; 0 is all of it.

    Documents stand one to a line. Raises what `read_documents` raises, here and as it reads on.
    """
    documents = (document.text for document in read_documents(source))
    found = Beginning(next(documents, ""), lambda: next(documents, None))
    found.reach(_CHARACTERS_A_TOKEN * num_tokens or math.inf)
    return found
