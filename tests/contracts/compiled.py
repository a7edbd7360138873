"""Compare compiled models with plain ones; prints {model: [error of logits, of gradients]}.

The first is compiled once more for rows of several documents, which no variant knows of.

A model is a route, or a JSON table of options of `ModelConfig`, which may name rivals.
"""

import json
import sys
import warnings

import torch

from helpers import gradients, rivals, some_tokens, tiny_decoder


def errors(model: str, *, documents: bool) -> list[float]:
    """Return the largest differences that `torch.compile` makes to logits and gradients."""
    options = {"normalizer": "softmax1(learned=True)", "num_layers": 2}
    options |= json.loads(model) if model.startswith("{") else {"route": model}
    decoder = tiny_decoder(**options)
    tokens = some_tokens(2, 9)
    logits = decoder(tokens[:, :-1])
    _, expected = gradients(decoder, tokens)
    compiled = torch.compile(decoder.forward, backend="aot_eager", fullgraph=True)
    plain, decoder.forward = decoder.forward, compiled
    _, grads = gradients(decoder, tokens)
    error = (decoder(tokens[:, :-1]) - logits).detach().abs().max()
    decoder.forward = plain
    if documents:
        rows = {"documents": torch.tensor([[0] * 4 + [1] * 4, [0] * 8])}
        apart = decoder.loss(tokens[:, :-1], tokens[:, 1:], **rows)
        loss = torch.compile(decoder.loss, backend="aot_eager", fullgraph=True)
        error = max(error, (loss(tokens[:, :-1], tokens[:, 1:], **rows) - apart).detach().abs())
    torch.compiler.reset()
    worst = max(float((grads[name] - grad).abs().max()) for name, grad in expected.items())
    return [float(error), worst]


if __name__ == "__main__":
    # Dynamo itself instantiates the autograd functions that it traces.
    warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)
    torch.set_num_threads(1)
    with rivals():
        models = enumerate(sys.argv[1:])
        print(json.dumps({model: errors(model, documents=n == 0) for n, model in models}))
