"""Compare compiled models with plain ones; prints {route: [error of logits, of gradients]}."""

import json
import sys
import warnings

import torch

from helpers import gradients, some_tokens, tiny_decoder


def errors(route: str) -> list[float]:
    """Return the largest differences that `torch.compile` makes to logits and gradients."""
    decoder = tiny_decoder(route=route, normalizer="softmax1(learned=True)", num_layers=3)
    tokens = some_tokens(2, 9)
    logits = decoder(tokens[:, :-1])
    _, expected = gradients(decoder, tokens)
    decoder.forward = torch.compile(decoder.forward, backend="aot_eager", fullgraph=True)
    _, grads = gradients(decoder, tokens)
    found = decoder(tokens[:, :-1])
    torch.compiler.reset()
    worst = max(float((grads[name] - grad).abs().max()) for name, grad in expected.items())
    return [float((found - logits).detach().abs().max()), worst]


if __name__ == "__main__":
    # Dynamo itself instantiates the autograd functions that it traces.
    warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)
    torch.set_num_threads(1)
    print(json.dumps({route: errors(route) for route in sys.argv[1:]}))
