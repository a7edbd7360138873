"""Sources that are too long to be a file's name."""

from pathlib import Path

import pytest

from wakeful.data.preparing import prepare
from wakeful.errors import WakefulError


def test_a_long_source_is_refused_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(WakefulError, match=r"cannot read a+: File name too long"):
        prepare("a" * 5000, tmp_path / "out", vocab_size=300)
    mixture = f'mixture(parts=[("a", "{"a" * 300}.txt", 1.0), ("b", "b.txt", 1.0)])'
    with pytest.raises(WakefulError, match="a mixture's parts are prepared by the run"):
        prepare(mixture, tmp_path / "out", vocab_size=300)
    assert not list(tmp_path.iterdir())
