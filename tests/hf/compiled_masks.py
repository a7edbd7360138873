"""Compare models compiled whole with plain ones, by kind of mask: prints {kind: error}.

Apart from pytest: the types that it has checked at every call break graphs.
"""

import json
import sys
import warnings

import torch
from torch import Tensor

from hf.models import inputs_of, pair


def error(kind: str) -> float:
    """Return the largest difference that `torch.compile` makes to a loss and its gradients."""
    _, model = pair(normalizer="softmax1(learned=True)", route="svformer")
    given = inputs_of(kind)
    real = given.get("attention_mask", torch.ones_like(given["input_ids"]))
    labels = given["input_ids"].masked_fill(real == 0, -100)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")

    def step(compute: torch.nn.Module) -> list[Tensor]:
        model.zero_grad()
        loss = compute(**given, labels=labels, use_cache=False).loss
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    differences = (
        one - other for one, other in zip(step(compiled), step(model), strict=True)
    )  # fmt: skip
    return max(float(difference.abs().max()) for difference in differences)


if __name__ == "__main__":
    # Dynamo itself instantiates the autograd functions that it traces.
    warnings.filterwarnings("ignore", ".*should not be instantiated", DeprecationWarning)
    print(json.dumps({kind: error(kind) for kind in sys.argv[1:]}))
