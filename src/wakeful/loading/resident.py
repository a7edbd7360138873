"""A model in memory whose weights are ordinary tensors: none offloaded, on the meta device, or made
in inference mode.

Accelerate's `cpu_offload`, `disk_offload` and `dispatch_model` (which `device_map` uses) leave
weights on the meta device, read them as each module is called, and put a function in the place of
its `forward`. Verbs read weights, exchange layers and copy models, so they get a copy without that.
"""

import copy
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from wakeful.device import free_memory
from wakeful.errors import WakefulError
from wakeful.paged import Paged, in_file
from wakeful.probes.running import as_decoder

COPIES = 2
"""Models of one size that a verb holds at once: the one it was given, and the one it makes."""
_CPU = torch.device("cpu")
_ADDED = (
    "_hf_hook", "_old_forward", "forward", "to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa",
    "neuron",
)  # fmt: skip
"""What accelerate puts into a module's own attributes."""


def with_resident_weights(model: nn.Module) -> nn.Module:
    """Return a model all of whose weights are ordinary tensors: itself where they are.

    A copy shares the tensors that lie in memory. One that was offloaded lies and runs on the CPU,
    its matrices in files where they do not fit memory; one that is spread over several devices
    stays where it is, and inputs go to each module's device by hooks that copies of it keep.

    Raises:
        WakefulError: a weight is on the meta device, and nothing has its values.
    """
    tensors = [*model.parameters(), *model.buffers()]
    hooked = any("_hf_hook" in vars(part) for part in model.modules())
    if not hooked and not any(each.is_meta or each.is_inference() for each in tensors):
        return model
    offloaded = any(each.is_meta for each in tensors)
    found: dict[int, Tensor] = {id(each): _ordinary(each) for each in tensors if not each.is_meta}
    found |= _read_offloaded(model)
    for name, each in [*model.named_parameters(), *model.named_buffers()]:
        if id(each) not in found:
            raise WakefulError(
                f"the {type(model).__name__} has no values of its weight {name}, which is on the "
                "meta device: load the model with its weights"
            )
    made = _copied_without_hooks(model, found)
    if offloaded:
        made.to(_CPU)
        _tie_head(made)
    else:
        _move_inputs(model, made)
    return made


def _ordinary(tensor: Tensor) -> Tensor:
    """Return a tensor over the same memory that autograd may save."""
    if not tensor.is_inference() or isinstance(tensor, Paged):
        return tensor
    plain = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    place = tensor.storage_offset(), tensor.shape, tensor.stride()
    plain.set_(tensor.untyped_storage(), *place)  # pyright: ignore[reportArgumentType]
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(plain, requires_grad=tensor.requires_grad)
    return plain


def _read_offloaded(model: nn.Module) -> dict[int, Tensor]:
    """Return the values of weights on the meta device, by the identity of those."""
    size = sum(each.nbytes for each in model.parameters() if each.is_meta)
    stays = size * COPIES > free_memory(_CPU)
    found: dict[int, Tensor] = {}
    shared: dict[tuple[Any, ...], Tensor] = {}
    for part in model.modules():
        for hook in _hooks(part):
            values = getattr(hook, "weights_map", None)
            if values is None:
                continue
            inside = bool(hook.place_submodules)
            in_memory = isinstance(getattr(values, "dataset", values), dict)
            names = [*part.named_parameters(recurse=inside), *part.named_buffers(recurse=inside)]
            for name, each in names:
                if not each.is_meta or id(each) in found:
                    continue
                value = _ordinary(values[name].detach())
                place = value.data_ptr(), value.shape, value.dtype
                if in_memory and place in shared:  # tied ones have one memory
                    found[id(each)] = shared[place]
                    continue
                if stays and not in_memory and value.ndim > 1:
                    value = in_file(value)
                if isinstance(each, nn.Parameter):
                    value = nn.Parameter(value, requires_grad=each.requires_grad)
                found[id(each)] = shared[place] = value
    return found


def _hooks(part: nn.Module) -> list[Any]:
    hook = vars(part).get("_hf_hook")
    return [] if hook is None else list(getattr(hook, "hooks", [hook]))


def _copied_without_hooks(model: nn.Module, tensors: dict[int, Tensor]) -> nn.Module:
    """Return a copy with other tensors, by identity, and without what accelerate added."""
    memo: dict[int, Any] = dict(tensors)
    for part in model.modules():
        added = vars(part)
        if "_hf_hook" in added:
            own = added.get("_old_forward")
            plain = isinstance(own, MethodType) and own.__func__ is type(part).forward
            memo |= {
                id(added[name]): ""
                for name in _ADDED
                if name in added and (plain or name != "_old_forward")
            }
    made = copy.deepcopy(model, memo)
    for part in made.modules():
        kept = vars(part)
        if "_hf_hook" in kept:
            own = kept.get("_old_forward")
            for name in _ADDED:
                kept.pop(name, None)
            if own:
                part.forward = own
    vars(made).pop("hf_device_map", None)
    return made


def _tie_head(model: nn.Module) -> None:
    """Let the head be the embedding again, as the description says, where both have its values:
    what is offloaded to a disk is read as two.
    """
    own = as_decoder(model)
    if own is None:
        config: Any = model.config
        tied = getattr(config.get_text_config(), "tie_word_embeddings", False)
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()  # pyright: ignore
    else:
        tied, head, embedding = own.config.tied, own.head, own.embed
    one, other = getattr(head, "weight", None), getattr(embedding, "weight", None)
    if not tied or one is other or one is None or other is None or one.shape != other.shape:
        return
    if torch.equal(one, other):
        head.weight = other  # pyright: ignore


def _move_inputs(model: nn.Module, made: nn.Module) -> None:
    """Let inputs of a spread model's modules go to where accelerate's hooks brought them."""
    if len({each.device for each in made.parameters()}) < 2:
        return
    parts = dict(made.named_modules())
    for name, part in model.named_modules():
        for hook in _hooks(part):
            if getattr(hook, "execution_device", None) is not None:
                first = next(iter(parts[name].parameters()), None)
                device = hook.execution_device if first is None else first.device
                parts[name].register_forward_pre_hook(partial(_to_device, device), with_kwargs=True)
    first = next(made.parameters()).device
    made.register_forward_hook(lambda _part, _inputs, output: _moved(output, first))


def _to_device(
    device: Any, _part: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Any, Any]:
    return _moved(inputs, device), _moved(options, device)


def _moved(values: Any, device: Any) -> Any:
    """Return tensors, in whatever holds them, on a device; caches stay where layers left them."""
    return tree_map(lambda each: each.to(device) if hasattr(each, "to") else each, values)
