"""Texts to prepare, and what preparing them gave."""

import json

import pytest

from wakeful.data import prepare
from wakeful.errors import WakefulError

TEXTS = [f"document {number}: {'word ' * (number % 7 + 1)}\n日本" for number in range(60)]


def write(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def failure(*arguments, **options):
    with pytest.raises(WakefulError) as caught:
        prepare(*arguments, **({"vocab_size": 300} | options))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def texts_of(data, split):
    token_file, tokenizer = data.split(split), data.tokenizer
    ends = [*token_file.documents[1:], token_file.num_tokens]
    rows = [token_file.tokens[a:b] for a, b in zip(token_file.documents, ends, strict=True)]
    assert all(row[-1] == token_file.end_of_text for row in rows)
    return [tokenizer.decode(row[:-1], special=True) for row in rows]


def left_over(folder):
    return [path.name for path in folder.iterdir() if path.suffix == ".part"]
