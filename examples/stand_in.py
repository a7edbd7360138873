"""A model to try things on without a download: four random layers of a Llama, made in a second.

It has learned nothing, so its figures mean nothing. Name a real model to see some that do.
"""

from pathlib import Path

import wakeful
from wakeful.data import Tokenizer
from wakeful.model import Decoder, ModelConfig, initialize

TEXT = "python-stdlib:a*"
"""Text that every Python has: the modules of the standard library whose names begin with an a."""


def tiny_llama(folder: str = "runs/tiny-llama") -> str:
    """Write the model to a folder that Transformers loads, if it is not there; return the path."""
    if not Path(folder).exists():
        tokenizer = Tokenizer.train([Path(wakeful.__file__).read_text("utf-8")], 320)
        config = ModelConfig(
            vocab_size=tokenizer.vocab_size, max_length=128, num_layers=4, num_heads=4,
            num_kv_heads=2, width=32, mlp_width=80,
        )  # fmt: skip
        model = wakeful.load(initialize(Decoder(config), seed=0), tokenizer=tokenizer)
        Path(folder).parent.mkdir(parents=True, exist_ok=True)
        wakeful.export(model, folder)
    return folder
