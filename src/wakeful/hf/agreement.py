"""Comparison of our decoder with the Transformers model that it was converted from.

A converted decoder is only as correct as our reading of the configuration and the tensors' names.
So both models compute the logits of the same tokens first, and a decoder whose logits differ is
refused.
"""

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from wakeful.errors import WakefulError, first_line
from wakeful.model.decoder import Decoder
from wakeful.model.evaluating import evaluating
from wakeful.model.finite import check_logits
from wakeful.model.positions import Rotary
from wakeful.probes.huggingface import decoder_blocks

_SIXTEEN_BIT = (torch.float16, torch.bfloat16)
_TOKENS = (2, 32)
"""Number and length of the sequences that both models read."""
_PAST_WINDOW = 16
"""Tokens by which a sequence exceeds the sliding window."""
_MOST_TOKENS = 256
"""Most tokens to read past a window, counted as if every layer read them."""
_Change = tuple[Any, str, Any]
"""An object, the name of one of its attributes, and a new value for it."""
_ROUNDING = 1e-4
"""The largest difference of a logit, over the largest logit, that rounding in float32 explains."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Differences between the logits of our decoder and of the Transformers model, in float32."""

    architecture: str
    """The class of the Transformers model."""
    tokens: int
    """Tokens that both models read; 0 where Transformers cannot run the model."""
    largest: float
    """Largest difference of a logit."""
    relative: float
    """Root mean square of the differences, divided by that of the logits."""
    note: str = ""
    """Parts that were not compared, or not fully."""

    def __str__(self) -> str:
        if not self.tokens:
            return f"not compared with {self.architecture}: {self.note}"
        return (
            f"logits at most {self.largest:.1e} from those of Transformers' {self.architecture} "
            f"({self.tokens} tokens, float32{self.note})"
        )


@torch.no_grad()
def compare_logits(hf_model: PreTrainedModel, decoder: Decoder) -> Agreement:
    """Compare the logits of our decoder with those of the Transformers model, and leave both as
    they are; return the differences, or no figures if Transformers cannot run its model.

    Both models read random tokens: two sequences of 32 or, if layers have a sliding window, one
    sequence longer than the window. If this would cost too much, all layers read two of 32, and
    only the layers up to the first one with the window, if any, read the longer one.

    Raises:
        WakefulError: the logits differ by more than rounding, or are not finite.
    """
    class_name = type(hf_model).__name__
    tokens, longer_tokens, num_layers, note = _draw_tokens(hf_model, decoder)
    rotary_changes = exact_rotary_frequencies(hf_model)
    if rotary_changes:
        note += "; rotary frequencies as from_pretrained has them, before a cast rounded them"
    pairs: list[tuple[Tensor, Tensor]] = []
    has_16_bits = any(tensor.dtype in _SIXTEEN_BIT for tensor in hf_model.state_dict().values())
    in_float32 = InFloat32() if has_16_bits else nullcontext()
    with evaluating(hf_model), change_attributes(rotary_changes), in_float32:
        try:
            expected = last_logits(hf_model, tokens)
        except Exception as error:  # whatever the class raises
            why = f"Transformers cannot run it here: {first_line(error)}"
            return Agreement(architecture=class_name, tokens=0, largest=math.nan,
                             relative=math.nan, note=why)  # fmt: skip
        check_logits(expected)
        pairs.append((expected, last_logits(decoder, tokens)))
        if longer_tokens is not None:
            with change_attributes(_cut_layers(hf_model, decoder, num_layers)):
                expected = last_logits(hf_model, longer_tokens)
                pairs.append((expected, last_logits(decoder, longer_tokens)))
    largest, relative = 0.0, 0.0
    for expected, logits in pairs:
        difference = float((logits - expected).abs().max())
        largest_logit = float(expected.abs().max())
        if not difference <= _ROUNDING * largest_logit:  # also raised for NaN
            raise WakefulError(
                f"our decoder with the configuration and weights of this {class_name} gives other "
                f"logits than Transformers, {difference:.2g} apart where the largest is "
                f"{largest_logit:.2g}: does its "
                "configuration still describe it, after layers or heads were replaced?"
            )
        largest = max(largest, difference)
        relative = max(relative, float((logits - expected).norm() / expected.norm()))
    return Agreement(
        architecture=class_name, tokens=sum(expected.shape[:2].numel() for expected, _ in pairs),
        largest=largest, relative=relative, note=note,
    )  # fmt: skip


def exact_rotary_frequencies(model: nn.Module) -> list[_Change]:
    """Return attribute changes, for `change_attributes`, that put float32 values in place of a
    model's 16-bit rotary buffers: cosines and sines of our decoder, `inv_freq` of Transformers.

    `module.half()` casts these buffers and `from_pretrained` does not: without the changes, a cast
    model would differ from a loaded one.
    """
    changes: list[_Change] = []
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.dtype not in _SIXTEEN_BIT:
                continue
            if isinstance(module, Rotary):
                cos, sin = module.table()  # computed again, in float32
                exact = sin if name == "sin" else cos
            elif name.endswith("inv_freq"):  # a new module of this class computes it in float32
                exact = type(module)(config=module.config).get_buffer(name)  # pyright: ignore[reportCallIssue]
            else:
                continue
            changes.append((module, name, exact.to(buffer.device)))
    return changes


@contextmanager
def change_attributes(changes: Sequence[_Change]) -> Iterator[None]:
    """Replace attributes within a context, and restore them after it."""
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    try:
        for owner, name, value in changes:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in originals:
            setattr(owner, name, value)


def _draw_tokens(
    hf_model: PreTrainedModel, decoder: Decoder
) -> tuple[Tensor, Tensor | None, int, str]:
    """Draw the random tokens to compare two models on.

    Returns four things: the tokens (B, L) for all layers; a sequence longer than the sliding
    window, for the first layers alone, or None where it is not needed or too slow; the number of
    these layers, else 0; and a remark for the report if not all layers are compared past the
    window.
    """
    config = decoder.config
    num_ids = min(config.vocab_size, len(hf_model.get_input_embeddings().weight))  # pyright: ignore
    generator = torch.Generator().manual_seed(0)

    def draw(batch_size: int, length: int) -> Int[Tensor, "B L"]:
        """Draw sequences of this length, or of the whole context if that is shorter."""
        shape = batch_size, min(length, config.context)
        return torch.randint(num_ids, shape, generator=generator).to(decoder.embed.weight.device)

    if not config.has_short_window:
        return draw(*_TOKENS), None, 0, ""
    length = config.window + _PAST_WINDOW
    if length <= _MOST_TOKENS:  # all layers can read it
        return draw(1, length), None, 0, ""
    num_layers = config.local_layers[0] + 1  # up to the first layer with the window
    # Not more work than `_MOST_TOKENS` tokens are for all layers.
    if length * num_layers <= _MOST_TOKENS * config.num_layers:
        note = f"; past the window of {config.window:,} through {num_layers} of the layers"
        return draw(*_TOKENS), draw(1, length), num_layers, note
    return draw(*_TOKENS), None, 0, f"; not past the window of {config.window:,} tokens"


def last_logits(model: nn.Module, tokens: Int[Tensor, "B L"]) -> Float[Tensor, "B K V"]:
    """Return the logits after each of the last K tokens, where K = min(L, 32). The model is our
    decoder or one of Transformers.
    """
    count = min(tokens.shape[1], _TOKENS[1])
    if isinstance(model, Decoder):
        return model.logits(model.hidden(tokens)[:, -count:])
    parameters = inspect.signature(model.forward).parameters
    # Most models compute no other logits if they are asked to; the slice serves those that cannot.
    options: dict[str, Any] = {"logits_to_keep": count} if "logits_to_keep" in parameters else {}
    return model(input_ids=tokens, use_cache=False, **options).logits[:, -count:]


def _cut_layers(hf_model: PreTrainedModel, decoder: Decoder, num_layers: int) -> list[_Change]:
    """Return the attribute changes, for `change_attributes`, that reduce both models to their
    first `num_layers` layers.
    """
    config = hf_model.config.get_text_config(decoder=True)
    blocks = decoder_blocks(hf_model, config.num_hidden_layers)
    path = next(name for name, module in hf_model.named_modules() if module is blocks)
    owner, _, attribute = path.rpartition(".")  # such as "model" and "layers"
    return [
        (hf_model.get_submodule(owner), attribute, blocks[:num_layers]),
        (config, "num_hidden_layers", num_layers),
        (decoder, "blocks", decoder.blocks[:num_layers]),
    ]


class InFloat32(TorchFunctionMode):
    """Context in which 16-bit tensors are cast to float32 by every operation that uses them.

    Two programs that round to 16 bits differ too much to compare: by a tenth of the logits' spread
    in SmolLM2, whose activations reach 24,000. A second copy of all weights may not fit memory.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a torch function with its 16-bit tensors cast to float32.

        The attribute `dtype` of such a tensor reads float32 as well; its other attributes are read
        as they are. Torch calls this for every operation within the context.
        """
        if func == torch.Tensor.dtype.__get__:  # pyright: ignore[reportAttributeAccessIssue]
            dtype = func(*args)
            return torch.float32 if dtype in _SIXTEEN_BIT else dtype
        if getattr(func, "__name__", "") == "__get__":  # another attribute: its shape, its device
            return func(*args, **(kwargs or {}))
        args, kwargs = tree_map_only(Tensor, _to_float32, (args, kwargs or {}))
        return func(*args, **kwargs)


def _to_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _SIXTEEN_BIT else tensor
