"""What a model at hand shows on a text: its layers, its loss, and what quantizing it costs."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from wakeful.config.verbs import LENGTH
from wakeful.estimates import perplexity
from wakeful.evaluation.diagnosis import diagnose
from wakeful.evaluation.reading import Words
from wakeful.loading.model import Model
from wakeful.probes.base import Frame, MergeableProbe
from wakeful.quant.convert import quantize
from wakeful.quant.measure import measure


@dataclass(frozen=True)
class Looked:
    """The rows of every metric, and plain figures as those of a run are called."""

    rows: Frame
    figures: dict[str, float]


def stretches(model: Model, words: Words, count: int, size: int) -> list[list[list[int]]]:
    """Return `count` stretches of a text, one after another, of `size` sequences each.

    A sequence has 512 tokens, or the model's context, and begins as the model's tokenizer does.

    Raises:
        WakefulError: the text is too short.
    """
    length = min(LENGTH, model.context)
    whole = words.sequences(model, length=length, num_sequences=count * size, bos=model.begins())
    return [whole[n * size : (n + 1) * size] for n in range(count)]


def look(
    model: Model,
    sequences: Sequence[Sequence[int]],
    schemes: Sequence[str] = (),
    more: Callable[[], Iterable[MergeableProbe]] = tuple,
) -> Looked:
    """Run a model over sequences; quantize its linear layers by each scheme and run it again.

    `more` probes look besides those of a diagnosis.

    The figures are `loss` in nats a token, `perplexity` and `parameters`, and of a scheme
    `increase_SCHEME` of the perplexity and `damage_SCHEME` of the loss.
    """
    seen = diagnose(model, sequences, more=more)
    figures = {
        "loss": seen.loss,
        "perplexity": perplexity(seen.loss),
        "parameters": float(sum(weight.numel() for weight in model.module.parameters())),
    }
    if schemes:
        rows = [torch.tensor([list(each)], device=model.device) for each in sequences]
        forms = {scheme: quantize(model.module, scheme) for scheme in schemes}
        found = measure(model.name, model.module, forms, rows)
        for scheme in schemes:
            figures[f"increase_{scheme}"] = found.increase(scheme)[0]
            figures[f"damage_{scheme}"] = found.loss_increase(scheme)[0]
    return Looked(seen.rows, figures)
