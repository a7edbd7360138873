"""Sharded parameters take the same steps as whole ones. Two processes on one machine, gloo."""

import copy
import socket
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from wakeful.optim import OrthoAdam

AXES = {
    "residual": {"up.weight": 1, "down.weight": 0},
    "both": {"up.weight": (1, 0), "down.weight": (0, 1)},
}
STEPS = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(6, 10, dtype=torch.float64)
        self.down = nn.Linear(10, 6, dtype=torch.float64)
        self.gain = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh()) * self.gain


def optimizer_of(net: nn.Module, sides: str) -> OrthoAdam:
    return OrthoAdam(
        net.named_parameters(), lr=3e-2, weight_decay=0.1, rotation="haar", axes=AXES[sides]
    )


def steps(net: nn.Module, optimizer: torch.optim.Optimizer, start: int, number: int) -> None:
    for step in range(start, start + number):
        x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (net(x) - 1).square().mean().backward()
        optimizer.step()


def run_rank(rank: int, port: int, folder: str) -> None:
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
    )
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (2,))
        for sides in ("residual", "both"):
            net = Net()
            fully_shard(net, mesh=mesh)
            optimizer = optimizer_of(net, sides)
            steps(net, optimizer, 0, STEPS)
            saved = copy.deepcopy(get_optimizer_state_dict(net, optimizer))
            with torch.no_grad():
                weights = {n: p.clone() for n, p in net.named_parameters()}
            steps(net, optimizer, STEPS, STEPS)
            full = {n: p.full_tensor().detach() for n, p in net.named_parameters()}  # pyright: ignore
            with torch.no_grad():
                for n, p in net.named_parameters():
                    p.copy_(weights[n])
            again = optimizer_of(net, sides)
            set_optimizer_state_dict(net, again, saved)
            steps(net, again, STEPS, STEPS)
            for n, p in net.named_parameters():
                assert torch.equal(full[n], p.full_tensor()), n  # pyright: ignore
            if rank == 0:
                torch.save(full, Path(folder) / f"{sides}.pt")
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.long
@pytest.mark.filterwarnings("default")
def test_two_ranks_step_as_one(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(run_rank, args=(port, str(tmp_path)), nprocs=2)  # pyright: ignore
    for sides in ("residual", "both"):
        net = Net()
        steps(net, optimizer_of(net, sides), 0, 2 * STEPS)
        full = torch.load(tmp_path / f"{sides}.pt", weights_only=True)
        for name, p in net.named_parameters():
            torch.testing.assert_close(p.data, full[name], rtol=0, atol=1e-12)
