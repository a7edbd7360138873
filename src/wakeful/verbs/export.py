"""Export: any model that our decoder can be, as a folder for Transformers."""

from pathlib import Path

import torch

from wakeful.hf.weights_out import export, refuse_existing
from wakeful.loading.load import read_decoder


def export_model(
    source: str | Path, folder: str | Path, *, dtype: torch.dtype = torch.float32, step: int = 0
) -> str:
    """Write the model that `source` names (see `read_decoder`) to `folder`; return its model type.

    The tokenizer goes along. `step` is the checkpoint of a run to take; 0 is the newest.

    Raises:
        WakefulError: the source cannot be read, or the folder exists or cannot be written.
    """
    refuse_existing(Path(folder))
    model = read_decoder(source, dtype=dtype, step=step)
    files = ("config.json", "tokenizer.json")  # with these, a folder's own are copied as they are
    copied = model.path is not None and all((model.path / name).is_file() for name in files)
    tokenizer = model.path if copied and model.path else model.own_tokenizer
    return export(model.decoder(), folder, tokenizer=tokenizer, dtype=dtype)
