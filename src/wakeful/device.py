"""Devices and dtypes by the names that users write."""

import contextlib
import math
import os
import time
from pathlib import Path

import torch

from wakeful.errors import WakefulError

DTYPES = {
    "float32": torch.float32, "float64": torch.float64,
    "bfloat16": torch.bfloat16, "float16": torch.float16,
}  # fmt: skip


def choose_device(name: str, *, field: str = "device") -> torch.device:
    """Return the device called `name`; "auto" is a GPU where torch sees one, else the CPU.

    `field` names the option in errors.

    Raises:
        WakefulError: the name is unknown or unsupported, or torch sees no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise WakefulError(f"{field} = {name!r} is not a device; use auto, cpu or cuda") from None
    if device.type == "mps":
        raise WakefulError(
            f"{field} = {name!r}: sums are kept in float64, which Apple's GPUs lack; use cpu"
        )
    if device.type not in ("cpu", "cuda"):
        raise WakefulError(f"{field} = {name!r} is not supported; use auto, cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise WakefulError(f"{field} = {name!r}, but torch sees no CUDA device here")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise WakefulError(
            f"{field} = {name!r}, but torch sees {torch.cuda.device_count()} CUDA devices here"
        )
    return device


def parse_dtype(dtype: torch.dtype | str) -> torch.dtype | None:
    """Return a dtype, given as it is or by its name; None for "auto", which stands for the type in
    which weights are stored.

    Raises:
        WakefulError: the name is unknown.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return None
    if dtype not in DTYPES:
        raise WakefulError(f"dtype = {dtype!r}: must be one of auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def free_memory(device: torch.device) -> int:
    """Return the free memory of a device in bytes; for the CPU all memory if the system does not
    report what is free.
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text("utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024  # the file has KiB
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def estimate_seconds(
    operations: float, device: torch.device, dtype: torch.dtype = torch.float32
) -> float:
    """Estimate the seconds that a model's floating-point operations take on a device.

    A matrix product in `dtype` is timed, and a model is assumed to reach two fifths of its speed.
    The estimate is right to a factor of about three, which tells minutes from days.
    """
    side = 512 if device.type == "cpu" else 4096
    matrix = torch.ones(side, side, device=device, dtype=dtype)
    seconds = math.inf
    for _ in range(3):  # the fastest of three: the first also waits for libraries to load
        start = time.perf_counter()
        _ = (matrix @ matrix)[0, 0].item()  # waits for the device
        seconds = min(seconds, time.perf_counter() - start)
    operations_per_second = 0.4 * 2 * side**3 / seconds  # a product takes 2 n³
    return operations / operations_per_second
