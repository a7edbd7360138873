"""Embeddings: what stands between the table of tokens and the stream, and before the head."""

from wakeful.embeddings.base import Embedding, Plain
from wakeful.embeddings.projected import Projected

__all__ = ["Embedding", "Plain", "Projected"]
