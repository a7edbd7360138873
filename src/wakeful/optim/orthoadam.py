"""OrthoAdam: Adam whose moments live in a randomly rotated basis of each weight.

From Attention to Activation, Algorithm 1, as METHODS section 3 settles it. For each weight a fixed
random orthogonal Q along its residual-width axis:

    ḡ = Q g,   m̄ ← β₁ m̄ + (1 − β₁) ḡ,   v̄ ← β₂ v̄ + (1 − β₂) ḡ²,
    s̄ = m̂ / (√v̂ + ε),   θ ← (1 − η λ) θ − η Qᵀ s̄

with m̂ = m̄ / (1 − β₁ᵗ), v̂ = v̄ / (1 − β₂ᵗ) and weight decay λ decoupled, in the original basis.

Shapes: R rows and n columns of a weight turned so that its rotated axis comes last.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import ParamsT

from wakeful.errors import WakefulError
from wakeful.optim.kernels import (
    Job,
    adam_direction,
    compiled_direction,
    step_chunked,
    step_foreach,
)
from wakeful.optim.recipe import Plan, Recipe, learned_tensors, moment_dtype, new_moment
from wakeful.optim.rotations import Rotation
from wakeful.optim.sharding import (
    fill,
    is_sharded,
    whole,
)
from wakeful.optim.sides import TABLES, Rule, choose_table, find_sides

KERNELS = ("auto", "chunked", "foreach", "compiled")


class OrthoAdam(torch.optim.Optimizer):
    """Adam in a rotated basis, with decoupled weight decay; with ``rotation="identity"`` AdamW.

    Use it as any torch optimiser. Rotations are made from parameter names, so pass
    ``model.named_parameters()``, or groups ``{"params": [(name, parameter), ...], ...}`` as
    ``decay_groups`` makes them. With the Hugging Face Trainer build it first and hand it over:
    ``Trainer(model=model, optimizers=(OrthoAdam(model.named_parameters(), lr=1e-3), None), ...)``;
    the Trainer's own ``optim=`` passes no names. Parameters may be sharded (DTensor, as FSDP2
    makes them); see ``wakeful.optim.sharding``.

    Args:
        params: parameters, named unless the rotation is the identity; groups may set ``lr``,
            ``betas``, ``eps`` and ``weight_decay``.
        lr: η, at least 0.
        betas: (β₁, β₂), each in [0, 1).
        eps: ε, above 0.
        weight_decay: λ, at least 0; θ shrinks by η λ a step.
        rotation: the name of a file in ``wakeful.optim.rotations``, or a ``Rotation`` class.
        rotation_options: that rotation's own options, such as ``{"block": 32}``.
        seed: with the parameter's name and axis it makes Q. A checkpoint holds it, not Q.
        rules: which axis of which matrix is rotated: "auto" takes the table in ``wakeful.optim.
            sides`` that fits the names; else a table's name or a sequence of ``Rule``.
        sides: "residual" rotates the residual-width axis; "both" the other axis of a matrix too,
            vocabularies and positions excepted.
        share: one Q for all weights of a width, for memory; by default each weight has its own.
        kernel: how a step is computed. "chunked" goes over each weight in pieces that stay in
            cache; "foreach" takes all weights of a group at once, with temporaries as large as
            they; "compiled" is "chunked" with the elementwise part through ``torch.compile``;
            "auto" is "foreach" on an accelerator and "chunked" elsewhere.

    Moments are float32, float64 for float64 parameters. bfloat16 and float16 parameters are
    updated in float32 and rounded once a step. Rotations are products in the moments' dtype at
    torch's float32 matmul precision: TF32, where you allow it, makes Q orthogonal to about 1e-3
    only. Each moment has its parameter's shape; where axis 0
    is rotated its memory is laid out transposed.

    Raises a WakefulError, nothing changed, for: values out of range; complex parameters; missing
    names; rules that do not fit (see ``find_sides``); rotations too large for memory; in ``step``
    a sparse, NaN or infinite gradient, the parameter named; in ``load_state_dict`` other names,
    shapes, seeds or rotations than this optimiser's.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        rotation: str | type[Rotation] = "hadamard",
        rotation_options: Mapping[str, int | float] | None = None,
        seed: int = 0,
        rules: str | Iterable[Rule] = "auto",
        sides: str = "residual",
        share: bool = False,
        kernel: str = "auto",
    ) -> None:
        if sides not in {"residual", "both"}:
            raise WakefulError(f"sides={sides!r} is not 'residual' or 'both'")
        if kernel not in KERNELS:
            raise WakefulError(f"kernel={kernel!r} is not one of {', '.join(KERNELS)}")
        self._recipe = Recipe.of(rotation, dict(rotation_options or {}), seed, share)
        self._rules = _known_rules(rules)
        self._both = sides == "both"
        self._kernel = kernel
        self._plans: dict[Tensor, Plan] = {}
        self._open = False
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        if self._recipe.rotates and self._rules == "auto":
            self._rules = choose_table(
                {plan.name: plan.shape for plan in self._plans.values() if plan.name}
            )
        self._decide(self.param_groups, all_rules_match=True)
        self._open = True

    def __getstate__(self) -> dict[str, Any]:
        private = ("_recipe", "_rules", "_both", "_kernel", "_plans", "_open")
        return {**super().__getstate__(), **{key: getattr(self, key) for key in private}}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; a WakefulError, and no group added, where it does not fit."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_options(group)
            names = group.get("param_names")
            if names is None and self._recipe.rotates:
                raise WakefulError(
                    f"rotation={self._recipe.kind!r} needs parameter names: pass "
                    "model.named_parameters(), or groups of (name, parameter) pairs"
                )
            for number, parameter in enumerate(group["params"]):
                self._plans[parameter] = _plan(parameter, names[number] if names else None, number)
            if self._open:
                self._decide([group], all_rules_match=False)
        except WakefulError:
            self.param_groups.pop()
            for parameter in group["params"]:
                self._plans.pop(parameter, None)
            raise

    def _decide(self, groups: list[dict[str, Any]], *, all_rules_match: bool) -> None:
        """Decides the rotated axes of these groups' parameters and records them in the groups."""
        plans = [self._plans[parameter] for group in groups for parameter in group["params"]]
        if self._recipe.rotates:
            shapes = {cast(str, plan.name): plan.shape for plan in plans}
            if len(shapes) != len(plans):
                raise WakefulError("two parameters have the same name, so they have no rotations")
            rules = cast(tuple[Rule, ...], self._rules)
            axes = find_sides(shapes, rules, both=self._both, all_rules_match=all_rules_match)
            self._recipe.check_memory(
                (parameter, axes[cast(str, self._plans[parameter].name)])
                for group in groups
                for parameter in group["params"]
            )
            for plan in plans:
                plan.axes = axes[cast(str, plan.name)]
            if self._recipe.cls.learns:
                for plan in plans:
                    if plan.sharded and plan.axes:
                        raise WakefulError(
                            f"{plan.title} is sharded; {self._recipe.kind} takes whole parameters"
                        )
        for group in groups:
            group["rotations"] = [
                self._recipe.describe(self._plans[parameter]) for parameter in group["params"]
            ]

    def rotations(self) -> Iterator[Rotation]:
        """The rotations made so far, each once: a weight's is made at its first step."""
        made = {id(r): r for plan in self._plans.values() for r in plan.rotations or ()}
        yield from made.values()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step; returns the closure's loss, if there is a closure.

        Refused with a WakefulError, and no parameter or moment changed, where a gradient is sparse,
        NaN or infinite.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        active = [
            (group, [parameter for parameter in group["params"] if parameter.grad is not None])
            for group in self.param_groups
        ]
        self._refuse_bad_gradients([parameter for _, group in active for parameter in group])
        jobs = [[self._prepare(p, group) for p in parameters] for group, parameters in active]
        for group_jobs in jobs:
            for job in group_jobs:
                job.begin()
            alike: dict[tuple[torch.device, torch.dtype], list[Job]] = {}
            for job in group_jobs:
                alike.setdefault((job.parameter.device, job.exp_avg.dtype), []).append(job)
            for (device, _), some in alike.items():
                kernel = self._kernel
                if kernel == "auto":
                    kernel = "chunked" if device.type == "cpu" else "foreach"
                with torch.autocast(device.type, enabled=False):
                    if kernel == "foreach":
                        step_foreach(some)
                    else:
                        direction = compiled_direction if kernel == "compiled" else adam_direction
                        for job in some:
                            step_chunked(job, direction)
                for job in some:
                    job.end()
        return loss

    def _refuse_bad_gradients(self, parameters: list[Tensor]) -> None:
        """One norm a gradient; only one whose norm is not finite is read again: it may overflow."""
        dense: dict[Any, list[Tensor]] = {}
        for parameter in parameters:
            grad = cast(Tensor, parameter.grad)
            if grad.layout != torch.strided:
                raise WakefulError(
                    f"the gradient of {self._plans[parameter].title} is sparse; OrthoAdam takes "
                    "dense gradients (nn.Embedding(sparse=False))"
                )
            mesh = (grad.device_mesh, grad.placements) if isinstance(grad, DTensor) else None
            dense.setdefault((grad.device, grad.dtype, mesh), []).append(parameter)
        for some in dense.values():
            norms = torch.stack(torch._foreach_norm([cast(Tensor, p.grad) for p in some]))
            norms = whole(norms)
            if norms.isfinite().all():
                continue
            for parameter, norm in zip(some, norms.tolist(), strict=True):
                if math.isfinite(norm):
                    continue
                grad = whole(cast(Tensor, parameter.grad))
                if not grad.isfinite().all():
                    what = "NaN" if grad.isnan().any() else "an infinite value"
                    raise WakefulError(
                        f"the gradient of {self._plans[parameter].title} holds {what}; the step "
                        "was refused and nothing changed"
                    )

    def _prepare(self, parameter: Tensor, group: dict[str, Any]) -> "Job":
        """Makes what the step of one parameter needs and has not: its rotations and its state."""
        plan = self._plans[parameter]
        dtype = moment_dtype(parameter)
        if plan.rotations is None or plan.made_for != (parameter.device, dtype):
            plan.rotations = tuple(
                self._recipe.build(plan, axis, parameter.device, dtype, self._plans.values())
                for axis in plan.axes
            )
            plan.made_for = (parameter.device, dtype)
            self._adopt(parameter)
        state = self.state[parameter]
        if "step" not in state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = new_moment(parameter, plan)
            state["exp_avg_sq"] = new_moment(parameter, plan)
            for key, tensor in learned_tensors(plan):
                state[key] = tensor
        return Job(parameter, plan, state, group)

    def _adopt(self, parameter: Tensor) -> None:
        """Puts learnt rotations, new from their constructors, where the saved state says."""
        state = self.state.get(parameter, {})
        for key, tensor in learned_tensors(self._plans[parameter]):
            if key in state:
                tensor.copy_(state[key])
                state[key] = tensor

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Loads moments saved by an OrthoAdam with the same names, shapes, seed and rotation.

        Raises a WakefulError, nothing changed, where any of them differs. Moments keep their
        precision even where the parameters are bfloat16.
        """
        saved_groups = state_dict["param_groups"]
        if [len(g["params"]) for g in saved_groups] != [
            len(g["params"]) for g in self.param_groups
        ]:
            raise WakefulError("the state has other parameter groups than this optimiser")
        saved_states: dict[Tensor, dict[str, Any]] = {}
        for saved, group in zip(saved_groups, self.param_groups, strict=True):
            if "rotations" not in saved:
                raise WakefulError("the state is not OrthoAdam's: it names no rotations")
            for key, parameter, theirs, ours in zip(
                saved["params"],
                group["params"],
                saved["rotations"],
                group["rotations"],
                strict=True,
            ):
                title = self._plans[parameter].title
                if theirs != ours:
                    raise WakefulError(
                        f"the state of {title} is of another rotation: {_written(theirs)} saved, "
                        f"{_written(ours)} here"
                    )
                state = state_dict["state"].get(key, {})
                self._check_state(state, parameter, title)
                saved_states[parameter] = state
        super().load_state_dict(state_dict)
        for parameter, saved in saved_states.items():
            plan = self._plans[parameter]
            plan.rotations = plan.rotations if not self._recipe.cls.learns else None
            if not saved:
                continue
            state = self.state[parameter]
            state["step"] = torch.as_tensor(saved["step"], dtype=torch.float32).cpu().clone()
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = fill(new_moment(parameter, plan), saved[key])
            for key in [key for key in saved if key.startswith("rotation_")]:
                state[key] = saved[key].clone()

    def _check_state(self, state: Mapping[str, Any], parameter: Tensor, title: str) -> None:
        if not state:
            return
        for key in ("step", "exp_avg", "exp_avg_sq"):
            if key not in state:
                raise WakefulError(f"the state of {title} holds no {key}")
        for key in ("exp_avg", "exp_avg_sq"):
            if state[key].shape != parameter.shape:
                raise WakefulError(
                    f"the state of {title} has shape {tuple(state[key].shape)}, the parameter "
                    f"{tuple(parameter.shape)}"
                )
        for axis in self._plans[parameter].axes if self._recipe.cls.learns else ():
            width = parameter.shape[axis]
            for key in ("basis", "covariance"):
                found = state.get(f"rotation_{axis}_{key}")
                if found is None or found.shape != (width, width):
                    raise WakefulError(f"the state of {title} holds no {key} of width {width}")


def _known_rules(rules: str | Iterable[Rule]) -> Literal["auto"] | tuple[Rule, ...]:
    if not isinstance(rules, str):
        return tuple(rules)
    if rules == "auto":
        return "auto"
    if rules not in TABLES:
        raise WakefulError(
            f"rules={rules!r} is not auto, {', '.join(TABLES)} or a sequence of Rule"
        )
    return TABLES[rules]


def _plan(parameter: Tensor, name: str | None, number: int) -> Plan:
    title = name or f"parameter {number} of its group"
    if parameter.is_complex():
        raise WakefulError(f"{title} is complex; OrthoAdam takes real parameters")
    if not parameter.is_floating_point():
        raise WakefulError(f"{title} is {parameter.dtype}; OrthoAdam takes floating point")
    return Plan(name, title, tuple(parameter.shape), is_sharded(parameter))


def _check_options(group: Mapping[str, Any]) -> None:
    beta1, beta2 = group["betas"]
    for key, value, allowed, good in (
        ("lr", group["lr"], "at least 0", group["lr"] >= 0),
        ("betas[0]", beta1, "in [0, 1)", 0 <= beta1 < 1),
        ("betas[1]", beta2, "in [0, 1)", 0 <= beta2 < 1),
        ("eps", group["eps"], "above 0", group["eps"] > 0),
        ("weight_decay", group["weight_decay"], "at least 0", group["weight_decay"] >= 0),
    ):
        if not (good and math.isfinite(value)):
            raise WakefulError(f"{key}={value} must be {allowed} and finite")


def _written(rotations: list[dict[str, Any]]) -> str:
    written = (
        f"{r['kind']}({', '.join(f'{k}={v!r}' for k, v in r.items() if k != 'kind')})"
        for r in rotations
    )
    return " and ".join(written) or "identity"
