"""OrthoAdam: Adam whose moments live in a randomly rotated basis of each weight.

From Attention to Activation, Algorithm 1. For each matrix a fixed random orthogonal Q along its
axis in the residual stream:

    ḡ = Q g,   m̄ ← β₁ m̄ + (1 − β₁) ḡ,   v̄ ← β₂ v̄ + (1 − β₂) ḡ²,
    s̄ = m̂ / (√v̂ + ε),   θ ← (1 − η λ) θ − η Qᵀ s̄

with m̂ = m̄ / (1 − β₁ᵗ), v̂ = v̄ / (1 − β₂ᵗ) and weight decay λ decoupled, in the original basis.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import ParamsT
from torch.utils._pytree import tree_leaves

from wakeful.errors import WakefulError, warn
from wakeful.optim.axes import (
    ASSUMED,
    Axes,
    Line,
    RotationPlan,
    decide_axes,
    list_names,
    plain_name,
)
from wakeful.optim.rates import Rate, check_rates
from wakeful.optim.recipe import RotatedParameter, RotationRecipe
from wakeful.optim.rotations.base import LearnedRotation, Rotation, rotation_of
from wakeful.optim.step import ParameterStep, take_step
from wakeful.parts.orthoadam import moment_dtype

KERNELS = ("auto", "chunked", "foreach")


class OrthoAdam(torch.optim.Optimizer):
    """Adam in a rotated basis, with decoupled weight decay; with `rotation="identity"` AdamW.

    Use it as any torch optimizer of any model: `OrthoAdam(model, lr=1e-3)`, or with
    `model.named_parameters()`, or groups with `module=model`. From names it knows the
    residual stream's axis (see `wakeful.optim.axes`), and a checkpoint is refused where names
    differ; `plan()` tells what was decided. Where it is not known, a warning names the matrices.
    Parameters may be sharded (DTensor, as FSDP2 makes them).

    Args:
        params: a model; or parameters or named parameters, or groups of either, which may set `lr`,
            `betas`, `eps` and `weight_decay`.
        lr: η, at least 0.
        betas: (β₁, β₂), each in [0, 1).
        eps: ε, above 0.
        weight_decay: λ, at least 0; θ shrinks by η λ a step.
        rotation: a rotation, or an expression that names one: "hadamard", "haar",
            "block_diagonal(size=32)" (see `wakeful.optim.rotations`).
        seed: with the parameter's name and axis it makes Q. A checkpoint holds it, not Q. A
            parameter without a name has its number among all the parameters.
        axes: the axes to rotate, where they should not be the default: a mapping from names or
            tensors, or a function of (name, tensor), to 0, 1, a pair, or () for none; None, or
            absence, leaves the default.
        sides: "residual" rotates the residual stream's axis; "both" the other axis of a matrix
            too, where a role or a family says that it does not count tokens or positions.
        module: the model that groups are of: names parameters that have none, and its layers'
            widths tell axes that names do not.
        kernel: how a step is computed (see `wakeful.optim.step`): "chunked", "foreach", or "auto",
            which is "foreach" on an accelerator and "chunked" elsewhere.

    Moments are float32, float64 for float64 parameters. bfloat16 and float16 parameters are
    updated in float32 and rounded once a step. Rotations are products in the moments' dtype at
    torch's float32 matmul precision: TF32, where you allow it, makes Q orthogonal to about 1e-3
    only. Each moment has its parameter's shape; where axis 0 is rotated it is laid out transposed.

    Raises:
        WakefulError: a value is out of range; a parameter is complex, or is not the module's;
            `axes` do not fit; in `step` a gradient is sparse, or rotations find no memory; in
            `load_state_dict` names, seeds or rotations differ. Nothing has changed then.
    """

    def __init__(
        self,
        params: ParamsT | nn.Module,
        lr: Rate = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        rotation: str | Rotation = "hadamard",
        seed: int = 0,
        axes: Axes | None = None,
        sides: str = "residual",
        module: nn.Module | None = None,
        kernel: str = "auto",
    ) -> None:
        """Add the parameters and decide which of their axes are rotated; see the class."""
        if sides not in {"residual", "both"}:
            raise WakefulError(f"sides={sides!r} is not 'residual' or 'both'")
        if kernel not in KERNELS:
            raise WakefulError(f"kernel={kernel!r} is not one of {', '.join(KERNELS)}")
        self._recipe = RotationRecipe(rotation_of(rotation), seed)
        self._axes = axes
        if isinstance(params, nn.Module):
            module, params = params, params.named_parameters()
        self._module = module
        self._both_sides = sides == "both"
        self._kernel = kernel
        self._rotated: dict[Tensor, RotatedParameter] = {}
        # The base class calls `add_param_group` for each group. Axes are decided when all names are
        # known.
        self._constructed = False
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self._decide_axes(self.param_groups)
        self._constructed = True

    def __getstate__(self) -> dict[str, Any]:
        private = ("_recipe", "_both_sides", "_kernel", "_rotated", "_constructed")
        kept = {key: getattr(self, key) for key in private}
        # Axes are decided: the choice, maybe a function, and the model need not be kept.
        return {**super().__getstate__(), **kept, "_axes": None, "_module": None}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters and decide which of their axes are rotated.

        Parameters without names get those in the module that the optimizer was given, if any.

        Raises:
            WakefulError: an option is out of range, a parameter is not real floating point, or its
                axes or names are refused. The optimizer stays as it was.
        """
        if self._module is not None:
            params = _with_names(param_group["params"], self._module)
            param_group = {**param_group, "params": params}
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        names = group.get("param_names")
        try:
            _check_options(group)
            for number, parameter in enumerate(group["params"]):
                name = names[number] if names else f"parameter {len(self._rotated)}"
                _check_dtype(name, parameter)
                self._rotated[parameter] = RotatedParameter(name, tuple(parameter.shape))
            if self._constructed:  # the constructor decides for all its groups at its end
                self._decide_axes([group])
        except WakefulError:
            self.param_groups.pop()
            for parameter in group["params"]:
                self._rotated.pop(parameter, None)
            raise

    def _decide_axes(self, groups: list[dict[str, Any]]) -> None:
        """Decide which axes of these groups' parameters are rotated; warn of matrices whose axis is
        a guess.

        Each group gets an entry "rotations", which describes its rotations in checkpoints.

        Raises:
            WakefulError: two parameters have one name, a choice of axes does not fit, or a rotation
                needs a whole parameter that is sharded.
        """
        parameters = {entry.name: parameter for parameter, entry in self._rotated.items()}
        if len(parameters) < len(self._rotated):
            raise WakefulError("two parameters have the same name, so their rotations would be one")
        new_parameters = [parameter for group in groups for parameter in group["params"]]
        # For all parameters: a family of models is recognized by many names together.
        decisions = decide_axes(parameters, self._axes, both_sides=self._both_sides)
        if self._recipe.rotates:
            for parameter in new_parameters:
                entry = self._rotated[parameter]
                entry.axes, entry.why = decisions[entry.name]
                if entry.axes and self._recipe.learns and isinstance(parameter, DTensor):
                    raise WakefulError(
                        f"{entry.name} is sharded; {self._recipe.rotation} takes whole parameters"
                    )
        entries = [self._rotated[parameter] for parameter in new_parameters]
        assumed = [entry.name for entry in entries if entry.why == ASSUMED]
        if assumed:
            warn(
                "OrthoAdam does not know which axis of these matrices lies in the residual stream, "
                f"and rotates their input axis (1): {list_names(assumed)}. Name them by axes=, or "
                "pass the model itself, named_parameters() or module="
            )
        for group in groups:
            group["rotations"] = [self._recipe.describe(self._rotated[p]) for p in group["params"]]

    def plan(self) -> RotationPlan:
        """Return a plan of which axes of which parameter are rotated, and why, to be printed."""
        return RotationPlan(
            Line(
                rotated.name,
                rotated.shape,
                rotated.axes,
                str(self._recipe.rotation) if rotated.axes else "identity",
                rotated.why or "no rotation",
            )
            for rotated in self._rotated.values()
        )

    def rotations(self) -> Iterator[Rotation]:
        """Yield the rotations made so far, each once: a weight's are made at its first step."""
        unique = {id(r): r for rotated in self._rotated.values() for r in rotated.rotations or ()}
        yield from unique.values()

    def rotation_bytes(self) -> int:
        """Return the bytes of the fixed rotations made so far; tensors that several share count
        once. Learned rotations are left out: they are in the optimizer's state.
        """
        fixed = [
            vars(rotation)
            for rotation in self.rotations()
            if not isinstance(rotation, LearnedRotation)
        ]
        tensors = [leaf for leaf in tree_leaves(fixed) if isinstance(leaf, Tensor)]
        storages = [tensor.untyped_storage() for tensor in tensors]
        bytes_by_address = {storage.data_ptr(): storage.nbytes() for storage in storages}
        return sum(bytes_by_address.values())

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take one step; return the closure's loss, if there is a closure.

        Raises:
            WakefulError: a gradient is sparse, or rotations find no memory; no weight has changed
                then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        active = [
            (group, [parameter for parameter in group["params"] if parameter.grad is not None])
            for group in self.param_groups
        ]
        # All steps are prepared before any is taken: a refused gradient changes no weight.
        steps_of_groups = [
            [self._prepare(parameter, group) for parameter in parameters]
            for group, parameters in active
        ]
        for steps in steps_of_groups:
            take_step(steps, self._kernel)
        return loss

    def _prepare(self, parameter: Tensor, group: dict[str, Any]) -> ParameterStep:
        """Return one parameter's step, not yet taken, after creating its rotations and moments if
        they are missing.

        Rotations are also made anew if the parameter has moved to another device or dtype.

        Raises:
            WakefulError: the gradient is sparse, or rotations find no memory.
        """
        rotated = self._rotated[parameter]
        if cast(Tensor, parameter.grad).layout != torch.strided:
            raise WakefulError(
                f"the gradient of {rotated.name} is sparse; OrthoAdam takes dense gradients "
                "(nn.Embedding(sparse=False))"
            )
        state = self.state[parameter]
        made_for = (parameter.device, moment_dtype(parameter))
        if rotated.rotations is None or rotated.made_for != made_for:
            rotated.rotations = self._recipe.make_all(rotated, parameter)
            rotated.made_for = made_for
            # A learned rotation takes over a loaded state, and the state then holds its tensors.
            for key, tensor in rotated.learned().items():
                if key in state:
                    state[key] = tensor.copy_(state[key])
        if "step" not in state:
            state["step"] = torch.tensor(0.0, device="cpu")
            state["exp_avg"] = rotated.moment(parameter)
            state["exp_avg_sq"] = rotated.moment(parameter)
            state.update(rotated.learned())
        return ParameterStep(parameter, rotated, state, group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Load a state saved by an OrthoAdam with the same names, seed and rotation: its moments,
        and the groups' settings as torch's optimizers do.

        Moments keep their precision even for bfloat16 parameters. Parameters without names are
        matched by order, as in torch's optimizers.

        Raises:
            WakefulError: groups, names, seeds or rotations differ. Nothing has changed.
        """
        saved_groups = state_dict["param_groups"]
        own_groups = [(group["params"], group["rotations"]) for group in self.param_groups]
        saved_sizes = [len(saved_group["params"]) for saved_group in saved_groups]
        if saved_sizes != [len(parameters) for parameters, _ in own_groups]:
            raise WakefulError("the state has other parameter groups than this optimizer")
        states: dict[Tensor, dict[str, Any]] = {}  # the saved ones
        for saved_group, (parameters, rotations) in zip(saved_groups, own_groups, strict=True):
            if "rotations" not in saved_group:
                raise WakefulError("the state is not OrthoAdam's: it names no rotations")
            for key, parameter, saved_rotations, own_rotations in zip(
                saved_group["params"], parameters, saved_group["rotations"], rotations, strict=True
            ):
                rotated = self._rotated[parameter]
                if saved_rotations != own_rotations:  # which name the seed too
                    raise WakefulError(
                        f"the state of {rotated.name} is of another rotation: "
                        f"{_describe_rotations(saved_rotations)} saved, "
                        f"{_describe_rotations(own_rotations)} here"
                    )
                states[parameter] = state_dict["state"].get(key, {})
            self._check_names(saved_group.get("param_names"), parameters)
        super().load_state_dict(state_dict)
        for group, (_, rotations) in zip(self.param_groups, own_groups, strict=True):
            group["rotations"] = rotations
        # torch has cast the tensors to the parameters' dtype: they are taken from `state_dict`.
        for parameter, saved in states.items():
            rotated = self._rotated[parameter]
            if self._recipe.learns:
                rotated.rotations = None  # the next step makes them of the loaded state
            if saved:
                state = self.state[parameter]
                state["step"] = torch.as_tensor(saved["step"], dtype=torch.float32).cpu().clone()
                for key in ("exp_avg", "exp_avg_sq"):
                    state[key] = rotated.moment(parameter, saved[key])
                for key in [key for key in saved if key.startswith("rotation_")]:
                    state[key] = saved[key].clone()

    def _check_names(self, saved_names: list[str] | None, parameters: list[Tensor]) -> None:
        """Raise `WakefulError` if the saved names differ from this optimizer's, where both have
        names.

        Comparing rotations alone would miss a swap of parameters that have no rotation or the same.
        """
        if saved_names is None or "param_names" not in self.param_groups[0]:
            return
        for saved_name, parameter in zip(saved_names, parameters, strict=True):
            name = self._rotated[parameter].name
            if plain_name(saved_name) != plain_name(name):
                raise WakefulError(f"the state has {saved_name} where this optimizer has {name}")


def _with_names(params: Any, module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return (name, parameter) pairs for a group's parameters; those without a name get the one
    that they have in `module`.

    `params` is a parameter, or parameters and pairs.

    Raises:
        WakefulError: a parameter without a name is not in the module.
    """
    names: dict[Tensor, str] = {tensor: name for name, tensor in module.named_parameters()}
    named: list[tuple[str, Tensor]] = []
    for entry in [params] if isinstance(params, Tensor) else params:
        if isinstance(entry, tuple):
            named.append(entry)
        elif entry in names:
            named.append((names[entry], entry))
        else:
            raise WakefulError(
                f"a parameter of shape {tuple(entry.shape)} is not one of the "
                f"{type(module).__name__} that is given as module"
            )
    return named


def _check_dtype(name: str, parameter: Tensor) -> None:
    if parameter.is_complex():
        raise WakefulError(f"{name} is complex; OrthoAdam takes real parameters")
    if not parameter.is_floating_point():
        raise WakefulError(f"{name} is {parameter.dtype}; OrthoAdam takes floating point")


def _check_options(group: Mapping[str, Any]) -> None:
    """Raise `WakefulError` if a rate, a beta or eps of a group is out of its range."""
    check_rates(group)
    beta1, beta2 = group["betas"]
    for key, value, allowed, in_range in (
        ("betas[0]", beta1, "in [0, 1)", 0 <= beta1 < 1),
        ("betas[1]", beta2, "in [0, 1)", 0 <= beta2 < 1),
        ("eps", group["eps"], "above 0", group["eps"] > 0),
    ):
        if not (in_range and math.isfinite(value)):
            raise WakefulError(f"{key}={value} must be {allowed} and finite")


def _describe_rotations(rotations: list[dict[str, Any]]) -> str:
    """Return the description of one parameter's rotations in a checkpoint as text, such as
    "haar(seed=0, …) and haar(…)"; "identity" for none.
    """
    texts = list[str]()
    for rotation in rotations:
        fields = ", ".join(f"{key}={value!r}" for key, value in rotation.items() if key != "kind")
        texts.append(f"{rotation['kind']}({fields})")
    return " and ".join(texts) or "identity"
