"""The resident memory of this process, from Linux."""

from pathlib import Path


def resident(field: str = "VmRSS") -> float:
    """Return what is resident now, or the peak ("VmHWM"), in megabytes (2^20 bytes).

    A new process inherits its parent's `ru_maxrss`, so that one is of no use here.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise OSError(f"/proc/self/status has no {field}")


def forget_peak() -> None:
    """Start the peak again from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
