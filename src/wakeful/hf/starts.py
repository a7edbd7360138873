"""Where the tensors of a model start that Transformers builds without our `initialise`.

It asks module by module, and only for modules that hold tensors themselves.
"""

import math
import re

from torch import Tensor, nn

from wakeful.config.model import ModelConfig
from wakeful.depth.base import DepthMix
from wakeful.model.positions import Rotary
from wakeful.normalizers.base import Normalizer
from wakeful.norms.base import Norm
from wakeful.routes.base import ValueRoute
from wakeful.variants import build

_RESIDUAL = re.compile(r"\.(o_proj|down_proj)$")


def residual_std(model: ModelConfig, name: str) -> float | None:
    """Return the deviation of a matrix that writes into the residual stream, where it is scaled."""
    if not model.scale_residual_init or _RESIDUAL.search(name) is None:
        return None
    return model.init_std / math.sqrt(2 * model.num_layers)


def defined_starts(
    model: ModelConfig, root: nn.Module, name: str, module: nn.Module
) -> dict[str, Tensor] | None:
    """Return the starts that a definition gives a module's own tensors, None where it gives none.

    `module` is `name` in `root`: a variant, or a part of one.
    """
    if isinstance(module, Rotary):
        cos, sin = module.table()
        return {"cos": cos, "sin": sin}
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        owner = root.get_submodule(".".join(parts[:length]))
        twin = _twin(model, owner)
        if twin is not None:
            fresh = twin.get_submodule(".".join(parts[length:]))
            return dict(fresh.named_parameters()) | dict(fresh.named_buffers())
    return None


def _twin(model: ModelConfig, module: nn.Module) -> nn.Module | None:
    """Return a variant as its definition starts it, None for what is not one."""
    match module:
        case ValueRoute():
            twin = build("routes", str(module))
            twin.attach(model.shape, range(model.num_layers))
        case DepthMix():
            twin = build("depth", str(module))
            twin.attach(model.shape)
        case Normalizer():
            twin = build("normalizers", str(module))
            twin.attach(model.shape)
        case Norm():
            twin = build("norms", str(module))
            twin.attach(module.place)
        case _:
            return None
    return twin
