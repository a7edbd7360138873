"""Weights in: a checkpoint of Transformers, a GGUF file or a run as our `Decoder`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedConfig

from wakeful.config.model import ModelConfig
from wakeful.data.tokenizer import Tokenizer
from wakeful.errors import WakefulError
from wakeful.hf.bounds import read_config
from wakeful.hf.configuration import WakefulConfig
from wakeful.hf.families import FAMILIES, Family
from wakeful.hf.shards import Shards, read_floats
from wakeful.hf.smollm2 import SMOLLM2, smollm2_folder
from wakeful.hf.whole import whole_model
from wakeful.model.decoder import Decoder
from wakeful.model.skeleton import skeleton
from wakeful.runs.restore import restore

_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]


@dataclass(frozen=True, kw_only=True)
class Imported:
    """A checkpoint as our decoder, in evaluation mode and without gradients asked for."""

    name: str
    decoder: Decoder
    path: Path
    """The run directory, the folder or the GGUF file that was read."""

    @property
    def config(self) -> ModelConfig:
        """The decoder's description."""
        return self.decoder.config

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """What turns text into the decoder's tokens; raises WakefulError where there is none."""
        return _tokenizer(self.path)


def read_decoder(
    source: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    max_length: int = 0,
    step: int = 0,
) -> Imported:
    """Return the model that `source` names as our decoder, with the same logits.

    `source` is a folder in Transformers' format (safetensors, in one file or sharded) of a model in
    `FAMILIES`, a run directory, a GGUF file of such a model, "smollm2", or a hub name. `max_length`
    cuts the context to so many tokens; 0 keeps the model's. `step` is the checkpoint of a run; 0 is
    the newest. Dropout is not carried over.

    Raises:
        WakefulError: it cannot be found or read, a tensor is missing, unknown or of another shape,
            or our decoder cannot be it (the field of its configuration is named).
    """
    path, device = Path(source), torch.device(device)
    if (path / "run.json").is_file():
        if max_length:
            raise WakefulError(f"{path} is a run directory: its context is its own, not max_length")
        trained = restore(path, step=step, device=str(device))
        decoder, name = trained.decoder.to(dtype), trained.config.name
    elif step:
        raise WakefulError(f"{source} is no run directory, so it has no checkpoint of step {step}")
    elif path.suffix == ".gguf" and path.is_file():
        name, decoder = path.stem, _from_gguf(path, max_length, dtype, device)
    else:
        path = _folder(str(source))
        name = SMOLLM2 if str(source) == SMOLLM2 else path.resolve().name
        decoder = _from_folder(path, max_length, dtype, device)
    return Imported(name=name, decoder=decoder.eval().requires_grad_(False), path=path)


def is_own(folder: Path) -> bool:
    """Tell whether a folder holds an exported model of our own class."""
    try:
        table = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(table, dict) and table.get("model_type") == WakefulConfig.model_type


def _folder(source: str) -> Path:
    if source == SMOLLM2:
        return smollm2_folder()
    if Path(source).is_dir():
        return Path(source)
    try:
        return Path(huggingface_hub.snapshot_download(source, allow_patterns=_FILES))
    except Exception as error:  # Transformers raises nothing narrower
        raise WakefulError(
            f"{source!r} is no folder, GGUF file or run directory here, and the hub does not give "
            f"it: {_first_line(error)}"
        ) from None


def _from_folder(
    folder: Path, max_length: int, dtype: torch.dtype, device: torch.device
) -> Decoder:
    if not (folder / "config.json").is_file():
        raise WakefulError(f"{folder} is no Transformers folder: it has no config.json")
    config = read_config(folder)
    quantised = getattr(config, "quantization_config", None) or {"quant_method": "gguf"}
    if not isinstance(quantised, dict):
        raise WakefulError(f"{folder / 'config.json'}: quantization_config must be a table")
    if quantised.get("quant_method") != "gguf":  # a mark of where the weights came from
        raise WakefulError(
            "quantised checkpoints cannot be read, and the configuration has "
            f"quantization_config.quant_method = {quantised.get('quant_method')!r}"
        )
    family, description = _described(config, max_length)
    with Shards(folder) as tensors:
        return _filled(description, family, tensors, folder, dtype, device)


def _from_gguf(path: Path, max_length: int, dtype: torch.dtype, device: torch.device) -> Decoder:
    try:
        model = whole_model(path.parent, dtype=dtype, gguf=path.name)
    except WakefulError:
        raise
    except Exception as error:  # Transformers raises nothing narrower
        raise WakefulError(f"{path} cannot be read: {_first_line(error)}") from None
    family, description = _described(model.config, max_length)
    return _filled(description, family, model.state_dict(), path, dtype, device)


def _described(config: PreTrainedConfig, max_length: int) -> tuple[Family, ModelConfig]:
    kind = config.model_type
    if kind not in FAMILIES:
        raise WakefulError(
            f"our decoder cannot be a {kind}: it can be {', '.join(sorted(FAMILIES))}"
        )
    try:
        return FAMILIES[kind], FAMILIES[kind].describe(config, max_length)
    except WakefulError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise WakefulError(
            f"the configuration is not that of a {kind}: {_first_line(error)}"
        ) from None


def _filled(
    description: ModelConfig,
    family: Family,
    tensors: Mapping[str, Tensor],
    place: Path,
    dtype: torch.dtype,
    device: torch.device,
) -> Decoder:
    """Return a decoder that holds the tensors themselves: no weight is made and then replaced."""
    decoder = skeleton(description, len(tensors), place)
    links = {link.theirs: link for link in family.links(description)}
    stored = _stored(family, links.keys(), tensors, tied=description.tied)
    empty = dict(decoder.named_parameters())
    for name, link in links.items():
        tensor = read_floats(tensors, stored[name])
        expected = link.join([empty[ours] for ours in link.ours]).shape
        if tensor.shape != expected:
            raise WakefulError(
                f"the tensor {stored[name]} has shape {tuple(tensor.shape)}, and the configuration "
                f"makes it {tuple(expected)}"
            )
        for ours, part in zip(link.ours, link.split(tensor), strict=True):
            owner, _, key = ours.rpartition(".")
            ready = part.to(device=device, dtype=dtype).contiguous()
            setattr(decoder.get_submodule(owner), key, nn.Parameter(ready, requires_grad=False))
    if description.tied:
        decoder.head.weight = decoder.embed.weight
    missed = [name for name, parameter in decoder.named_parameters() if parameter.is_meta]
    assert not missed, missed
    return decoder.to(device)


def _stored(
    family: Family, wanted: Any, tensors: Mapping[str, Tensor], *, tied: bool
) -> dict[str, str]:
    """Return what each wanted tensor is called where it is stored."""
    stored: dict[str, str] = {}
    for name in tensors:
        known = family.name(name)
        if known in wanted:
            stored[known] = name
        elif not family.ignores(name) and not (tied and known == family.head):
            raise WakefulError(
                f"the checkpoint has a tensor {name}, and the configuration gives it no place"
            )
    missing = [name for name in wanted if name not in stored]
    if missing:
        raise WakefulError(
            f"the checkpoint has no tensor {family.prefix}{missing[0]}, nor {len(missing) - 1} "
            "others that the configuration needs: is a shard missing?"
            if len(missing) > 1
            else f"the checkpoint has no tensor {family.prefix}{missing[0]}, which the "
            "configuration needs"
        )
    return stored


def _tokenizer(path: Path) -> Tokenizer:
    folder, options = (path.parent, {"gguf_file": path.name}) if path.is_file() else (path, {})
    if not options and (path / "tokenizer.json").is_file():
        return Tokenizer.load(path)
    try:
        theirs: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **options)
    except Exception as error:  # Transformers raises nothing narrower
        raise WakefulError(f"{path} has no tokenizer: {_first_line(error)}") from None
    inner = getattr(theirs, "backend_tokenizer", None)
    if inner is None or theirs.eos_token is None:
        raise WakefulError(
            f"the tokenizer of {path} is a {type(theirs).__name__} without a tokenizer.json or "
            "without an end-of-text token"
        )
    return Tokenizer(inner, end_of_text=theirs.eos_token)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0] or type(error).__name__
