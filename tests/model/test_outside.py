"""A part from outside the package that sees the future, or that a cache breaks, never trains."""

from pathlib import Path

import pytest

from helpers import tiny_config
from test_outside_variant import HELPER, MODULE, ROUTE, forget
from training.runs import tiny, write_text
from wakeful.errors import WakefulError
from wakeful.model.decoder import admit
from wakeful.model.outside import check_outside
from wakeful.training.loop import train_run

PEEKING = '''
import torch
from wakeful.norms import Norm
from wakeful.routes import ValueRoute


class Next(ValueRoute):
    """Every value is the next token's."""

    mixes = frozenset({"value"})

    def mix(self, layer, x, qkv, memory):
        return qkv._replace(v=qkv.v.roll(-1, 1))


class Odd(ValueRoute):
    """Values are right in texts of an even number of tokens."""

    mixes = frozenset({"value"})

    def mix(self, layer, x, qkv, memory):
        later = qkv.v.roll(-1, 1) if x.shape[1] % 2 else qkv.v
        return qkv._replace(v=later)


class Running(ValueRoute):
    """Values are means over the tokens so far, which no cache holds."""

    mixes = frozenset({"value"})

    def mix(self, layer, x, qkv, memory):
        count = torch.arange(1, x.shape[1] + 1).view(1, -1, 1, 1)
        return qkv._replace(v=qkv.v.cumsum(1) / count)


class OverText(Norm):
    """A norm over all tokens of a text."""

    def forward(self, x):
        return x / x.square().mean((1, 2), keepdim=True).sqrt()
'''


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "peeking_module.py").write_text(PEEKING)
    (tmp_path / "outside_module.py").write_text(MODULE)
    (tmp_path / "outside_helper.py").write_text(HELPER)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("WAKEFUL_CACHE", str(tmp_path / "cache"))
    forget()
    return tmp_path


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"route": "peeking_module:Next"}, "token 1 of 13 changes the logits of those before it"),
        (
            {"route": "then(resformer, peeking_module:Next)"},
            r"model\.route = then\(resf",
        ),
        ({"route": "peeking_module:Odd"}, "changes the logits of those before it"),
        ({"route": "peeking_module:Running"}, "token by token with a cache, 13 tokens have other"),
        ({"norm": "peeking_module:OverText"}, "changes the logits of those before it"),
    ],
)
def test_a_part_that_is_wrong_is_named(parts: dict[str, str], words: str) -> None:
    config = tiny_config(**parts)
    admit(config)
    with pytest.raises(WakefulError, match=words):
        check_outside(config)


@pytest.mark.slow
@pytest.mark.usefixtures("place")
def test_a_part_that_is_right_passes() -> None:
    for config in (
        tiny_config(route=ROUTE),
        tiny_config(route=f"then({ROUTE}, neutreno)", depth="denseformer", normalizer="softmax1"),
        tiny_config(route=f"then({ROUTE}, gated(channels=12))", num_heads=1, num_kv_heads=1),
        tiny_config(),
    ):
        admit(config)
        check_outside(config)


def test_no_run_begins_with_a_wrong_part(place: Path) -> None:
    config = tiny(write_text(place / "text"), model={"route": "peeking_module:Next"})
    with pytest.raises(WakefulError, match="changes the logits of those before it"):
        train_run(config, place / "run")
    assert not (place / "run").exists()
