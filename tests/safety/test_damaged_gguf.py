"""GGUF files from others, broken in every way: loaded or refused in a line, in bounded time."""

import struct
from pathlib import Path
from random import Random

import pytest
import torch

from damage import damaged, refusal
from hf.gguf_models import FAMILIES, TEXTS, decoder
from safety.folders import TRIALS
from wakeful.data.tokenizer import Tokenizer
from wakeful.hf.gguf_header import read_gguf_header
from wakeful.hf.gguf_out import export_gguf
from wakeful.loading.load import load, read_decoder

pytestmark = pytest.mark.usefixtures("as_users_run_it")
KINDS = ("llama", "gpt2", "gemma2, as made")
NUMBERS = [0, 1, 2, 3, 5, 31, 33, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1]


@pytest.fixture(scope="module", params=KINDS)
def content(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Give the bytes of a small model."""
    tokenizer = Tokenizer.train(TEXTS, vocab_size=270)
    _, changes = FAMILIES[request.param]
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    made = decoder(tokenizer.vocab_size, **changes)
    export_gguf(made, path, tokenizer=tokenizer, storage="f16", name="a model")
    return path.read_bytes()


def header_size(path: Path, content: bytes) -> int:
    path.write_bytes(content)
    return len(content) - sum(each.num_bytes for each in read_gguf_header(path).tensors.values())


def use(path: Path) -> None:
    """Load a file in every way there is."""
    loaded = load(str(path), device="cpu", dtype=torch.float32)
    _ = loaded.tokenizer
    read_decoder(path)


def broken(content: bytes, head: int, random: Random) -> bytes:
    """Return a file with bytes damaged, cut off, or a number of the header made another."""
    match random.randrange(4):
        case 0:
            return content[: random.randrange(len(content))]
        case 1:
            return damaged(content[:head], random) + content[head:]
        case 2:
            place, number = random.randrange(4, head - 8), random.choice(NUMBERS)
            return content[:place] + struct.pack("<I", number) + content[place + 4 :]
        case _:
            place = random.randrange(4, head - 8)
            number = random.choice([*NUMBERS, 2**40, 2**63, 2**64 - 1])
            return content[:place] + struct.pack("<Q", number) + content[place + 8 :]


@pytest.mark.slow
@pytest.mark.parametrize("trials", TRIALS)
def test_a_broken_file_is_loaded_or_refused(content: bytes, tmp_path: Path, trials: int) -> None:
    path = tmp_path / "model.gguf"
    head = header_size(path, content)
    use(path)
    refused = 0
    for seed in range(trials):
        path.write_bytes(broken(content, head, Random(seed)))
        refused += bool(refusal(lambda: use(path)))
    assert refused > trials / 4


@pytest.mark.slow
def test_every_value_of_the_header_may_be_of_any_size(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    header_size(path, content)
    for key, value in read_gguf_header(path).values.items():
        if type(value) is not int:
            continue
        place = content.index(key.encode()) + len(key) + 4
        for number in (0, 7, 2**31):
            path.write_bytes(content[:place] + struct.pack("<I", number) + content[place + 4 :])
            refusal(lambda: use(path))
