"""`passthrough`: the layers of an heir as a recipe for mergekit, which writes a model of them.

mergekit copies blocks and knows no bridge: what its recipe gives is the heir before one.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from wakeful.config.model import ModelConfig
from wakeful.errors import WakefulError
from wakeful.heirs.layers import neighbors
from wakeful.hf.configuration import WakefulConfig
from wakeful.hf.weights_out import describe
from wakeful.loading.load import place_of

FILE = "mergekit.yaml"
_OWN_CLASS = (
    "is of no stock architecture, so Transformers reads it by our own class, which mergekit does "
    "not know: leave out --recipe"
)
_KINDS = {"run": "run directory", "quantized": "quantized model", "gguf": "GGUF file"}


def passthrough(model: str, layers: Sequence[int], *, bridged: bool = False) -> str:
    """Return a passthrough recipe (YAML) of the layers of a model that mergekit can read.

    A slice is a run of neighbors, from its first layer to the one after its last.
    """
    note = "# The heir's blocks alone: its bridges lie in its weights.\n" if bridged else ""
    name = json.dumps(model)  # a YAML string too, whatever the name
    slices = "".join(
        f"  - sources:\n      - model: {name}\n        layer_range: [{run.start}, {run.stop}]\n"
        for run in neighbors(layers)
    )
    return f"{note}slices:\n{slices}merge_method: passthrough\ndtype: float32\n"


def merged_from(source: str) -> str:
    """Return mergekit's name of a model: a folder's path or a hub's name.

    Raises:
        WakefulError: it can read no such model.
    """
    place = place_of(source)
    if place.kind == "folder":
        return str(Path(place.path).resolve())
    if place.kind == "hub":
        return source
    if place.kind == "export":
        raise WakefulError(f"{source} {_OWN_CLASS}")
    raise WakefulError(
        f"--recipe is for a Transformers folder or a hub name, which mergekit reads, and {source} "
        f"is a {_KINDS[place.kind]}: inherit from an export of it (wakeful export)"
    )


def check_mergeable(config: ModelConfig) -> None:
    """Raise `WakefulError` where the export of such a decoder is none that mergekit can read."""
    if describe(config)[0] == WakefulConfig.model_type:
        raise WakefulError(f"the reference {_OWN_CLASS}")
