"""Layout of a decoder over processes, and the device of each process."""

import subprocess
import sys

import pytest
import torch

from wakeful.errors import WakefulError
from wakeful.runs.distributed import ALONE, World
from wakeful.training.parallel import choose_own_device

# The shape checks of these tests cannot be compiled: hence a process of its own.
COMPILED = """
import torch
from wakeful.config.model import ModelConfig
from wakeful.model.decoder import Decoder
from wakeful.training.parallel import allow_more_versions

limits = torch._dynamo.config
layers = limits.recompile_limit + 2
limits.fail_on_recompile_limit_hit = True
for variant in ({"route": "output_gate"}, {"depth": "mudd"}):
    model = ModelConfig(vocab_size=29, max_length=16, num_layers=layers, num_heads=2, width=8,
                        mlp_width=12, **variant)
    decoder, tokens = Decoder(model).eval(), torch.arange(7).unsqueeze(0)
    expected = decoder(tokens)
    allow_more_versions(layers)
    for block in decoder.blocks:
        block.compile(backend="eager")
    torch.testing.assert_close(decoder(tokens), expected)
    torch._dynamo.reset()
"""


ONE_AFTER_ANOTHER = """
from functools import partial

import torch
from wakeful.config.schema import config_from_table
from wakeful.model.decoder import Decoder
from wakeful.training.objective import make_loss

limits = torch._dynamo.config
limits.recompile_limit, limits.fail_on_recompile_limit_hit = 2, True
torch.compile = partial(torch.compile, backend="eager")
tokens = torch.arange(14).view(2, 7)
for layers in range(1, 13):
    config = config_from_table({
        "model": {"vocab_size": 29, "max_length": 16, "num_layers": layers, "num_heads": 2,
                  "width": 8, "mlp_width": 12},
        "train": {"compile": True, "length": 16},
    })
    decoder = Decoder(config.model)
    loss = make_loss(config, decoder, torch.device("cpu"), end_of_text=0)
    torch.testing.assert_close(loss(tokens, tokens), decoder.loss(tokens, tokens))
print(torch._dynamo.utils.counters["stats"]["unique_graphs"])
"""


@pytest.mark.slow
def test_every_model_that_a_process_trains_is_compiled() -> None:
    command = [sys.executable, "-c", ONE_AFTER_ANOTHER]
    done = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True)
    assert int(done.stdout) == 12


@pytest.mark.slow
def test_every_block_is_compiled_though_each_has_its_number() -> None:
    subprocess.run([sys.executable, "-c", COMPILED], check=True, timeout=120)


def test_each_process_has_the_gpu_of_its_number_on_its_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    fourth = World(rank=3, size=4, local_rank=1)
    own = torch.device("cuda", 1)
    assert choose_own_device("auto", fourth) == choose_own_device("cuda", fourth) == own
    assert chosen == [own, own]
    assert choose_own_device("cpu", fourth) == torch.device("cpu")
    assert choose_own_device("cuda:1", ALONE) == own
    with pytest.raises(WakefulError, match="'cuda:1' names one GPU, and there are 4 processes"):
        choose_own_device("cuda:1", fourth)
    with pytest.raises(
        WakefulError, match=r"^device = 'cuda'.* 2 CUDA devices here: start no more"
    ):
        choose_own_device("cuda", World(rank=2, size=3, local_rank=2), field="device")
    assert len(chosen) == 2
