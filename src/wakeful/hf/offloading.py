"""Our class under accelerate: its weights offloaded, or its blocks spread over several devices.

Accelerate's hooks act where a module is called. Routes, depth mixes, normalizers and stored
prefixes are read by other methods, so their weights are brought for the whole pass, and a model
whose routes or depth mix have weights, which blocks on several devices would read, is not split.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from wakeful.model.attention import StoredPrefix
from wakeful.model.decoder import Decoder
from wakeful.variants import Variant


def unsplit_modules(decoder: Decoder) -> list[str]:
    """Return the names of the module classes that accelerate must not split over devices: those of
    the blocks, or the whole decoder if it has weights outside of blocks that it reads directly.

    Accelerate moves weights to a device only when their module is called, and the weights of
    learned positions, routes, depth mixes and embedding variants are read without that.
    """
    parts = (decoder.route, decoder.depth, decoder.embedding)
    has_weights = any(list(part.parameters()) for part in parts)
    if decoder.config.positions == "learned" or has_weights:
        return ["Decoder"]
    return sorted({type(block).__name__ for block in decoder.blocks})


@contextmanager
def offloaded_weights_loaded(decoder: Decoder) -> Iterator[None]:
    """Within a context, load offloaded weights that the decoder reads without calling their module:
    accelerate itself loads weights only when their module is called.
    """
    # Accelerate sets a hook on every module with weights, or on none.
    if "_hf_hook" not in vars(decoder.embed):
        yield
        return
    with ExitStack() as stack:
        for module in _modules_read_directly(decoder):
            # Offloaded weights are on the meta device until the hook loads them.
            if any(weight.is_meta for weight in module.parameters(recurse=False)):
                hook: Any = vars(module)["_hf_hook"]
                hook.pre_forward(module)
                stack.callback(hook.post_forward, module, None)  # offloads them again
        yield


def _modules_read_directly(decoder: Decoder) -> Iterator[nn.Module]:
    """Yield the modules whose weights a decoder may read without calling the module: learned
    positions, and variants (routes, norms …) and stored prefixes with the modules inside them.
    """
    if decoder.config.positions == "learned":
        yield decoder.positions
    for module in decoder.modules():
        if isinstance(module, Variant | StoredPrefix):
            assert isinstance(module, nn.Module)
            yield from module.modules()
