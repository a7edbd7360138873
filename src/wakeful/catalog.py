"""Names of variants, schemes and optimizers, for the command line, which does not import torch.

A test compares every list with the classes that the folder defines.
"""

from wakeful.config.model import VARIANTS
from wakeful.errors import WakefulError, did_you_mean

NAMES: dict[str, tuple[str, ...]] = {
    "routes": (
        "own", "cla", "differential", "gated", "neutreno", "on_layers", "output_gate",
        "resformer", "svformer", "then", "value_embedding",
    ),
    "depth": (
        "residual", "denseformer", "hyper_connections", "mudd",
    ),
    "normalizers": (
        "softmax", "relu", "sigmoid", "softcap", "softmax1",
        "softpick",
    ),
    "norms": ("rmsnorm", "rmsnorm_single", "layernorm", "layernorm_scaling"),
    "placements": ("pre", "mixed", "peri", "post", "reordered"),
    "ropes": ("plain", "linear", "llama3"),
    "embeddings": ("plain", "projected", "scaled"),
    "optim.rotations": (
        "hadamard", "haar", "block_diagonal", "eigenbasis", "identity",
    ),
    "quantization.schemes": (
        "fine", "moderate", "coarse", "w4", "w4g128", "w4g128_gptq", "smoothquant", "w8a8",
        "w4a16", "w4a8", "w4a4", "fp8", "mxfp4", "nvfp4", "kv8", "kv4", "scheme",
    ),
    "optim": ("adamw", "orthoadam", "muon"),
}  # fmt: skip
"""Names by folder; those of quantization.schemes are whole schemes, without grids and methods."""
FOLDERS = {f"model.{field}": folder for field, folder in VARIANTS.items()} | {
    "rotate": "optim.rotations",
    "optimizer.rotation": "optim.rotations", "optimizer.name": "optim",
    "scheme": "quantization.schemes", "train.quantize.schemes": "quantization.schemes",
}  # fmt: skip
"""Options whose values are expressions, and the folder that defines the class they name."""


def check_names(option: str, values: object) -> None:
    """Check the names of variants in the values of a command-line option, without importing torch.

    `values` is one expression or several. An option without a folder of variants is not checked.

    Raises:
        WakefulError: the name before the parenthesis is not a variant of the option's folder.
    """
    if option not in FOLDERS:
        return
    names = NAMES[FOLDERS[option]]
    expressions = [values] if isinstance(values, str) else list(values)  # pyright: ignore
    for expression in expressions:
        name = expression.partition("(")[0].strip()
        # `module:Name`, a class of the user's, is no identifier: it is not checked.
        if name.isidentifier() and name not in names:
            # `scheme(...)` is the general form: by itself it is no scheme to choose.
            listed = ", ".join(entry for entry in names if entry != "scheme")
            raise WakefulError(
                f"{option}={name!r} is not one of {listed}{did_you_mean(name, names)}"
            )
