"""Where the tensors of a model start that Transformers builds without our `initialize`.

It asks module by module, and only for modules that hold tensors themselves.
"""

from collections.abc import Mapping

from torch import Tensor, nn

from wakeful.depth import DepthMix
from wakeful.model.decoder import Decoder, drawn_alike
from wakeful.model.positions import Rotary
from wakeful.normalizers import Normalizer
from wakeful.norms import Norm
from wakeful.routes.base import ValueRoute
from wakeful.variants import build


def defined_starts(decoder: Decoder, module: nn.Module) -> Mapping[str, Tensor] | None:
    """Return the starts that a module's definition gives its tensors, None where it gives none."""
    if isinstance(module, Rotary):
        cos, sin = module.table()
        return {"cos": cos, "sin": sin}
    for variant in decoder.modules():
        if not isinstance(variant, ValueRoute | DepthMix | Normalizer | Norm):
            continue
        name = next((name for name, part in variant.named_modules() if part is module), None)
        if name is not None:
            fresh = _twin(decoder, variant).get_submodule(name)
            return dict(fresh.named_parameters()) | dict(fresh.named_buffers())
    return None


def _twin(decoder: Decoder, variant: ValueRoute | DepthMix | Normalizer | Norm) -> nn.Module:
    """Return a variant as its definition starts it."""
    shape = decoder.config.shape
    with drawn_alike():
        match variant:
            case ValueRoute():
                twin = build("routes", str(variant))
                twin.attach(shape, range(shape.num_layers))
            case DepthMix():
                twin = build("depth", str(variant))
                twin.attach(shape)
            case Normalizer():
                twin = build("normalizers", str(variant))
                twin.attach(shape)
            case Norm():
                twin = build("norms", str(variant))
                twin.attach(variant.place)
    return twin
