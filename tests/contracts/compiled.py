"""Compare compiled models with plain ones; prints {model: [error of logits, of gradients]}.

A model is a route, or a JSON table of options of `ModelConfig`, which may name rivals.
"""

import json
import sys
import warnings

import torch

from helpers import gradients, rivals, some_tokens, tiny_decoder


def errors(model: str) -> list[float]:
    """Return the largest differences that `torch.compile` makes to logits and gradients."""
    options = {"normalizer": "softmax1(learned=True)", "num_layers": 3}
    options |= json.loads(model) if model.startswith("{") else {"route": model}
    decoder = tiny_decoder(**options)
    tokens = some_tokens(2, 9)
    documents = torch.tensor([[0] * 4 + [1] * 4, [0] * 8])
    apart = decoder.loss(tokens[:, :-1], tokens[:, 1:], documents=documents)
    logits = decoder(tokens[:, :-1])
    _, expected = gradients(decoder, tokens)
    decoder.forward = torch.compile(decoder.forward, backend="aot_eager", fullgraph=True)
    _, grads = gradients(decoder, tokens)
    found = decoder(tokens[:, :-1])
    again = torch.compile(decoder.loss, backend="aot_eager", fullgraph=True)(
        tokens[:, :-1], tokens[:, 1:], documents=documents
    )
    torch.compiler.reset()
    worst = max(float((grads[name] - grad).abs().max()) for name, grad in expected.items())
    return [float(max((found - logits).detach().abs().max(), (again - apart).abs())), worst]


if __name__ == "__main__":
    # Dynamo itself instantiates the autograd functions that it traces.
    warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)
    torch.set_num_threads(1)
    with rivals():
        print(json.dumps({model: errors(model) for model in sys.argv[1:]}))
