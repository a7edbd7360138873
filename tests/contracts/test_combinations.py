"""Variants of different folders in one model: every pair works, or is refused for a stated reason.

A covering array: few models, in which any two examples of different folders stand together in one.
"""

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from helpers import EXAMPLES, FIELD, some_tokens, tiny_config, tiny_decoder
from wakeful.depth import SublayerMix
from wakeful.errors import WakefulError
from wakeful.placements import Placement
from wakeful.variants import build

pytestmark = [
    pytest.mark.filterwarnings("error"),
    pytest.mark.usefixtures("as_users_run_it"),  # each variant's own tests check its shapes
]
Example = tuple[str, str]
"""A folder and an expression."""
Pair = frozenset[Example]
PARTS = 12
LAYERS = tiny_config().num_layers


def decides_twice(depth: str, placement: str) -> bool:
    """Whether a depth mix and a norm over a sum both decide how an output joins the stream."""
    where: Placement = build("placements", placement)
    over = any(where.at(layer, LAYERS) == "over" for layer in range(LAYERS))
    return over and isinstance(build("depth", depth), SublayerMix)


RULES = {
    ("depth", "placements"): (
        decides_twice,
        r"^model.depth = .* decides how each sublayer's output is added, and so does "
        r"model.placement = .*: keep one of them$",
    ),
}
"""What is refused of two folders' variants, and in what words: docs/routes.md says the same."""


def pairs() -> Iterator[tuple[Example, Example]]:
    """Yield any two examples of different folders."""
    for one, other in itertools.combinations(EXAMPLES, 2):
        if one[0] != other[0]:
            yield one, other


def reasons() -> dict[Pair, str]:
    """Return the pairs that are refused, each with the words."""
    of = {folder: [name for place, name in EXAMPLES if place == folder] for folder in FIELD}
    return {
        frozenset({(first, one), (second, other)}): words
        for (first, second), (refuses, words) in RULES.items()
        for one, other in itertools.product(of[first], of[second])
        if refuses(one, other)
    }


REFUSED = reasons()


def covering() -> list[dict[str, Any]]:
    """Return models, as fields of a configuration, that have every pair which is not refused.

    Greedily: each begins with a pair that none has yet, and takes in every other folder, by chance
    among equals, the example that brings the most new pairs with what was chosen before.
    """
    generator = random.Random(0)
    missing = {pair: each for each in pairs() if (pair := frozenset(each)) not in REFUSED}
    models: list[dict[str, Any]] = []
    while missing:
        chosen = dict(next(iter(missing.values())))
        rest = [folder for folder in FIELD if folder not in chosen]
        for folder in generator.sample(rest, len(rest)):
            news: dict[str, int] = {}
            for place, example in EXAMPLES:
                found = [frozenset({(folder, example), each}) for each in chosen.items()]
                if place == folder and REFUSED.keys().isdisjoint(found):
                    news[example] = sum(pair in missing for pair in found)
            most = max(news.values())
            chosen[folder] = generator.choice([each for each in news if news[each] == most])
        for pair in itertools.combinations(chosen.items(), 2):
            missing.pop(frozenset(pair), None)
        models.append({FIELD[folder]: example for folder, example in chosen.items()})
    return models


MODELS = covering()


def test_every_pair_stands_in_a_model_or_is_refused():
    folder_of = {field: folder for folder, field in FIELD.items()}
    together = {
        frozenset({(folder_of[one], model[one]), (folder_of[other], model[other])})
        for model in MODELS
        for one, other in itertools.combinations(FIELD.values(), 2)
    }
    assert together | set(REFUSED) == set(map(frozenset, pairs()))
    assert not together & set(REFUSED)
    assert all(set(model) == set(FIELD.values()) for model in MODELS)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_variants_of_every_folder_work_together(part):
    tokens = some_tokens(1, 12)  # of fewer, a ReLU gate of one of the models lets none through
    for model in MODELS[part::PARTS]:
        decoder = tiny_decoder(**model)
        full = decoder(tokens)
        F.cross_entropy(full[0, :-1], tokens[0, 1:]).backward()
        for name, parameter in decoder.named_parameters():
            grad = parameter.grad
            assert grad is not None, f"no gradient reaches {name} of {model}"
            assert grad.isfinite().all(), f"the gradient of {name} of {model} is not finite"
            assert grad.abs().max() > 0, f"the gradient of {name} of {model} is zero"
        with torch.no_grad():
            cache = decoder.new_cache(1, 13)
            pieces = [decoder(piece, cache=cache) for piece in tokens.split([3, 1, 8], 1)]
        assert torch.allclose(torch.cat(pieces, 1), full, rtol=1e-8, atol=1e-8), model


def test_what_is_refused_is_refused_in_one_line_with_the_reason():
    for pair, words in REFUSED.items():
        fields: dict[str, Any] = {FIELD[folder]: example for folder, example in pair}
        with pytest.raises(WakefulError, match=words) as caught:
            tiny_decoder(**fields)
        assert "\n" not in str(caught.value), fields
