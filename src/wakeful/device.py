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
PEAKS = {
    "A100": 312e12, "H100 NVL": 835e12, "H100 PCIe": 756e12, "H100": 989e12, "H200 NVL": 835e12,
    "H200": 989e12, "B200": 2250e12, "L40S": 362e12, "MI300X": 1307e12,
}  # fmt: skip
"""Operations a second of GPUs in bfloat16, dense, by a part of their names: their makers' data
sheets. The first that fits a name is meant."""
H100 = PEAKS["H100"] * 0.4
"""Operations a second of one H100 in bfloat16, at two fifths of its peak."""


def choose_device(name: str, *, field: str = "device") -> torch.device:
    """Return the device called `name`; "auto" is a GPU where torch sees one, else the CPU. `field`
    is what errors call the option.
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
    """Return the type of weights asked for; None for what is stored."""
    if isinstance(dtype, torch.dtype) or dtype == "auto":
        return None if isinstance(dtype, str) else dtype
    if dtype not in DTYPES:
        raise WakefulError(f"dtype = {dtype!r}: must be one of auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def free_memory(device: torch.device) -> int:
    """Return a device's free bytes; of the host, all its memory where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text("utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def synchronize(device: torch.device) -> None:
    """Wait until a device has done what it was asked, so that a clock may be read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_operations(gpu: str) -> float | None:
    """Return the operations a second that a GPU of this name can do in bfloat16; None: unknown."""
    return next((peak for part, peak in PEAKS.items() if part in gpu), None)


def estimate_seconds(
    operations: float, device: torch.device, dtype: torch.dtype = torch.float32
) -> float:
    """Return about how long that many floating-point operations of a model take on a device.

    A matrix product is timed here, and a model taken to reach two fifths of its speed: right to a
    factor of three or so, which tells minutes from days. On a GPU bfloat16 is ten times as fast.
    """
    side = 512 if device.type == "cpu" else 4096
    matrix = torch.ones(side, side, device=device, dtype=dtype)
    seconds = math.inf
    for _ in range(3):
        began = time.perf_counter()
        _ = (matrix @ matrix)[0, 0].item()  # which waits for the device
        seconds = min(seconds, time.perf_counter() - began)
    return operations / (2 * side**3 / seconds) / 0.4
