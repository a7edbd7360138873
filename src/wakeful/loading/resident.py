"""Models in memory with ordinary weights: none offloaded, on the meta device or created in
inference mode.

Accelerate's `cpu_offload`, `disk_offload` and `dispatch_model` (which `device_map` uses) leave
weights on the meta device, read them when a module is called, and replace the module's `forward`.
Tools read weights, exchange layers and copy models, so they get a copy without accelerate's hooks.
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
from wakeful.paged import Paged, copy_to_file
from wakeful.probes.running import as_decoder

COPIES = 2
"""Models of one size that a tool holds at once: the given model and its result."""
_CPU = torch.device("cpu")
_ADDED = (
    "_hf_hook", "_old_forward", "forward", "to", "cuda", "npu", "xpu", "mlu", "sdaa", "musa",
    "neuron",
)  # fmt: skip
"""Attributes that accelerate adds to a module."""


def with_resident_weights(model: nn.Module) -> nn.Module:
    """Return a model whose weights are ordinary tensors in memory: the model itself where they are,
    else a copy without accelerate's hooks.

    The copy shares the tensors that are in memory. If weights are offloaded, the copy is on the
    CPU; its matrices stay in files if they were on disk and do not fit memory. A model spread over
    several devices stays there; hooks of ours move the inputs of every module to its device.

    Raises:
        WakefulError: a weight is on the meta device, and no hook has its values.
    """
    tensors = [*model.parameters(), *model.buffers()]
    has_hooks = any("_hf_hook" in vars(module) for module in model.modules())
    if not has_hooks and not any(tensor.is_meta or tensor.is_inference() for tensor in tensors):
        return model
    is_offloaded = any(tensor.is_meta for tensor in tensors)
    values: dict[int, Tensor] = {
        id(tensor): _without_inference_mode(tensor) for tensor in tensors if not tensor.is_meta
    }
    values |= _read_offloaded(model)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if id(tensor) not in values:
            raise WakefulError(
                f"the {type(model).__name__} has no values of its weight {name}, which is on the "
                "meta device: load the model with its weights"
            )
    resident = _copy_without_hooks(model, values)
    if is_offloaded:
        resident.to(_CPU)
        _tie_head(resident)
    else:  # perhaps spread over several devices, and the hooks that moved inputs are gone
        _move_inputs(model, resident)
    return resident


def _without_inference_mode(tensor: Tensor) -> Tensor:
    """Return an ordinary tensor over the memory of one that was created in inference mode, which
    autograd could not save for a backward pass; another tensor is returned as it is.
    """
    if not tensor.is_inference() or isinstance(tensor, Paged):  # a Paged one has no memory
        return tensor
    ordinary = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    layout = tensor.storage_offset(), tensor.shape, tensor.stride()
    ordinary.set_(tensor.untyped_storage(), *layout)  # pyright: ignore[reportArgumentType]
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(ordinary, requires_grad=tensor.requires_grad)
    return ordinary


def _read_offloaded(model: nn.Module) -> dict[int, Tensor]:
    """Return the values of a model's offloaded weights, which are on the meta device, by the `id`
    of the weight; weights that were tied in memory have one tensor.

    Accelerate's hooks have the values, in memory (`cpu_offload`) or in files (`disk_offload`).
    Matrices from files stay in files where they do not fit memory.
    """
    num_bytes = sum(tensor.nbytes for tensor in model.parameters() if tensor.is_meta)
    exceeds_memory = num_bytes * COPIES > free_memory(_CPU)
    resident: dict[int, Tensor] = {}
    resident_by_memory: dict[tuple[Any, ...], Tensor] = {}
    for module in model.modules():
        for hook in _hooks(module):
            weights_map = getattr(hook, "weights_map", None)
            if weights_map is None:  # the hook does not offload
                continue
            recurse = bool(hook.place_submodules)  # the hook has the weights of submodules too
            # Accelerate may wrap the table of weights in an object that adds a prefix to names.
            in_memory = isinstance(getattr(weights_map, "dataset", weights_map), dict)
            for name, tensor in (
                *module.named_parameters(recurse=recurse),
                *module.named_buffers(recurse=recurse),
            ):
                if not tensor.is_meta or id(tensor) in resident:
                    continue
                value = _without_inference_mode(weights_map[name].detach())
                memory = value.data_ptr(), value.shape, value.dtype
                if in_memory and memory in resident_by_memory:  # tied weights share their memory
                    resident[id(tensor)] = resident_by_memory[memory]
                    continue
                if exceeds_memory and not in_memory and value.ndim > 1:  # a matrix
                    value = copy_to_file(value)
                if isinstance(tensor, nn.Parameter):
                    value = nn.Parameter(value, requires_grad=tensor.requires_grad)
                resident[id(tensor)] = resident_by_memory[memory] = value
    return resident


def _hooks(module: nn.Module) -> list[Any]:
    """Return accelerate's hooks of a module; a `SequentialHook` holds several."""
    hook = vars(module).get("_hf_hook")
    return [] if hook is None else list(getattr(hook, "hooks", [hook]))


def _copy_without_hooks(model: nn.Module, tensors: dict[int, Tensor]) -> nn.Module:
    """Copy a model without the attributes that accelerate added to its modules; `tensors` has the
    copy's tensors by the `id` of the original's.

    Accelerate keeps a module's original forward as the attribute `_old_forward`. The copy gets it
    back unless it is just the method of the module's class, which the copy has anyway.
    """
    memo: dict[int, Any] = dict(tensors)  # of deepcopy: what to put in place of an object
    for module in model.modules():
        attributes = vars(module)
        if "_hf_hook" in attributes:
            forward = attributes.get("_old_forward")
            is_method = isinstance(forward, MethodType) and forward.__func__ is type(module).forward
            # Copy "" in their place: hooks may hold what cannot be copied.
            memo |= {
                id(attributes[name]): ""
                for name in _ADDED
                if name in attributes and (is_method or name != "_old_forward")
            }
    duplicate = copy.deepcopy(model, memo)
    for module in duplicate.modules():
        attributes = vars(module)
        if "_hf_hook" in attributes:
            forward = attributes.get("_old_forward")
            for name in _ADDED:
                attributes.pop(name, None)
            if forward:  # not "", the copy of a mere method
                module.forward = forward
    vars(duplicate).pop("hf_device_map", None)
    return duplicate


def _tie_head(model: nn.Module) -> None:
    """Tie a model's head to its embedding again where the configuration says so and their values
    are equal: tied weights that were offloaded to disk are read as two tensors.
    """
    decoder = as_decoder(model)
    if decoder is None:
        config: Any = model.config
        tied = getattr(config.get_text_config(), "tie_word_embeddings", False)
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()  # pyright: ignore
    else:
        tied, head, embedding = decoder.config.tied, decoder.head, decoder.embed
    head_weight = getattr(head, "weight", None)
    embedding_weight = getattr(embedding, "weight", None)
    if not tied or head_weight is None or embedding_weight is None:
        return
    if torch.equal(head_weight, embedding_weight):  # False for other shapes
        head.weight = embedding_weight  # pyright: ignore


def _move_inputs(model: nn.Module, resident: nn.Module) -> None:
    """Register hooks on `resident`, the copy of a `model` that accelerate spread over several
    devices; do nothing if all its parameters are on one device.

    The hooks move a module's inputs to the module's device, and the model's output to that of its
    first parameter. Modules get one where accelerate's hooks on `model` do the same.
    """
    if len({tensor.device for tensor in resident.parameters()}) < 2:
        return
    resident_modules = dict(resident.named_modules())
    for name, module in model.named_modules():
        for hook in _hooks(module):
            if getattr(hook, "execution_device", None) is None:  # it moves no inputs
                continue
            resident_module = resident_modules[name]
            weight = next(resident_module.parameters(), None)
            device = hook.execution_device if weight is None else weight.device
            resident_module.register_forward_pre_hook(partial(_to_device, device), with_kwargs=True)
    first_device = next(resident.parameters()).device
    resident.register_forward_hook(lambda _part, _inputs, output: _move(output, first_device))


def _to_device(
    device: Any, _part: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Any, Any]:
    return _move(inputs, device), _move(options, device)


def _move(values: Any, device: Any) -> Any:
    """Move the tensors in nested containers to a device; a cache, which has no `to`, stays."""
    return tree_map(lambda value: value.to(device) if hasattr(value, "to") else value, values)
