"""A few steps of a tiny model, saved and gone on with: what an optimizer from elsewhere can do."""

import functools
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from wakeful.config.model import ModelConfig
from wakeful.config.schema import OptimizerConfig
from wakeful.errors import WakefulError
from wakeful.model.decoder import Decoder
from wakeful.model.initialize import initialize
from wakeful.optim.build import BUILDERS, configured, optimizer_of, set_rate
from wakeful.runs import checkpoint

_BEFORE, _AFTER = 12, 4
"""Steps before the checkpoint, for what begins late in a state, and after it."""
_TINY = ModelConfig(
    vocab_size=16, num_layers=1, num_heads=2, width=8, mlp_width=16, max_length=8
)  # fmt: skip


@functools.cache
def rehearse(config: OptimizerConfig) -> None:
    """Raise `WakefulError` where an optimizer of another package could not be resumed.

    It must take steps without a closure, its state must go into a checkpoint, and from there it
    must go on to the bit: what it keeps elsewhere, and random numbers, would be lost without a
    word. Wakeful's own have tests of their own.
    """
    if optimizer_of(config.name).func in BUILDERS.values():
        return
    title = f"optimizer.name = {config.name!r}"
    try:
        with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(devices=[]):
            straight, resumed = _both(config, Path(folder))
    except Exception as error:  # of another package, which may raise anything
        raise WakefulError(f"{title} cannot train: {error}") from error
    if not all(map(torch.equal, straight, resumed)):
        raise WakefulError(
            f"{title} cannot be resumed: from a checkpoint it goes on otherwise than without one, "
            "since it draws random numbers, or keeps what its state_dict lacks"
        )


def _both(config: OptimizerConfig, folder: Path) -> tuple[list[Tensor], list[Tensor]]:
    """Return the weights after all steps, and those of a run that was resumed in between."""
    model, optimizer = _begun(config)
    _train(model, optimizer, config.lr, range(_BEFORE))
    progress = checkpoint.RunProgress(_BEFORE)
    place = checkpoint.save(folder, model, optimizer, progress, keep=1)
    again, other = _begun(config)
    checkpoint.load_model(place, again)
    checkpoint.load_optimizer(place, other)
    for each, its in ((model, optimizer), (again, other)):
        _train(each, its, config.lr, range(_BEFORE, _BEFORE + _AFTER))
    return list(model.parameters()), list(again.parameters())


def _begun(config: OptimizerConfig) -> tuple[Decoder, torch.optim.Optimizer]:
    model = initialize(Decoder(_TINY), 0)
    return model, configured(config, model.named_parameters(), seed=0)


def _train(model: Decoder, optimizer: torch.optim.Optimizer, lr: float, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        set_rate(optimizer, lr / (1 + step))
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
