"""Every optimizer by one expression: AdamW, OrthoAdam, Muon, or one of another package."""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from wakeful.errors import WakefulError
from wakeful.optim.muon import MuonAdamW, can_fuse
from wakeful.optim.orthoadam import OrthoAdam
from wakeful.optim.rates import Rate, check_rates
from wakeful.optim.saved import state_to_json
from wakeful.variants import build_call
from wakeful.variants.families import role_outside_layers
from wakeful.variants.roles import role_of

if TYPE_CHECKING:
    from wakeful.config.schema import OptimizerConfig

NamedParameters = Iterable[tuple[str, torch.nn.Parameter]]


def decay_groups(named_parameters: NamedParameters, *, weight_decay: float) -> list[dict[str, Any]]:
    """Divide (name, parameter) pairs into two groups for any torch optimizer: parameters with
    weight decay, then those without.

    Tensors with two or more dimensions decay by `weight_decay`, unless their module declares that
    they do not; others have weight decay 0. An empty group is left out. Frozen parameters stay in:
    without a gradient they never change.

    Raises:
        WakefulError: there is no parameter, or one parameter comes twice.
    """
    decayed: list[tuple[str, torch.nn.Parameter]] = []
    not_decayed: list[tuple[str, torch.nn.Parameter]] = []
    names_by_id: dict[int, str] = {}
    for name, parameter in named_parameters:
        if id(parameter) in names_by_id:
            raise WakefulError(
                f"{names_by_id[id(parameter)]} and {name} are one parameter; pass it once, as "
                "model.named_parameters() does"
            )
        names_by_id[id(parameter)] = name
        # The role that its module declares, or that of an embedding or head known by its name.
        role = role_of(parameter) or role_outside_layers(name)
        decays = parameter.dim() >= 2 and (role is None or role.decays)
        (decayed if decays else not_decayed).append((name, parameter))
    if not names_by_id:
        raise WakefulError("there is no parameter to optimize")
    groups = (
        {"params": decayed, "weight_decay": weight_decay},
        {"params": not_decayed, "weight_decay": 0.0},
    )
    return [group for group in groups if group["params"]]


Groups = list[dict[str, Any]]
Builder = Callable[..., torch.optim.Optimizer]


def build_optimizer(
    optimizer: str | Builder,
    named_parameters: NamedParameters,
    *,
    weight_decay: float = 0.1,
    **options: Any,
) -> torch.optim.Optimizer:
    """Return an optimizer over `decay_groups` of the parameters.

    `optimizer` is a name (adamw, orthoadam, muon), an expression such as "muon(ns_steps=3)" or
    "my_module:MyOptimizer(k=2)", whose module is imported, or a class or function that takes groups
    of named parameters. `options` are further arguments, such as `lr`; the expression must not set
    the same ones. The three named optimizers decouple weight decay from the gradient; others, such
    as torch.optim:SGD, may not.

    Raises:
        WakefulError: the name or an option is unknown, an option is given twice, a value is out of
            range, `decay_groups` refuses the parameters, or what is built is no optimizer.
    """
    build = optimizer_of(optimizer, imports=True)  # its keywords are the expression's arguments
    title = optimizer if isinstance(optimizer, str) else getattr(build.func, "__name__", "it")
    accepted = optimizer_options(build)
    for key in options:
        if key not in accepted:
            raise WakefulError(f"{title} has no option {key!r}; it takes {', '.join(accepted)}")
    for key in build.keywords:
        if key in options or key == "weight_decay":
            raise WakefulError(
                f"{title}: leave {key} out of the expression; it is an argument of its own (in a "
                "configuration, a field of [optimizer] or train.seed)"
            )
    all_options = options | build.keywords
    eps = all_options.get("eps")
    if isinstance(eps, int | float) and not eps > 0:
        raise WakefulError(
            f"{title}: eps must be above 0, got {eps}: without it a gradient that stays zero gives "
            "0 / 0"
        )
    check_rates({"weight_decay": weight_decay, "lr": all_options.get("lr")})
    groups = decay_groups(named_parameters, weight_decay=weight_decay)
    try:
        result = build(groups, **options)
    except WakefulError:
        raise
    except Exception as error:  # of another package, which may raise anything
        raise WakefulError(f"{title}: {error}") from error
    if not isinstance(result, torch.optim.Optimizer):
        raise WakefulError(f"{title} gives a {type(result).__name__}, which is not an optimizer")
    for group in result.param_groups:  # the constructor may have set other rates
        check_rates(group)
    return result


def configure_optimizer(
    config: "OptimizerConfig", named_parameters: NamedParameters, *, seed: int
) -> torch.optim.Optimizer:
    """Return the optimizer that a configuration describes, over named parameters; `seed` makes
    OrthoAdam's rotations.

    A field of the configuration is passed as the optimizer's option of that name, if the option's
    default is of the same form. An option of another form, such as three betas, can only be set in
    the expression `config.name`. Each group gets `lr_scale`, the ratio of its learning rate to
    `config.lr`, by which schedules multiply.
    """
    build = optimizer_of(config.name)  # an error unless the user's module is imported already
    fields = {
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "rotation": config.rotation,
        "seed": seed,
    }
    accepted = inspect.signature(build.func).parameters
    options: dict[str, Any] = {}
    for name, value in fields.items():
        if name in optimizer_options(build):
            default_form = _describe_form(accepted[name].default)
            if default_form in (_describe_form(value), ""):  # "": the default tells nothing
                options[name] = value
    optimizer = build_optimizer(
        config.name, named_parameters, lr=config.lr, weight_decay=config.weight_decay, **options
    )
    for group in optimizer.param_groups:
        if config.lr and "lr" in group:  # Muon has set the ratio itself
            group.setdefault("lr_scale", float(group["lr"]) / config.lr)
    return optimizer


def check_step(config: "OptimizerConfig") -> None:
    """Try an optimizer of another package on small weights: take one step and pack its state.

    Raises:
        WakefulError: the optimizer needs a closure or gradients that training does not give, it
            evaluates other weights than it trains, or its state is of a kind that no checkpoint
            holds.
    """
    if optimizer_of(config.name).func in BUILDERS.values():  # the named ones are known to train
        return
    shapes = {"embed.weight": (16, 8), "blocks.0.mlp.up.weight": (8, 8), "norm.weight": (8,)}
    weights = {name: torch.nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()}
    for weight in weights.values():
        weight.grad = torch.ones_like(weight)
    try:
        with torch.random.fork_rng(devices=[]):
            optimizer = configure_optimizer(config, weights.items(), seed=0)
            if hasattr(optimizer, "train"):  # a schedule-free one: it switches between two weights
                raise WakefulError("it evaluates other weights than it trains")
            optimizer.step()
        state_to_json(optimizer.state_dict(), {})
    except Exception as error:  # of another package, which may raise anything
        raise WakefulError(f"optimizer.name = {config.name!r} cannot train: {error}") from error


def _describe_form(default: object) -> str:
    """Return the form of an option's default value, such as "number" or "(number, number)"; "" if
    there is no default or it is None.
    """
    if isinstance(default, tuple | list):
        return f"({', '.join(map(_describe_form, default))})"
    if default is None or default is inspect.Parameter.empty:
        return ""
    return "number" if isinstance(default, int | float) else type(default).__name__


def set_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group of parameters to `lr` times the group's `lr_scale`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


def optimizer_of(name: str | Builder, *, imports: bool = False) -> "partial[Any]":
    """Return an optimizer's constructor as a `partial`, with the options that the expression sets.

    `name` is the expression, such as "muon(ns_steps=3)", or the constructor itself.

    With `imports` the module of `my_module:MyOptimizer` may be imported: allow it only if the user
    wrote the expression, and not if it comes from a file.
    """
    if not isinstance(name, str):
        return partial(name)
    return build_call("optimizer", BUILDERS, name, folder="optim.rotations", imports=imports)


def optimizer_options(build: "partial[Any]") -> list[str]:
    """Return the options an optimizer takes beside its groups."""
    return list(inspect.signature(build.func).parameters)[1:]


def adamw(
    groups: Groups,
    *,
    lr: Rate = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> torch.optim.Optimizer:
    """Return torch's AdamW, fused where the parameters' devices have the fused step."""
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=can_fuse(groups))


BUILDERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": adamw,
    "orthoadam": OrthoAdam,
    "muon": MuonAdamW,
}
"""By name. The classes of OrthoAdam and Muon are their own builders."""


def warmup_cosine(
    step: int, *, steps: int, warmup_steps: int, initial: float, peak: float, final: float
) -> float:
    """Return the learning rate of step `step`, counted from 0, of a run of `steps` steps.

    The rate rises in a straight line from `initial` to `peak` over `warmup_steps`, then falls by
    half a cosine to `final`, which the last step has.
    """
    if step < warmup_steps:
        return initial + (peak - initial) * step / warmup_steps
    progress = (step - warmup_steps) / max(1, steps - 1 - warmup_steps)
    return final + (peak - final) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
