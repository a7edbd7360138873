"""The models that exhibits name and do not train: found before anything is written."""

from transformers import AutoConfig

from wakeful.errors import WakefulError
from wakeful.guard import wrap_errors
from wakeful.hf.checkpoint_reader import UNPACKED, Shards, quantization_method, read_config
from wakeful.hf.gguf_header import read_gguf_header
from wakeful.hub import hub_or_cache
from wakeful.loading.load import Location, locate_model, unknown_model
from wakeful.runs import checkpoint
from wakeful.runs.run import Run
from wakeful_papers.exhibits.plan import Plan

Known = dict[str, Location | WakefulError]
"""Where models lie, or why they cannot be read, by what names them."""


def check_models(plan: Plan, known: Known) -> None:
    """Raise `WakefulError` where a model of a plan cannot be read, or heirs be made of it.

    `known` is added to: the hub is asked once for a model of several plans.
    """
    for given in (*plan.existing.values(), *plan.references.values()):
        if given.source not in known:
            try:
                known[given.source] = found(given.source)
            except WakefulError as error:
                known[given.source] = error
        place = known[given.source]
        if isinstance(place, WakefulError):
            raise place
        if given in plan.references.values() and _is_quantized(place):
            raise WakefulError(
                f"{given.source} is quantized, and heirs have whole weights: name the model it was "
                "made from"
            )


def _is_quantized(place: Location) -> bool:
    """Whether a folder's weights are quantized, other than what is read in full precision."""
    if place.kind != "folder":
        return False
    return quantization_method(read_config(place.path)) not in ("", *UNPACKED)


def found(source: str) -> Location:
    """Return where a model lies; SmolLM2 is unpacked, and of the hub's its configuration fetched.

    Raises:
        WakefulError: no model is there, or some of its files are missing.
    """
    place = locate_model(source)
    if place.kind == "run":
        run = Run.open(place.path)
        run.check_kind("train", "holds no trained model")
        checkpoint.newest_checkpoint(run.checkpoints)
    elif place.kind == "gguf":
        read_gguf_header(place.path)
    elif place.kind in ("folder", "export"):
        read_config(place.path)
        with Shards(place.path):  # they are all there
            pass
    elif place.kind == "hub":
        _check_hub(place.name)
    return place


def _check_hub(name: str) -> None:
    with wrap_errors(unknown_model(name)), hub_or_cache():
        AutoConfig.from_pretrained(name, trust_remote_code=False)
