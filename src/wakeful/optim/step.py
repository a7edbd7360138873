"""One step of OrthoAdam's equations, over chunks of a weight or over lists of weights.

Shapes: R rows and n columns of a weight turned so that its rotated axis comes last.
"""

from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor

from wakeful.optim.recipe import RotatedParameter
from wakeful.optim.rotations.base import LearnedRotation
from wakeful.optim.sharding import layout_for, local_part, write_back
from wakeful.parts.orthoadam import adam_step

CHUNK = 2**18  # elements a chunk: with its temporaries it stays in a core's cache
MomentRows = tuple[Tensor, Tensor, Tensor, Tensor]
"""Rows of a weight, its gradient and its two moments."""


class ParameterStep:
    """One parameter's part of a step: views with the rotated axis last, and the step's numbers."""

    def __init__(
        self,
        parameter: Tensor,
        rotated: RotatedParameter,
        state: dict[str, Any],
        group: dict[str, Any],
    ) -> None:
        """View a parameter, its gradient and moments with the rotated axis last."""
        self.parameter = parameter
        self.rotations = rotated.rotations or ()
        self.state = state
        self.transposed = bool(rotated.axes) and rotated.axes[0] == 0
        self.layout = layout_for(parameter, rotated.axes)
        self.exp_avg = self._view(state["exp_avg"])
        self.exp_avg_sq = self._view(state["exp_avg_sq"])
        self.grad = self._view(cast(Tensor, parameter.grad))
        self.weight = self._view(parameter)
        self.beta1, self.beta2 = group["betas"]
        self.eps = float(group["eps"])
        self.lr = float(group["lr"])
        self.weight_decay = group["weight_decay"]
        self.step_number = 0

    def _view(self, tensor: Tensor) -> Tensor:
        """Return this rank's part with the first rotated axis last; a scalar becomes a vector."""
        tensor = local_part(tensor, self.layout)
        if self.transposed:
            return tensor.mT
        return tensor.view(1) if tensor.dim() == 0 else tensor

    def begin(self) -> None:
        """Count the step, and let learned rotations see the gradient.

        Where a rotation changes its basis, the first moment is carried to the new basis, in place.
        """
        self.state["step"] += 1
        self.step_number = self.state["step"].item()
        for side, rotation in enumerate(self.rotations):
            if isinstance(rotation, LearnedRotation):
                grad = self.grad.to(self.exp_avg.dtype)
                with torch.autocast(grad.device.type, enabled=False):
                    # The first rotation is of the last axis of gradient and moment, the second of
                    # the other axis.
                    change = rotation.learn(grad.mT if side == 1 else grad)
                    if change is not None:
                        moment = self.exp_avg.mT if side == 1 else self.exp_avg
                        moment.copy_(moment @ change)

    def end(self) -> None:
        """Write a weight that was resharded for the step back to the parameter."""
        part = self.weight.mT if self.transposed else self.weight
        write_back(self.parameter, part, self.layout)

    def into(self, grad: Tensor) -> Tensor:
        """Return rows of the gradient in the rotated basis: contiguous, in the moments' dtype."""
        grad = grad.to(self.exp_avg.dtype).contiguous()
        if self.rotations:
            grad = self.rotations[0].into(grad)
        if len(self.rotations) == 2:
            grad = self.rotations[1].into(grad.mT.contiguous()).mT.contiguous()
        return grad

    def back(self, step: Tensor) -> Tensor:
        """Return the rows' step in the parameter's basis."""
        if len(self.rotations) == 2:
            step = self.rotations[1].back(step.mT.contiguous()).mT.contiguous()
        return self.rotations[0].back(step) if self.rotations else step

    def tensors(self) -> MomentRows:
        """Return the weight, its gradient and its two moments, whole."""
        return self.weight, self.grad, self.exp_avg, self.exp_avg_sq

    def chunks(self) -> Iterator[MomentRows]:
        """Yield the same rows of weight, gradient and moments, few enough to stay in cache."""
        # A second rotation is along the columns: it needs all rows at once.
        if len(self.rotations) == 2 or self.weight.numel() <= CHUNK:
            yield self.tensors()
            return
        num_rows = max(1, CHUNK * self.weight.shape[0] // self.weight.numel())
        yield from zip(*(tensor.split(num_rows) for tensor in self.tensors()), strict=True)


def take_step(jobs: Iterable[ParameterStep], kernel: str) -> None:
    """Take the steps of parameters of one group.

    `kernel` is "foreach", which launches few kernels over all weights, for an accelerator, with
    temporaries as large as the weights; "chunked", which goes over each weight in pieces that stay
    in a core's cache; or "auto", which chooses between them by the device.
    """
    alike: dict[tuple[torch.device, torch.dtype, int], list[ParameterStep]] = {}
    for job in jobs:
        job.begin()
        alike.setdefault((job.parameter.device, job.exp_avg.dtype, job.step_number), []).append(job)
    for (device, _, _), alike_jobs in alike.items():
        with torch.autocast(device.type, enabled=False):
            if kernel == "foreach" or (kernel == "auto" and device.type != "cpu"):
                _update(alike_jobs, [job.tensors() for job in alike_jobs])
            else:
                for job in alike_jobs:
                    for chunk in job.chunks():
                        _update([job], [chunk])
        for job in alike_jobs:
            job.end()


def _update(jobs: list[ParameterStep], parts: list[MomentRows]) -> None:
    """Update moments and weights in place: θ ← (1 − η λ) θ − η Qᵀ m̂ / (√v̂ + ε).

    `parts` are the rows of each job that are updated now. The jobs are of one group, dtype and
    count of steps. A weight in a narrower dtype than its moments is rounded once.
    """
    weights, grads, exp_avgs, exp_avg_sqs = (list(tensors) for tensors in zip(*parts, strict=True))
    first = jobs[0]
    adam_step(
        weights,
        [job.into(grad) for job, grad in zip(jobs, grads, strict=True)],
        exp_avgs,
        exp_avg_sqs,
        [job.back for job in jobs],
        lr=first.lr, betas=(first.beta1, first.beta2), eps=first.eps,
        weight_decay=first.weight_decay, count=first.step_number,
    )  # fmt: skip
