"""Text in, token batches out: sources, tokenizer, prepared token files and their order."""

from wakeful.cache_dir import default_cache_dir
from wakeful.data.cache import prepared
from wakeful.data.order import Batches, Permutation, ValidationWindows
from wakeful.data.preparing import prepare
from wakeful.data.sources import Document, DocumentsHasher, documents_hash, read_documents
from wakeful.data.tokenizer import StreamDecoder, Tokenizer
from wakeful.data.tokens import PreparedData, TokenFile
