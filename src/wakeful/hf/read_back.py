"""Verification of a written model: load it as its user will, and compare its logits.

Writers call `read_back` while their folder has a temporary name, so that a folder that cannot be
read never gets its final name. Matrices stay in the files while in use (`wakeful.paged`).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from wakeful.data.tokenizer import Tokenizer
from wakeful.device import free_memory
from wakeful.errors import WakefulError, first_line, warn
from wakeful.hf.agreement import InFloat32, change_attributes, exact_rotary_frequencies, last_logits
from wakeful.hf.cache_scales import cache_scheme_of
from wakeful.hf.checkpoint_reader import (
    Shards,
    check_loading,
    load_hf_model,
    required_attention,
    restore_wide_tensors,
    suppress_warnings,
)
from wakeful.hf.transforms import transforms_of
from wakeful.model.evaluating import evaluating
from wakeful.model.finite import check_logits
from wakeful.paged import page_matrices
from wakeful.probes.running import as_decoder

_SAMPLE = "Read back: 12 words,  two spaces;\nand a line."
_TOKENS = (2, 32)
"""Number and length of the sequences that both models read."""
_LONGEST = 256
"""Most tokens of a single sequence that is longer than a sliding window."""
_NEGLIGIBLE = 1e-4
"""The difference of a logit over the largest one, or of all logits over their size (root mean
square), that rounding of activations explains."""
_ROUNDING_FACTOR = 3.0
"""Largest difference, as a multiple of the change by rounding the weights."""
_OTHER_MODEL = 0.5
"""The difference over the size of the logits from which the written model is another one."""
_UNPACKED_BYTES = 4
"""Most bytes in memory of a quantized number that takes at most one byte in its file."""


def read_back(
    folder: Path,
    expected: nn.Module,
    *,
    load: Callable[[Path], nn.Module | None] | None = None,
    tokenizer: Tokenizer | PreTrainedTokenizerBase | None = None,
    rounding: AbstractContextManager[Any] | None = None,
) -> None:
    """Load a written model as its user will, and compare its logits with those of the model that it
    was written from. Warn if they differ by more than rounding explains, or if the model is not
    compared because it does not fit memory.

    Args:
        folder: the written folder, or GGUF file.
        expected: the model that was written.
        load: loads the folder, or returns None where the model does not fit memory; by default
            Transformers, without running code of the folder.
        tokenizer: the tokenizer that was written, if any.
        rounding: a context in which `expected` computes with weights rounded as in the files; by
            default they are rounded to the files' type.

    Raises:
        Unreadable: the folder cannot be loaded or run, its tokenizer gives other tokens, or its
            logits are another model's.
    """
    try:
        with suppress_warnings():
            written = (load or _load_by_transformers)(folder)
            if tokenizer is not None:
                _check_tokenizer(folder, tokenizer)
            if written is None:
                name = "the file" if folder.is_file() else "the folder"
                warn(f"{name} is not read back: unpacked it does not fit memory")
                return
            tokens = _draw_common_tokens(written, expected)
            written_logits = _float32_logits(written, tokens)
            check_logits(written_logits)
    except WakefulError as error:
        raise Unreadable(str(error)) from None
    except Exception as error:  # Transformers raises nothing narrower
        raise Unreadable(f"{type(error).__name__}: {first_line(error)}") from None
    logits = _float32_logits(expected, tokens)
    largest_difference = float((written_logits - logits).abs().max())
    if largest_difference <= _NEGLIGIBLE * float(logits.abs().max()):
        return
    size = float(logits.norm())
    difference = float((written_logits - logits).norm()) / size
    if difference <= _NEGLIGIBLE:
        return
    # How far rounding the weights, as the files do, moves the logits of the model itself.
    rounding = rounding or RoundedParameters(_rounding_of_files(folder))
    rounded_logits = _float32_logits(expected, tokens, rounding)
    rounding_effect = float((rounded_logits - logits).norm()) / size
    if difference <= _ROUNDING_FACTOR * rounding_effect:
        return
    # Not `difference > _OTHER_MODEL`, which is false for NaN. Where rounding alone changes much, a
    # difference does not prove another model.
    if not difference <= _OTHER_MODEL and rounding_effect < _OTHER_MODEL / 10:
        raise Unreadable(
            f"its logits are those of another model: {difference:.0%} of their size apart, and "
            f"rounding explains {rounding_effect:.1%}"
        )
    warn(
        f"read back, its logits differ by {difference:.2%} of their size (root mean "
        f"square); rounding explains {rounding_effect:.2%}"
    )


class RoundedParameters(TorchFunctionMode):
    """Context in which every operation gets its parameters rounded by a function, such as the
    rounding of a file format.
    """

    def __init__(self, round_tensor: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._round_tensor = round_tensor

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a torch function with its arguments of the class `nn.Parameter` rounded. Torch calls
        this for every operation within the context, also for reading an attribute ("__get__"), such
        as a shape: that is read off the parameter itself.
        """
        if getattr(func, "__name__", "") != "__get__":
            args, kwargs = tree_map_only(nn.Parameter, self._round, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _round(self, parameter: Tensor) -> Tensor:
        return self._round_tensor(parameter.detach()).to(parameter.dtype)


class Unreadable(WakefulError):
    """A written model that cannot be read, or is another model."""

    def __init__(self, why: str) -> None:
        super().__init__(f"what was written is removed, as reading it back failed: {why}")


def _load_by_transformers(folder: Path) -> nn.Module | None:
    """Load a folder with Transformers; return None where its unpacked weights do not fit memory.

    Unquantized weights stay in the files, which are mapped into memory.
    """
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    quantized = getattr(config, "quantization_config", None) is not None
    with Shards(folder) as tensors:
        if quantized and _UNPACKED_BYTES * tensors.num_bytes > free_memory(torch.device("cpu")):
            return None
        # Transformers would silently leave out online rotations and the scales of a quantized
        # cache; `load_hf_model` applies them, as vLLM does.
        if transforms_of(config) or cache_scheme_of(config):
            return load_hf_model(folder, dtype="auto")
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto" if quantized else tensors.stored, local_files_only=True,
            trust_remote_code=False, use_safetensors=True,
            attn_implementation=required_attention(config), output_loading_info=True,
        )  # fmt: skip
        model, report = loaded
        # Quantized files have tensors, such as scales, that are not the model's weights.
        check_loading(report, folder, strict=not quantized)
        if quantized:
            return model
        restore_wide_tensors(model, tensors)
        return page_matrices(model, torch.float32)  # a matrix is cast to float32 only while in use


def _check_tokenizer(folder: Path, tokenizer: Tokenizer | PreTrainedTokenizerBase) -> None:
    """Raise `WakefulError` if a folder's tokenizer and `tokenizer` encode a sample differently."""
    if type(tokenizer).__module__.startswith("transformers_modules"):
        return  # to load it, code of the folder would have to run
    expected = tokenizer.encode(_SAMPLE)
    if isinstance(tokenizer, Tokenizer):  # ours encodes without special tokens around the text
        expected = [*tokenizer.opening, *expected, *tokenizer.closing]
    written = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if written.encode(_SAMPLE) != expected:
        raise WakefulError("its tokenizer gives other tokens to a text than the model's own")


def _draw_common_tokens(first: nn.Module, second: nn.Module) -> Int[Tensor, "B L"]:
    """Draw random tokens (B, L) that two models can read: of both vocabularies, within both
    contexts and, if they have a short sliding window, longer than the window.
    """
    models = [first, second]
    num_ids = min(embedding_rows(model) for model in models)
    context = min(_config_limit(model, "max_position_embeddings", "context") for model in models)
    window = min(_config_limit(model, "sliding_window", "window") for model in models)
    batch_size, length = _TOKENS
    length_past_window = window + length // 2
    if length_past_window <= _LONGEST:  # never without a window, which counts as 2³⁰ tokens
        batch_size, length = 1, length_past_window
    generator = torch.Generator().manual_seed(0)
    return torch.randint(num_ids, (batch_size, min(length, context)), generator=generator)


def embedding_rows(model: nn.Module) -> int:
    """Return the number of rows of a model's embedding."""
    decoder = as_decoder(model)
    embedding: Any = model.get_input_embeddings() if decoder is None else decoder.embed  # pyright: ignore
    return len(embedding.weight)


def _config_limit(model: nn.Module, hf_field: str, decoder_field: str) -> int:
    """Return a limit in tokens from a model's configuration: the field `hf_field` of a Transformers
    model or `decoder_field` of our decoder; 2³⁰ where the field is missing, None or 0.
    """
    decoder = as_decoder(model)
    if decoder is None:
        config: Any = model.config
        limit = getattr(config.get_text_config(decoder=True), hf_field, None)
    else:
        limit = getattr(decoder.config, decoder_field, None)
    return limit if isinstance(limit, int) and limit > 0 else 2**30


@torch.no_grad()
def _float32_logits(
    model: nn.Module, tokens: Int[Tensor, "B L"], context: AbstractContextManager[Any] | None = None
) -> Tensor:
    """Return a model's logits after the last tokens (`last_logits`), on the CPU, computed in
    float32 whatever type the weights have. `context` is a further context to compute in.
    """
    weight = next(model.parameters(), None)
    device = tokens.device if weight is None else weight.device
    has_16_bits = any(parameter.element_size() == 2 for parameter in model.parameters())
    in_float32 = InFloat32() if has_16_bits else nullcontext()
    # A 16-bit model has rounded its rotary frequencies. No file holds them, so that a model loaded
    # from one has exact ones.
    exact = change_attributes(exact_rotary_frequencies(model))
    with evaluating(model), exact, in_float32, context or nullcontext():
        return last_logits(model, tokens.to(device)).float().cpu()


def _rounding_of_files(folder: Path) -> Callable[[Tensor], Tensor]:
    """Return the function that rounds a weight to the type of most weights in a folder's files."""
    with Shards(folder) as tensors:
        dtype = tensors.stored
    return lambda weight: weight if dtype is None else weight.to(dtype)
