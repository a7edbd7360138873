"""One process that waits for the others to join."""

import time

import pytest
import torch.distributed as dist

from wakeful.errors import WakefulError
from wakeful.runs import distributed


@pytest.mark.slow
def test_who_waits_for_the_others_says_so_after_a_while(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def never(*_: object, **__: object) -> None:
        time.sleep(0.5)
        raise ValueError("nobody came")

    for name, value in {
        "WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "10.1.2.3", "MASTER_PORT": "77",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "rendezvous", never)
    with pytest.raises(WakefulError, match="could not join the others: nobody came"):
        distributed._init_world()
    assert not capfd.readouterr().err
    monkeypatch.setattr(distributed, "_PATIENCE", 0.1)
    with pytest.raises(WakefulError, match="could not join the others: nobody came"):
        distributed._init_world()
    line = "process 0 of 2 waits for the others at 10.1.2.3:77, up to 10 minutes\n"
    assert capfd.readouterr().err == line
