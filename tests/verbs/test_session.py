"""What is said of long work before its first unit."""

import pytest
import torch

from wakeful.loading import session
from wakeful.loading.model import Model
from wakeful.model import Decoder, ModelConfig
from wakeful.terminal.display import Display


class Heard(Display):
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.counts: list[tuple[int, int]] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def count(self, name: str, done: int, total: int) -> None:
        self.counts.append((done, total))


@pytest.mark.parametrize(("seconds", "said"), [(29.0, 0), (31.0, 1), (7_000.0, 1)])
def test_an_estimate_stands_before_long_work(
    monkeypatch: pytest.MonkeyPatch, seconds: float, said: int
) -> None:
    asked: list[float] = []

    def rough(operations: float, device: torch.device) -> float:
        asked.append(operations)
        return seconds

    monkeypatch.setattr(session, "estimate_seconds", rough)
    config = ModelConfig(vocab_size=10, num_layers=1, num_heads=1, width=8, mlp_width=8)
    decoder = Decoder(config)
    model = Model(
        name="small", module=decoder, context=16, architecture="ours",
        read_tokenizer=lambda: pytest.fail("nobody asked for it"),
    )  # fmt: skip
    shown = Heard()
    tell = session.count_progress(shown, "windows", model, tokens=16, passes=3.0)
    for done in range(3):
        tell(done, 2)
    size = sum(parameter.numel() for parameter in decoder.parameters())
    assert asked == [2 * size * 16 * 2 * 3.0]
    assert len(shown.notes) == said
    assert shown.counts == [(0, 2), (1, 2), (2, 2)]
