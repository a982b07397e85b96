"""What the machine says of itself: versions, device, memory in use."""

import functools
import importlib.metadata
import platform
import resource
import sys
from pathlib import Path
from typing import Any

_PACKAGES = ("batchgen", "torch", "transformers", "triton", "pyarrow", "tokenizers", "numpy")


@functools.cache
def versions() -> dict[str, str | None]:
    """Give the versions of Python and of the packages that results depend on."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def processor() -> str:
    """Name the CPU as the system does."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def peak_rss_bytes() -> int:
    """Give the most host memory this process has held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def rss_bytes() -> int:
    """Give the host memory this process holds now; the most it has held where none can tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return peak_rss_bytes()
    return pages * resource.getpagesize()


def nvml_memory(uuid: str) -> dict[str, Any] | None:
    """Give a card's name and memory as the driver counts it, other processes included.

    Args:
        uuid: of the card or the part of one: numbers are others to the driver than to a process
            that does not see all cards.

    Returns:
        name, used_bytes and total_bytes; None where there is no NVIDIA driver.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        handle = _nvml_handle(pynvml, uuid)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        name = pynvml.nvmlDeviceGetName(handle)
        return {"name": name, "used_bytes": memory.used, "total_bytes": memory.total}
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def _nvml_handle(pynvml: Any, uuid: str) -> Any:
    try:
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except pynvml.NVMLError:
        return pynvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
