"""Text in, token batches out: sources, tokenizer, prepared token files and their order."""

from wakeful.data.order import Batches, Permutation, ValidationWindows
from wakeful.data.preparing import prepare, prepare_data
from wakeful.data.readers import Document
from wakeful.data.sources import read_documents
from wakeful.data.tokenizer import StreamDecoder, Tokenizer
from wakeful.data.tokens import PreparedData, TokenFile
from wakeful.paths import default_cache_dir

__all__ = [
    "Batches", "Document", "Permutation", "PreparedData", "StreamDecoder", "TokenFile", "Tokenizer",
    "ValidationWindows", "default_cache_dir", "prepare", "prepare_data", "read_documents",
]  # fmt: skip
