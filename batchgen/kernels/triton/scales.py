"""Scales of a pool that keeps keys and values in fp8."""

from dataclasses import dataclass

import torch

from batchgen.kernels.triton.launch import device_capability


@dataclass(frozen=True, slots=True)
class KVScales:
    """What one layer's keys and values are divided by when stored, and multiplied by when read.

    Attributes:
        key: [Hkv] float32.
        value: [Hkv] float32.
    """

    key: torch.Tensor
    value: torch.Tensor


def supports_fp8(device: torch.device) -> bool:
    """Tell whether a device converts e4m3, which begins with capability 8.9.

    The interpreter's CPU does.
    """
    capability = device_capability(device)
    return capability == 0 or capability >= 89
