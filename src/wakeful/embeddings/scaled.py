"""Embeddings that enter the stream as long as its width makes other vectors."""

import math

from torch import Tensor

from wakeful.embeddings.base import Embedding


class Scaled(Embedding):
    """h_0 = √D e, logits = head(norm(h_N)): Gemma's, after Vaswani et al. 2017 (section 3.4).

    √D is rounded to the embeddings' precision, as Gemma does it.
    """

    examples = ("scaled",)

    def into(self, x: Tensor) -> Tensor:
        return x * x.new_tensor(math.sqrt(x.shape[-1]))
