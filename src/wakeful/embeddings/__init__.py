"""Embeddings: what stands between the table of tokens and the stream, and before the head."""

from wakeful.embeddings.base import Embedding, Plain
from wakeful.embeddings.projected import Projected
from wakeful.embeddings.scaled import Scaled

__all__ = ["Embedding", "Plain", "Projected", "Scaled"]
