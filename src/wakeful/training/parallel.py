"""Placement of the model over processes: one, a copy on each, or a share on each.

Every call of the model goes through `Parallel.call`, so that the weights a call needs are there
whichever of the decoder's methods it is.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from wakeful.config.schema import Config
from wakeful.device import choose_device
from wakeful.errors import WakefulError
from wakeful.model.decoder import Decoder
from wakeful.optim import LearnedRotation, OrthoAdam, rotation_of
from wakeful.optim.build import optimizer_of
from wakeful.runs.distributed import ALONE, World


class Parallel:
    """A decoder and the processes that train it; this class is for a single process."""

    is_sharded = False
    """True where no process has the whole model."""

    def __init__(self, decoder: Decoder, world: World = ALONE) -> None:
        self.decoder = decoder
        self.world = world

    def call(self, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """Return `function(*inputs)`, a computation with the decoder's weights."""
        return function(*inputs)

    def accumulation_context(self, *, last: bool) -> contextlib.AbstractContextManager[object]:
        """Return the context of forward and backward passes of one micro-batch.

        Gradients add up over micro-batches; in the `last` one they become the mean over processes.
        """
        return contextlib.nullcontext()  # torch adds up gradients, and there is one process

    def settle(self) -> None:
        """Free weights that calls without a backward pass have gathered."""


class ForwardEntry(nn.Module):
    """A module whose forward pass is any computation with the decoder, for the wrappers' hooks."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        return function(*inputs)


class DataParallel(Parallel):
    """The whole model and its optimizer's state on each process; gradients are averaged."""

    def __init__(self, decoder: Decoder, world: World) -> None:
        """Wrap the decoder by DDP; all processes must have the same weights already."""
        super().__init__(decoder, world)
        with warnings.catch_warnings():  # newer versions of torch have another name for the option
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")
            self._entry = DistributedDataParallel(
                ForwardEntry(decoder), broadcast_buffers=False, gradient_as_bucket_view=True
            )

    def call(self, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """Return `function(*inputs)`; with gradients, DDP averages them in the backward pass."""
        if torch.is_grad_enabled():
            return self._entry(function, *inputs)
        return function(*inputs)

    def accumulation_context(self, *, last: bool) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if last else self._entry.no_sync()


class FullyShard(Parallel):
    """A share of each weight, gradient and moment on each process (FSDP2; ZeRO stage 3).

    A block's weights are gathered when it runs and let go after it, forward and backward. In mixed
    precision they travel as bfloat16 and gradients as float32; embeddings, head, final norm and
    the coefficients of routes stay float32, so the arithmetic is that of autocast on one process
    but for the blocks' norms and learned sinks, whose numbers are rounded to bfloat16.
    """

    is_sharded = True

    def __init__(
        self,
        decoder: Decoder,
        world: World,
        *,
        device: torch.device,
        mixed: bool,
    ) -> None:
        """Shard the decoder's parameters over all processes by FSDP2, in place.

        With `mixed`, blocks compute in bfloat16 and their gradients are averaged in float32. The
        decoder's other parts keep their precision.
        """
        super().__init__(decoder, world)
        # A block returns a view of its projection, which later blocks read. Torch warns because
        # writing to such a view would fail; here nothing writes to it.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        mesh = init_device_mesh(device.type, (world.size,))
        full_precision = MixedPrecisionPolicy(cast_forward_inputs=False)
        block_policy = full_precision
        if mixed:
            block_policy = replace(
                full_precision, param_dtype=torch.bfloat16, reduce_dtype=torch.float32
            )
        for block in decoder.blocks:
            fully_shard(block, mesh=mesh, mp_policy=block_policy)
        self._entry = ForwardEntry(decoder)
        # The blocks are sharded already: this is for all other parameters.
        fully_shard(self._entry, mesh=mesh, mp_policy=full_precision)

    def call(self, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
        return self._entry(function, *inputs)

    @contextlib.contextmanager
    def accumulation_context(self, *, last: bool) -> Iterator[None]:
        assert isinstance(self._entry, FSDPModule)
        self._entry.set_requires_gradient_sync(last)
        yield

    def settle(self) -> None:
        for module in self._entry.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def choose_own_device(name: str, world: World, *, field: str = "train.device") -> torch.device:
    """Return the device called `name`, as `choose_device` does.

    If it is CUDA without a number, each of several processes gets a GPU of its own: the one with
    the process's number on its machine, which becomes torch's current device.

    Raises:
        WakefulError: several processes are given one GPU, or there are too few GPUs. The message
            calls the option `field`.
    """
    device = choose_device(name, field=field)
    if world.size == 1 or device.type != "cuda":
        return device
    if device.index is not None:
        raise WakefulError(
            f"{field} = {name!r} names one GPU, and there are {world.size} processes: with "
            '"cuda" each takes its own'
        )
    if world.local_rank >= torch.cuda.device_count():
        raise WakefulError(
            f"{field} = {name!r}, but torch sees {torch.cuda.device_count()} CUDA devices "
            "here: start no more processes on a machine than it has GPUs"
        )
    device = torch.device("cuda", world.local_rank)
    torch.cuda.set_device(device)
    return device


def shard_model(decoder: Decoder, world: World, device: torch.device) -> Decoder:
    """Shard a model over all processes for inference, in place, and return it.

    A block's weights are gathered for its forward pass and freed after it. `device` is the kind of
    device on which the shares lie.
    """
    mesh = init_device_mesh(device.type, (world.size,))
    for part in (*decoder.blocks, decoder):
        fully_shard(part, mesh=mesh, reshard_after_forward=True)
    return decoder


def distribute(config: Config, decoder: Decoder, device: torch.device, world: World) -> Parallel:
    """Distribute a decoder over the processes of a run, on `device`, as `train.parallel` says;
    return the `Parallel` by which the decoder must be called from now on.

    Of several processes, each compiles the decoder's blocks if `train.compile` is on.
    """
    if world.size == 1:
        return Parallel(decoder, world)
    if config.train.compile:
        allow_more_versions(len(decoder.blocks))
        for block in decoder.blocks:
            block.compile()
    if config.train.parallel == "ddp":
        return DataParallel(decoder.to(device), world)
    return FullyShard(decoder, world, device=device, mixed=config.train.dtype == "bfloat16")


def allow_more_versions(num_modules: int) -> None:
    """Raise Dynamo's limits, so that it compiles shared code once more for each further module: the
    blocks of a model, or the models that a process trains one after another.

    Modules share their code, but what it computes depends on the layer's number or on the variant.
    By default Dynamo stops after 8 compiled versions of a function, and what comes later would run
    as plain Python. A module needs up to four versions: for training and evaluation, each with
    whole batches and with the smaller last one.
    """
    limits = torch._dynamo.config
    limits.recompile_limit += 4 * num_modules
    # The versions of one function for all modules that share it, with some to spare.
    limits.accumulated_recompile_limit += 16 * num_modules


def check_shares(config: Config, world: World) -> None:
    """Raise `WakefulError` if the processes cannot share the batch evenly, or if they share weights
    and the optimizer needs whole gradients.
    """
    size, batch, micro = world.size, config.train.batch_size, config.train.micro_batch_size
    if batch % size:
        lower = batch // size * size
        sizes = f"{lower} or {lower + size}" if lower else f"{size} or more"
        raise WakefulError(
            f"train.batch_size = {batch} cannot be shared evenly by {size} processes; use {sizes}, "
            "or another number of processes"
        )
    share = batch // size
    if micro and micro < share and share % micro:  # larger ones are cut to the share
        raise WakefulError(
            f"train.micro_batch_size = {micro} does not divide the {share} sequences that each of "
            f"{size} processes has of train.batch_size = {batch}"
        )
    optimizer = config.optimizer
    if size == 1 or config.train.parallel == "ddp":  # every process has whole weights
        return
    uses_rotation = optimizer_of(optimizer.name).func is OrthoAdam
    if uses_rotation and isinstance(rotation_of(optimizer.rotation), LearnedRotation):
        raise WakefulError(
            f"optimizer.rotation = {optimizer.rotation!r} learns from whole gradients, which no "
            'process has with train.parallel = "fsdp"; use "ddp", or rotation = "hadamard"'
        )
