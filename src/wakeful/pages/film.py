"""One head's attention over training steps, as pictures that move without a script."""

import base64
import struct
import zlib
from dataclasses import dataclass

import numpy as np

from wakeful.comparison.reading import TrainedRun
from wakeful.data.tasks.base import task_of
from wakeful.data.tokenizer import Tokenizer
from wakeful.errors import WakefulError
from wakeful.runs.run import Run
from wakeful.training.records import HeadWeights, rows

_SHOWN = {" ": "␣", "\n": "⏎", "\t": "⇥"}
"""Characters that leave no ink."""


@dataclass(frozen=True)
class Film:
    """The frames of a head, and what its rows and columns are."""

    name: str
    steps: tuple[int, ...]
    labels: tuple[str, ...]
    """A token each; the first is BOS."""
    triggers: tuple[bool, ...]
    """At which tokens the head is needed."""
    strip: str
    """All frames, one below the other, as an image's address: the darker, the more weight."""

    @property
    def size(self) -> int:
        """Tokens of a frame."""
        return len(self.labels)


def film_of(run: TrainedRun, color: str) -> Film:
    """Return the first layer's first head in a run of a task that logged its attention.

    Raises:
        WakefulError: the run logged none, or what it logged is damaged.
    """
    place = run.path / HeadWeights.log
    frames = [
        row for row in rows(Run.open(run.path), HeadWeights) if (row.layer, row.head) == (0, 0)
    ]
    if not frames:
        raise WakefulError(
            f"{place} has no weights of the first head: "
            "set train.diagnose.every and train.diagnose.attention, and train again"
        )
    tokens = frames[0].tokens
    square = {(row.tokens, len(row.weights), *map(len, row.weights)) for row in frames}
    if square != {(tokens, *[len(tokens)] * (len(tokens) + 1))}:
        raise WakefulError(f"{place}: frames differ in their tokens, or are not square")
    weights = np.array([row.weights for row in frames])
    if not ((weights >= 0) & (weights <= 1.001)).all():
        raise WakefulError(f"{place}: a weight lies outside 0 to 1")
    task = task_of(run.config.data.source)
    ids = np.array([tokens])
    needed = np.zeros(len(tokens), bool) if task is None else task.is_trigger(ids)[0]
    tokenizer = Tokenizer.load(run.path)
    letters = [tokenizer.decode([each]) for each in tokens]
    return Film(
        name=run.variant,
        steps=tuple(row.step for row in frames),
        labels=("BOS", *(_SHOWN.get(letter, letter) for letter in letters[1:])),
        triggers=tuple(needed.tolist()),
        strip=_strip(weights.reshape(-1, len(tokens)), color),
    )


def _strip(weights: np.ndarray, color: str) -> str:
    """Return weights as a PNG of one color, whose opacity is √weight, in a data address.

    PNG (ISO/IEC 15948): a palette of 256 opacities, rows without a filter.
    """
    shades = np.round(np.sqrt(np.clip(weights, 0, 1)) * 255).astype(np.uint8)
    height, width = shades.shape
    lines = np.hstack([np.zeros((height, 1), np.uint8), shades])
    parts = {
        b"IHDR": struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0),
        b"PLTE": bytes.fromhex(color.removeprefix("#")) * 256,
        b"tRNS": bytes(range(256)),
        b"IDAT": zlib.compress(lines.tobytes(), 9),
        b"IEND": b"",
    }
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts.items()
    )
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
