"""What several tests of data begin with."""

import pytest

from data.preparations import TEXTS, write


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source.jsonl"
    write(path, TEXTS)
    return str(path)
