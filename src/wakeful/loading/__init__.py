"""One dispatcher: what a path, a name or a module is, as one `Model`."""

from wakeful.loading.load import load, read_decoder
from wakeful.loading.model import Model

__all__ = ["Model", "load", "read_decoder"]
