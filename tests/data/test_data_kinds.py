"""Every kind of data answers the same questions: its batches, windows, beginnings and checks."""

from pathlib import Path

import numpy as np
import pytest
import torch

from training.runs import tiny, write_text
from wakeful.config.schema import Config
from wakeful.data import Batches, Tokenizer, ValidationWindows, prepare
from wakeful.data.base import Data
from wakeful.data.mixture import MixedBatches, MixedTokens
from wakeful.data.order import Tokens
from wakeful.data.preparing import load_data
from wakeful.errors import WakefulError

KINDS = ("text", "folder", "mixture", "task")


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setenv("WAKEFUL_CACHE", str(tmp_path / "cache"))
    text, folder = write_text(tmp_path / "text"), tmp_path / "folder"
    prepare(str(text), folder, vocab_size=280, validation_fraction=0.1, keep_overlap=True)
    parts = [("a", str(text), 3), ("b", str(folder), 1)]
    mixture = f"mixture({parts=!r})"
    return {"text": str(text), "folder": str(folder), "mixture": mixture, "task": "backcopy"}


def config_of(kind: str, source: str, **data: object) -> Config:
    kept = {"keep_overlap": True} if kind in ("text", "mixture") else {}
    return tiny(Path(), data={"source": source, **kept, **data})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bos", [False, True])
def test_batches_and_windows_are_those_of_the_kinds_order(
    kind: str, bos: bool, sources: dict[str, str]
) -> None:
    config = config_of(kind, sources[kind], bos=bos, first_batch=2)
    data = load_data(config.data)
    data.check_config(config.data)
    begin = data.tokenizer.start_token if bos or kind == "task" else None
    ours = data.batches(config, rank=1, world_size=2)
    options = {"length": 16, "batch_size": 4, "seed": 0, "rank": 1, "world_size": 2, "bos": begin}
    windows = {"length": 16, "batch_size": config.train.eval_batch_size, "bos": begin}
    if isinstance(data.train, MixedTokens):
        theirs = MixedBatches(data.train, first=2, **options)
    else:
        theirs = Batches(data.train, first=2, **options)
    whole = ValidationWindows(data.validation, **windows)
    for step in (0, 1, 500):
        assert torch.equal(ours.batch(step), theirs.batch(step))
    for one, other in zip(data.windows(config), whole, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])
    assert data.windows(config).domains() == whole.domains()


@pytest.mark.parametrize("kind", ["mixture", "task"])
def test_only_one_text_has_first_tokens(kind: str, sources: dict[str, str]) -> None:
    config = config_of(kind, sources[kind], max_tokens=200)
    with pytest.raises(WakefulError, match=r"data\.max_tokens = 200 is for one text"):
        load_data(config.data).batches(config)


class Counting(Tokens):
    """The numbers from 0 on."""

    num_tokens, vocab_size, end_of_text = 1000, 1000, 0

    def read(self, starts: np.ndarray, count: int) -> np.ndarray:
        return (np.asarray(starts)[:, None] + np.arange(count)) % self.num_tokens


class Counted(Data):
    """A kind of data that nothing else knows."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.train = self.validation = Counting()
        self.tokenizer, self.info = tokenizer, {}


def test_a_new_kind_states_its_tokens_and_has_the_rest(sources: dict[str, str]) -> None:
    config = config_of("text", sources["text"], bos=True)
    data = Counted(load_data(config.data).tokenizer)
    data.check_config(config.data)
    rows = data.batches(config).batch(0)
    assert (rows[:, 0] == data.tokenizer.start_token).all()
    assert (rows[:, 1:].diff() % 1000 == 1).all()
    targets = torch.cat([each for _, each in data.windows(config)]).flatten()
    assert targets[targets >= 0].tolist() == list(range(1, 1000))
    assert [*data.parts] == [data]
