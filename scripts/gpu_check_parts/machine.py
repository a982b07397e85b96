"""What everything is measured on."""

import platform
from functools import cache

import torch
import transformers
import triton
from kernel_roofline import H100, H200, Card

from batchgen.kernels.triton.launch import problem_with_launching
from batchgen.runtime.memory import GIB
from gpu_check_parts.clock import time_kernels
from gpu_check_parts.outcome import Check

_CARDS = {"H100": H100, "H200": H200}


def describe_machine(device: torch.device) -> Check:
    """Name the device; the check fails where there is none."""
    if device.type != "cuda":
        return Check("machine", True, f"dry run on {platform.machine()}")
    if not torch.cuda.is_available():
        problem = "torch sees no GPU; --dry-run goes through every part on a CPU"
        return Check("machine", False, problem)
    problem = problem_with_launching()
    if problem is not None:
        return Check("machine", False, problem)
    properties = torch.cuda.get_device_properties(device)
    detail = (
        f"{properties.name}, {properties.total_memory / GIB:.0f} GiB, "
        f"{properties.multi_processor_count} multiprocessors, "
        f"sm_{properties.major}{properties.minor}"
    )
    return Check("machine", True, detail)


def describe_software() -> str:
    """Name the versions that matter."""
    return (
        f"torch {torch.__version__}, triton {triton.__version__}, "
        f"transformers {transformers.__version__}"
    )


def data_sheet(device: torch.device) -> Card | None:
    """Return the card's peaks, where they are known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((card for key, card in _CARDS.items() if key in name), None)


@cache
def measured_card(device: torch.device, dry_run: bool) -> Card:
    """Measure what a plain copy and a plain matrix product reach here.

    That, and not the data sheet, is what a kernel is held against. The rate of exponentials
    has no plain operation that reaches it; it is the data sheet's, H100's where that is not
    known.
    """
    copied = torch.empty(1 << (20 if dry_run else 30), dtype=torch.uint8, device=device)
    target = torch.empty_like(copied)
    seconds = time_kernels(device, [lambda: target.copy_(copied)]).median_s
    side, dtype = (256, torch.float32) if dry_run else (8192, torch.bfloat16)
    left, right = (torch.randn((side, side), device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    product_s = time_kernels(device, [lambda: torch.mm(left, right, out=out)]).median_s
    sheet = data_sheet(device) or H100
    return Card(
        "measured", 2 * copied.nbytes / seconds, 2 * side**3 / product_s, sheet.exponentials_per_s
    )
