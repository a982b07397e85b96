"""Scales of a pool that keeps keys and values in fp8."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KVScales:
    """What one layer's keys and values are divided by when stored, and multiplied by when read.

    Attributes:
        key: [Hkv] float32.
        value: [Hkv] float32.
    """

    key: torch.Tensor
    value: torch.Tensor
