"""The step of OrthoAdam's equations: over chunks, over lists of weights, or compiled.

Shapes: R rows and n columns of a weight turned so that its rotated axis comes last.
"""

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor

from wakeful.optim.recipe import Plan
from wakeful.optim.rotations import Learned
from wakeful.optim.sharding import layout_for, local_part, write_back

CHUNK = 2**18  # elements a chunk: with its temporaries it stays in a core's cache


class Job:
    """One parameter's part of a step: views with the rotated axis last, and the step's numbers."""

    def __init__(
        self, parameter: Tensor, plan: Plan, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        self.parameter = parameter
        self.rotations = plan.rotations or ()
        self.state = state
        self.turned = bool(plan.axes) and plan.axes[0] == 0
        self.layout = layout_for(parameter, plan.axes)
        self.exp_avg = self._view(state["exp_avg"])
        self.exp_avg_sq = self._view(state["exp_avg_sq"])
        self.grad = self._view(cast(Tensor, parameter.grad))
        self.weight = self._view(parameter)
        self.beta1, self.beta2 = group["betas"]
        self.eps = float(group["eps"])
        self.lr = float(group["lr"])
        self.decay = 1 - self.lr * group["weight_decay"]

    def _view(self, tensor: Tensor) -> Tensor:
        tensor = local_part(tensor, self.layout)
        # a scalar becomes one element: torch 2.13's CPU compiler errs on float64 scalars
        return tensor.mT if self.turned else tensor.view(1) if tensor.dim() == 0 else tensor

    def begin(self) -> None:
        """Counts the step, and lets a learnt basis see the gradient."""
        self.state["step"] += 1
        count = self.state["step"].item()
        self.correction1 = 1 - self.beta1**count
        self.correction2 = 1 - self.beta2**count
        for side, rotation in enumerate(self.rotations):
            if isinstance(rotation, Learned):
                grad = self.grad.to(self.exp_avg.dtype)
                change = rotation.learn(grad.mT if side == 1 else grad)
                if change is not None:
                    moment = self.exp_avg.mT if side == 1 else self.exp_avg
                    moment.copy_(moment @ change)

    def end(self) -> None:
        """Writes a resharded weight back where it came from."""
        part = self.weight.mT if self.turned else self.weight
        write_back(self.parameter, part, self.layout)

    def into(self, grad: Tensor) -> Tensor:
        """ḡ of rows of the gradient: contiguous, in the moments' dtype."""
        grad = grad.to(self.exp_avg.dtype).contiguous()
        if self.rotations:
            grad = self.rotations[0].into(grad)
        if len(self.rotations) == 2:
            grad = self.rotations[1].into(grad.mT.contiguous()).mT.contiguous()
        return grad

    def back(self, step: Tensor) -> Tensor:
        """The rows' step in the parameter's basis."""
        if len(self.rotations) == 2:
            step = self.rotations[1].back(step.mT.contiguous()).mT.contiguous()
        return self.rotations[0].back(step) if self.rotations else step

    def chunks(self) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Rows of weight, gradient and moments, few enough to stay in cache."""
        tensors = (self.weight, self.grad, self.exp_avg, self.exp_avg_sq)
        whole = len(self.rotations) == 2 or self.weight.device.type != "cpu"
        if whole or self.weight.numel() <= CHUNK:
            yield tensors
            return
        rows = max(1, CHUNK * self.weight.shape[0] // self.weight.numel())
        yield from zip(*(tensor.split(rows) for tensor in tensors), strict=True)


Direction = Callable[[Tensor, Tensor, Tensor, Job], Tensor]


def adam_direction(grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, job: Job) -> Tensor:
    """Moves the moments by ḡ, and m̄ / (√v̂ + ε), without m̄'s bias correction."""
    exp_avg.lerp_(grad, 1 - job.beta1)
    exp_avg_sq.mul_(job.beta2).addcmul_(grad, grad, value=1 - job.beta2)
    denominator = exp_avg_sq.sqrt().mul_(job.correction2**-0.5).add_(job.eps)
    return torch.div(exp_avg, denominator, out=denominator)


def compiled_direction(grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, job: Job) -> Tensor:
    """``adam_direction`` in one compiled pass; its numbers are tensors, so none is compiled in."""
    numbers = (1 - job.beta1, job.beta2, 1 - job.beta2, job.correction2**-0.5, job.eps)
    return _compiled()(
        grad, exp_avg, exp_avg_sq, torch.tensor(numbers, dtype=grad.dtype, device=grad.device)
    )


_compiled_functions: list[Callable[..., Tensor]] = []


def _compiled() -> Callable[..., Tensor]:
    """The compiled update, made at its first use."""
    if not _compiled_functions:
        _compiled_functions.append(torch.compile(_fused_update, dynamic=True))
    return _compiled_functions[0]


def _fused_update(grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, numbers: Tensor) -> Tensor:
    less_beta1, beta2, less_beta2, scale, eps = numbers.unbind()
    exp_avg.add_((grad - exp_avg) * less_beta1)
    exp_avg_sq.mul_(beta2).add_(grad * grad * less_beta2)
    return exp_avg / (exp_avg_sq.sqrt() * scale + eps)


def step_chunked(job: Job, direction: Direction) -> None:
    for weight, grad, exp_avg, exp_avg_sq in job.chunks():
        step = job.back(direction(job.into(grad), exp_avg, exp_avg_sq, job))
        _move(weight, step, job)


def _move(weight: Tensor, step: Tensor, job: Job) -> None:
    """θ ← (1 − η λ) θ − η s, rounded once where the weight is narrower than the step."""
    size = -job.lr / job.correction1
    if weight.dtype == step.dtype:
        if job.decay != 1:
            weight.mul_(job.decay)
        weight.add_(step, alpha=size)
    else:
        weight.copy_(weight.to(step.dtype).mul_(job.decay).add_(step, alpha=size))


def step_foreach(jobs: list[Job]) -> None:
    """The same step for all weights of a group at once: few kernels, temporaries of their size."""
    first = jobs[0]
    grads = [job.into(job.grad) for job in jobs]
    exp_avgs = [job.exp_avg for job in jobs]
    exp_avg_sqs = [job.exp_avg_sq for job in jobs]
    torch._foreach_lerp_(exp_avgs, grads, 1 - first.beta1)
    torch._foreach_mul_(exp_avg_sqs, first.beta2)
    torch._foreach_addcmul_(exp_avg_sqs, grads, grads, 1 - first.beta2)
    del grads
    steps = torch._foreach_sqrt(exp_avg_sqs)
    torch._foreach_mul_(steps, [job.correction2**-0.5 for job in jobs])
    torch._foreach_add_(steps, first.eps)
    torch._foreach_reciprocal_(steps)
    torch._foreach_mul_(steps, exp_avgs)
    moves = [job.back(step) for job, step in zip(jobs, steps, strict=True)]
    same = [i for i, job in enumerate(jobs) if job.weight.dtype == moves[i].dtype]
    if same:
        weights = [jobs[i].weight for i in same]
        if first.decay != 1:
            torch._foreach_mul_(weights, first.decay)
        scaled = [moves[i] for i in same]
        torch._foreach_mul_(scaled, [-jobs[i].lr / jobs[i].correction1 for i in same])
        torch._foreach_add_(weights, scaled)
    for i in set(range(len(jobs))) - set(same):
        _move(jobs[i].weight, moves[i], jobs[i])
