"""A step's arrays on their way to the device: packed, in pinned memory, one copy."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from batchgen.runtime.device.api import Device, Event, Stream

# Uploads an array; what it gives holds the values when the step's work runs, not before.
Put = Callable[[npt.NDArray[Any]], torch.Tensor]

# Arrays begin at multiples of this, so that kernels may read them by whole vectors.
_ALIGNMENT = 128
_FIRST_BYTES = 1 << 16


@dataclass(slots=True)
class _Chunk:
    """Pinned memory, what it is copied to, and how far it is filled."""

    pinned: torch.Tensor
    target: torch.Tensor
    filled: int = 0


@dataclass(slots=True)
class _Slot:
    """One place of the ring: what was packed last, and the event behind its copy."""

    read: Event
    chunks: list[_Chunk] = field(default_factory=list)


class Uploads:
    """Packs arrays and copies them together at the head of a step.

    Args:
        device: where they go.
        stream: whose work reads them; None is the compute stream.

    Two pinned buffers take turns: the host fills one while the device may still read the
    other, and an event keeps it from filling one that was not read. On the device one buffer
    is enough, since step follows step on the stream.
    """

    def __init__(self, device: Device, stream: Stream | None = None) -> None:
        self._device = device
        self._stream = stream or device.compute
        self._slots = [_Slot(device.new_event()) for _ in range(2)]
        self._target = self._stream.allocate(_FIRST_BYTES)
        self._slot = self._slots[0]

    def begin(self) -> None:
        """Start a step; blocks only where the copy of two steps ago was not made yet."""
        needed = sum(chunk.filled for chunk in self._slot.chunks)
        if len(self._target) < needed:
            self._target = self._stream.allocate(2 * needed)
        self._slot = self._slots[self._slot is self._slots[0]]
        if not self._slot.read.is_done():
            self._slot.read.wait()
        pinned = self._slot.chunks[0].pinned if self._slot.chunks else None
        if pinned is None or len(pinned) < len(self._target):
            pinned = self._device.pinned(len(self._target))
        self._slot.chunks = [_Chunk(pinned, self._target)]

    def put(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """Pack an array.

        Returns:
            A tensor on the device, of the same shape and type, that holds the array's values
            for the work enqueued after :meth:`send` and until the next step's.
        """
        chunk = self._slot.chunks[-1]
        if chunk.filled + array.nbytes > len(chunk.pinned):
            size = max(array.nbytes, len(chunk.pinned))
            chunk = _Chunk(self._device.pinned(size), self._stream.allocate(size))
            self._slot.chunks.append(chunk)
        start, end = chunk.filled, chunk.filled + array.nbytes
        chunk.filled = -(-end // _ALIGNMENT) * _ALIGNMENT
        packed = chunk.pinned.numpy()[start:end].view(array.dtype).reshape(array.shape)
        np.copyto(packed, array)
        return chunk.target[start:end].view(torch.from_numpy(packed).dtype).view(array.shape)

    def send(self) -> None:
        """Enqueue the copy of all that was packed, before the step's work."""
        chunks = [(c.pinned[: c.filled], c.target[: c.filled]) for c in self._slot.chunks]

        def copy() -> None:
            for pinned, target in chunks:
                target.copy_(pinned, non_blocking=True)

        self._stream.run(copy)
        self._stream.record(self._slot.read)
