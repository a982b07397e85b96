"""A kernel's launch as a value: tests compile it ahead of time, callers run it."""

from collections.abc import Mapping
from functools import cache
from math import gcd
from subprocess import SubprocessError
from typing import Any, NamedTuple

import torch
import triton

# The least capability that Triton's compiler supports.
LEAST_CAPABILITY = 80
# As the decorator of the kernels reads it, once for the whole process.
_IS_INTERPRETED = bool(triton.knobs.runtime.interpret)


class Launch(NamedTuple):
    """All that a kernel is started with.

    Attributes:
        kernel: the function that ``triton.jit`` made.
        grid: programs along three axes.
        arguments: the kernel's parameters by name.
        warps: warps of a program.
        stages: depth of the software pipeline.
    """

    kernel: Any
    grid: tuple[int, int, int]
    arguments: Mapping[str, object]
    warps: int = 4
    stages: int = 1

    @property
    def options(self) -> dict[str, object]:
        """Options of the compiler; fusion is named because its default differs by release."""
        return {
            "num_warps": self.warps,
            "num_stages": self.stages,
            "enable_fp_fusion": True,
        }

    def compile(self) -> None:
        """Compile the kernel for the current device, where that was not done; start nothing."""
        self.kernel.warmup(grid=self.grid, **self.arguments, **self.options)

    def run(self) -> None:
        """Start the kernel on the current stream."""
        self.kernel[self.grid](**self.arguments, **self.options)


def ceil_div(number: int, divisor: int) -> int:
    """Divide, rounding up."""
    return -(-number // divisor)


def next_power_of_2(number: int, least: int = 1) -> int:
    """Return the smallest power of two that is neither below ``number`` nor below ``least``."""
    return max(least, 1 << (number - 1).bit_length())


def device_capability(device: torch.device) -> int:
    """Return a CUDA device's capability as one number, such as 90; 0 on the interpreter's CPU."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def is_interpreted() -> bool:
    """Return whether the kernels of this process run in Triton's interpreter."""
    return _IS_INTERPRETED


class Target(NamedTuple):
    """What launches depend on of a device.

    Attributes:
        capability: see :func:`device_capability`.
        processors: multiprocessors.
    """

    capability: int
    processors: int


# The interpreter on a CPU.
INTERPRETER = Target(0, 1)


@cache
def target_of(device: torch.device) -> Target:
    """Look at a device."""
    if device.type != "cuda":
        return INTERPRETER
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return Target(device_capability(device), processors)


def problem_with_launching() -> str | None:
    """Return why Triton starts no kernels on this machine's GPU; None if it does.

    It compiles what it starts them with when it first needs it, with the C compiler that it
    finds, which an image made for running has not.
    """
    try:
        triton.runtime.driver.active.get_current_target()
    except (RuntimeError, OSError, SubprocessError, ImportError, AssertionError) as error:
        return (
            f"Triton needs a C compiler (gcc or clang, or CC in the environment) and Python's "
            f"headers to start kernels: {error}"
        )
    return None


def stride_unit(*strides: int) -> int:
    """Return the largest power of two, up to 16, that divides all strides.

    A launch is compiled for the numbers that it is specialised for: a stride that follows the
    number of tokens would compile a kernel anew where that is a multiple of 16. What both
    strides of a step's vectors have in common does not depend on it: one of them is the size
    of a head.
    """
    return gcd(16, *strides)


def supports_fp8(device: torch.device) -> bool:
    """Return whether a device converts e4m3, which begins with capability 8.9.

    The interpreter's CPU does.
    """
    capability = device_capability(device)
    return capability == 0 or capability >= 89
