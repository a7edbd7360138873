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
    """Return the names of classes whose modules must each lie on one device."""
    shared = (decoder.route, decoder.depth, decoder.embedding)
    if decoder.config.positions == "learned" or any(list(part.parameters()) for part in shared):
        return ["Decoder"]
    return sorted({type(block).__name__ for block in decoder.blocks})


@contextmanager
def weights_in_place(decoder: Decoder) -> Iterator[None]:
    """Bring offloaded weights that are read without a call to where they are used, for a while."""
    if "_hf_hook" not in vars(decoder.embed):  # accelerate gives every module with weights one
        yield
        return
    with ExitStack() as stack:
        for part in _read_without_call(decoder):
            if any(weight.is_meta for weight in part.parameters(recurse=False)):
                hook: Any = vars(part)["_hf_hook"]
                hook.pre_forward(part)
                stack.callback(hook.post_forward, part, None)
        yield


def _read_without_call(decoder: Decoder) -> Iterator[nn.Module]:
    if decoder.config.positions == "learned":
        yield decoder.positions
    for owner in decoder.modules():
        if isinstance(owner, Variant | StoredPrefix):
            assert isinstance(owner, nn.Module)
            yield from owner.modules()
