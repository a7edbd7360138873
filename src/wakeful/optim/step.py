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
        """View a parameter, its gradient and moments with the first rotated axis last.

        `state` is the parameter's entry in the optimizer's state, and `group` its group of options.
        """
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
        self.step_number = 0  # set by `begin`

    def _view(self, tensor: Tensor) -> Tensor:
        """Return this rank's part with the first rotated axis last; a scalar becomes a vector."""
        tensor = local_part(tensor, self.layout)
        if self.transposed:
            return tensor.mT
        return tensor.view(1) if tensor.dim() == 0 else tensor

    def begin(self) -> None:
        """Count the step, and let learned rotations learn from the gradient.

        If a rotation changes its basis, the first moment is carried to the new basis, in place.
        """
        self.state["step"] += 1
        self.step_number = self.state["step"].item()
        for index, rotation in enumerate(self.rotations):
            if isinstance(rotation, LearnedRotation):
                grad = self.grad.to(self.exp_avg.dtype)
                with torch.autocast(grad.device.type, enabled=False):
                    # The first rotation acts on the last axis of gradient and moment, the second on
                    # the other axis.
                    change = rotation.learn(grad.mT if index == 1 else grad)
                    if change is not None:
                        moment = self.exp_avg.mT if index == 1 else self.exp_avg
                        moment.copy_(moment @ change)

    def end(self) -> None:
        """Write a weight that was resharded for the step back to the parameter."""
        part = self.weight.mT if self.transposed else self.weight
        write_back(self.parameter, part, self.layout)

    def into(self, grad: Tensor) -> Tensor:
        """Return rows of the gradient in the rotated basis: contiguous, in the moments' dtype.

        With two rotations `grad` must have all rows.
        """
        grad = grad.to(self.exp_avg.dtype).contiguous()
        if self.rotations:
            grad = self.rotations[0].into(grad)
        if len(self.rotations) == 2:  # the second acts on the columns
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
        """Yield weight, gradient and moments in chunks of the same rows, small enough for a core's
        cache; all rows at once if there are two rotations.
        """
        # A second rotation is along the columns and needs all rows.
        if len(self.rotations) == 2 or self.weight.numel() <= CHUNK:
            yield self.tensors()
            return
        num_rows = max(1, CHUNK * self.weight.shape[0] // self.weight.numel())  # of `CHUNK` numbers
        yield from zip(*(tensor.split(num_rows) for tensor in self.tensors()), strict=True)


def take_step(steps: Iterable[ParameterStep], kernel: str) -> None:
    """Take the steps of parameters of one group: update weights, moments and step counts.

    `kernel` is "foreach", which launches few kernels over all weights, for an accelerator, with
    temporaries as large as the weights; "chunked", which goes over each weight in pieces that stay
    in a core's cache; or "auto", which chooses between them by the device.
    """
    # Steps of one device, dtype and step number can be taken together.
    batches: dict[tuple[torch.device, torch.dtype, int], list[ParameterStep]] = {}
    for step in steps:
        step.begin()
        key = (step.parameter.device, step.exp_avg.dtype, step.step_number)
        batches.setdefault(key, []).append(step)
    for (device, _, _), batch in batches.items():
        with torch.autocast(device.type, enabled=False):
            if kernel == "foreach" or (kernel == "auto" and device.type != "cpu"):
                _update(batch, [step.tensors() for step in batch])
            else:
                for step in batch:
                    for chunk in step.chunks():
                        _update([step], [chunk])
        for step in batch:
            step.end()


def _update(steps: list[ParameterStep], parts: list[MomentRows]) -> None:
    """Update moments and weights in place: θ ← (1 − η λ) θ − η Qᵀ [m̂ / (√v̂ + ε)].

    `parts` has the rows of weight, gradient and moments to update, for each of `steps`. The steps
    are of one group, dtype and step number. A weight in a narrower dtype than its moments is
    rounded once.
    """
    weights, grads, exp_avgs, exp_avg_sqs = (list(tensors) for tensors in zip(*parts, strict=True))
    first = steps[0]
    adam_step(
        weights,
        [step.into(grad) for step, grad in zip(steps, grads, strict=True)],
        exp_avgs,
        exp_avg_sqs,
        [step.back for step in steps],
        lr=first.lr, betas=(first.beta1, first.beta2), eps=first.eps,
        weight_decay=first.weight_decay, count=first.step_number,
    )  # fmt: skip
