"""lm-eval's questions, dealt out among processes.

Every process runs all of lm-eval alike, so that its figures, their order and what it draws are
those of one process; only the model's work on the questions is shared.
"""

from collections.abc import Callable
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

from wakeful.world import World


class Dealt(LM):
    """A model that answers its process's share of the questions and learns the other answers."""

    def __init__(self, name: str, inner: LM, world: World) -> None:
        super().__init__()
        self.name, self.inner, self.world = name, inner, world

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Return each continuation's log-likelihood, and whether greedy decoding writes it."""
        answers = self._answers(requests, self.inner.loglikelihood)
        return [(likelihood, greedy) for likelihood, greedy in answers]

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Return each text's log-likelihood."""
        return self._answers(requests, self.inner.loglikelihood_rolling)

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Return what the model writes after each context."""
        return self._answers(requests, self.inner.generate_until)

    def _answers(
        self, requests: list[Instance], ask: Callable[[list[Instance]], list[Any]]
    ) -> list[Any]:
        self.world.check_same(
            [repr(request.args) for request in requests],
            f"the processes ask {self.name} different questions: give each machine the same files "
            "and the same lm-eval",
        )
        mine = places(requests, self.world)
        answers = ask([requests[place] for place in mine]) if mine else []
        self.world.meet()
        parts = self.world.gather(list(zip(mine, answers, strict=True)))
        everywhere = {place: answer for part in parts for place, answer in part}
        return [everywhere[place] for place in range(len(requests))]


def places(requests: list[Instance], world: World) -> list[int]:
    """Return the places of the questions that this process answers.

    Questions of one context stay together, as a model may run it once for all of them; contexts
    are dealt out by length, so that each process has as much to do.
    """
    contexts: dict[str, list[int]] = {}
    for place, request in enumerate(requests):
        contexts.setdefault(str(request.args[0]), []).append(place)
    longest = sorted(contexts, key=lambda context: -len(context) * len(contexts[context]))
    mine = longest[world.rank :: world.size]
    return sorted(place for context in mine for place in contexts[context])
