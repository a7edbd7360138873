"""Where the tensors of a model start that Transformers builds without our `initialise`.

It asks module by module, and only for modules that hold tensors themselves.
"""

import math
import re

from torch import Tensor, nn

from wakeful.config.model import ModelConfig
from wakeful.model.positions import Rotary
from wakeful.variants import build

_RESIDUAL = re.compile(r"\.(o_proj|down_proj)$")
_DEFINED = re.compile(
    r"(?:^|\.)decoder\.(?:blocks\.\d+\.attention\.dot\.)?(route|depth|normalizer)(?:\.(.*))?$"
)


def residual_std(model: ModelConfig, name: str) -> float | None:
    """Return the deviation of a matrix that writes into the residual stream, where it is scaled."""
    if not model.scale_residual_init or _RESIDUAL.search(name) is None:
        return None
    return model.init_std / math.sqrt(2 * model.num_layers)


def defined_starts(model: ModelConfig, name: str, module: nn.Module) -> dict[str, Tensor] | None:
    """Return the starts that a module's definition gives its tensors, None where it gives none."""
    if isinstance(module, Rotary):
        cos, sin = module.table()
        return {"cos": cos, "sin": sin}
    found = _DEFINED.search(name)
    if found is None:
        return None
    match found[1]:
        case "route":
            twin = build("routes", model.route)
            twin.attach(model.shape, range(model.num_layers))
        case "depth":
            twin = build("depth", model.depth)
            twin.attach(model.shape)
        case _:
            twin = build("normalizers", model.normalizer)
            twin.attach(model.shape)
    fresh = twin.get_submodule(found[2] or "")
    return dict(fresh.named_parameters()) | dict(fresh.named_buffers())
