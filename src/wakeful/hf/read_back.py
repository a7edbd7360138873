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
"""Sequences that both models read, and tokens of each."""
_LONGEST = 256
"""Tokens of one sequence that reaches past a window."""
_EXACT = 1e-4
"""The difference of a logit over the largest one, or of all logits over their size (root mean
square), that rounding of activations explains."""
_ROUNDING = 3.0
"""Largest difference, as a multiple of the change by rounding the weights."""
_ANOTHER = 0.5
"""The difference, over the logits, that makes another model."""
_UNPACKED = 4
"""Bytes that a number may take which is stored in one or less."""


def read_back(
    folder: Path,
    expected: nn.Module,
    *,
    load: Callable[[Path], nn.Module | None] | None = None,
    tokenizer: Tokenizer | PreTrainedTokenizerBase | None = None,
    rounding: AbstractContextManager[Any] | None = None,
) -> None:
    """Load a finished folder as its user will, and compare its logits with the model's that was
    written; warn of what differs by more than rounding.

    Args:
        folder: what was written; a GGUF file is one, too.
        expected: the model it was made of.
        load: what loads it, or returns None where that does not fit memory; by default
            Transformers, which runs no code of the folder.
        tokenizer: the one that was written, where there is one.
        rounding: in it, `expected` gives the logits that rounding alone may have made others; by
            default its weights are rounded to the type of the files.

    Raises:
        WakefulError: it cannot be loaded or run, its tokenizer reads otherwise, or its logits are
            another model's.
    """
    try:
        with suppress_warnings():
            read = (load or _by_transformers)(folder)
            if tokenizer is not None:
                _check_tokenizer(folder, tokenizer)
            if read is None:
                warn(f"{_kind_of_path(folder)} is not read back: unpacked it does not fit memory")
                return
            tokens = _tokens(read, expected)
            read_logits = _logits(read, tokens)
            check_logits(read_logits)
    except WakefulError as error:
        raise Unreadable(str(error)) from None
    except Exception as error:  # Transformers raises nothing narrower
        raise Unreadable(f"{type(error).__name__}: {first_line(error)}") from None
    logits = _logits(expected, tokens)
    largest_difference, largest_logit = (
        float((read_logits - logits).abs().max()),
        float(logits.abs().max()),
    )
    if largest_difference <= _EXACT * largest_logit:
        return
    size = float(logits.norm())
    difference = float((read_logits - logits).norm()) / size
    if difference <= _EXACT:
        return
    rounded_logits = _logits(expected, tokens, rounding or RoundedParameters(_by_types(folder)))
    explained = float((rounded_logits - logits).norm()) / size
    if difference <= _ROUNDING * explained:
        return
    if not difference <= _ANOTHER and explained < _ANOTHER / 10:
        raise Unreadable(
            f"its logits are those of another model: {difference:.0%} of their size apart, and "
            f"rounding explains {explained:.1%}"
        )
    warn(
        f"read back, its logits differ by {difference:.2%} of their size (root mean "
        f"square); rounding explains {explained:.2%}"
    )


class RoundedParameters(TorchFunctionMode):
    """Arithmetic with every parameter rounded as it is used, as a file holds it."""

    def __init__(self, rounded: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._rounded = rounded

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "__name__", "") != "__get__":
            args, kwargs = tree_map_only(nn.Parameter, self._of, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _of(self, parameter: Tensor) -> Tensor:
        return self._rounded(parameter.detach()).to(parameter.dtype)


class Unreadable(WakefulError):
    """A written model that cannot be read, or is another model."""

    def __init__(self, why: str) -> None:
        super().__init__(f"what was written is removed, as reading it back failed: {why}")


def _kind_of_path(path: Path) -> str:
    return "the file" if path.is_file() else "the folder"


def _by_transformers(folder: Path) -> nn.Module | None:
    """Return the model that Transformers loads of a folder, None where it does not fit memory."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    quantized = getattr(config, "quantization_config", None) is not None
    with Shards(folder) as tensors:
        if quantized and _UNPACKED * tensors.num_bytes > free_memory(torch.device("cpu")):
            return None
        # What Transformers would leave out: vLLM reads it, and we do.
        if transforms_of(config) or cache_scheme_of(config):
            return load_hf_model(folder, dtype="auto")
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto" if quantized else tensors.stored, local_files_only=True,
            trust_remote_code=False, use_safetensors=True,
            attn_implementation=required_attention(config), output_loading_info=True,
        )  # fmt: skip
        model, report = loaded
        check_loading(report, folder, strict=not quantized)
        if quantized:
            return model
        restore_wide_tensors(model, tensors)
        return page_matrices(model, torch.float32)


def _check_tokenizer(folder: Path, tokenizer: Tokenizer | PreTrainedTokenizerBase) -> None:
    """Raise `WakefulError` where the folder's tokenizer gives other tokens to a text."""
    if type(tokenizer).__module__.startswith("transformers_modules"):
        return  # its code is beside it, and is not run
    expected = tokenizer.encode(_SAMPLE)
    if isinstance(tokenizer, Tokenizer):
        expected = [*tokenizer.opening, *expected, *tokenizer.closing]
    read = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if read.encode(_SAMPLE) != expected:
        raise WakefulError("its tokenizer gives other tokens to a text than the model's own")


def _tokens(read: nn.Module, expected: nn.Module) -> Int[Tensor, "B L"]:
    """Return random tokens that both models have, reaching past a window that is near."""
    models = [read, expected]
    rows = min(embedding_rows(model) for model in models)
    context = min(_limit(model, "max_position_embeddings", "context") for model in models)
    window = min(_limit(model, "sliding_window", "window") for model in models)
    past = window + _TOKENS[1] // 2
    shape = (1, past) if past <= _LONGEST else _TOKENS
    draw = torch.Generator().manual_seed(0)
    return torch.randint(rows, (shape[0], min(shape[1], context)), generator=draw)


def embedding_rows(model: nn.Module) -> int:
    """Return how many tokens a model has embeddings of."""
    decoder = as_decoder(model)
    embedding: Any = model if decoder is None else decoder.embed
    return len((embedding.get_input_embeddings() if decoder is None else embedding).weight)


def _limit(model: nn.Module, hf_field: str, own_field: str) -> int:
    """Return a number of tokens that a configuration says; a large one where it says none."""
    decoder = as_decoder(model)
    config: Any = model.config if decoder is None else decoder.config
    if decoder is None:
        config = config.get_text_config(decoder=True)
    limit = getattr(config, hf_field if decoder is None else own_field, None)
    return limit if isinstance(limit, int) and limit > 0 else 2**30


@torch.no_grad()
def _logits(
    model: nn.Module, tokens: Int[Tensor, "B L"], around: AbstractContextManager[Any] | None = None
) -> Tensor:
    """Return the last logits of tokens, computed in float32 whatever weights are stored in."""
    first = next(model.parameters(), None)
    device = tokens.device if first is None else first.device
    short = any(parameter.element_size() == 2 for parameter in model.parameters())
    exact = change_attributes(exact_rotary_frequencies(model))  # which no file has
    with evaluating(model), exact, InFloat32() if short else nullcontext(), around or nullcontext():
        return last_logits(model, tokens.to(device)).float().cpu()


def _by_types(folder: Path) -> Callable[[Tensor], Tensor]:
    """Return how weights are rounded in a folder's files: to the type that most of them have."""
    with Shards(folder) as tensors:
        dtype = tensors.stored
    return lambda weight: weight if dtype is None else weight.to(dtype)
