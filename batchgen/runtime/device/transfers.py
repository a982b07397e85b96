"""Transfers between host and device: a step's arrays up, its sampled tokens down.

Arrays go up packed, through pinned memory, in one copy. Sampled tokens stay on the device for the
next step, and come down in one asynchronous copy with one event to wait for.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from batchgen.engine.step import IntArray, StepPlan
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
    """One place of the ring: what was packed last, and the event after its copy."""

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


_FIRST_TOKENS = 512


class SampledTokenBuffers:
    """What the last step sampled and what this one does: two buffers that take turns."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._last = self._allocate(_FIRST_TOKENS)
        self._next = self._allocate(_FIRST_TOKENS)

    def begin(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Start a step that samples ``count`` tokens.

        Returns:
            The last step's tokens, and [count] int64 for this step's.
        """
        self._last, self._next = self._next, self._last
        if len(self._next) < count:
            self._next = self._allocate(2 * count)
        return self._last, self._next[:count]

    def _allocate(self, num_tokens: int) -> torch.Tensor:
        return torch.zeros(num_tokens, dtype=torch.int64, device=self._device.torch_device)


def has_placeholders(plan: StepPlan) -> bool:
    """Whether a plan runs tokens that the step before is only now sampling."""
    return bool(np.any(plan.token_ids < 0))


def fill_placeholders(token_ids: torch.Tensor, sampled: torch.Tensor) -> None:
    """Replace placeholders by the sampled tokens, on the device.

    A row that got no token (``NO_TOKEN``) has failed, but the host does not know yet: it
    runs token 0 once more, and nobody sees what comes of it.

    Args:
        token_ids: [T], changed in place; see ``StepPlan.token_ids``.
        sampled: what the step before sampled.
    """
    places = (-1 - token_ids).clamp_min_(0)
    fed = sampled.index_select(0, places).clamp_min_(0)
    token_ids.copy_(torch.where(token_ids < 0, fed, token_ids))


class PendingTokens:
    """Tokens on their way to the host."""

    def __init__(self, pinned: torch.Tensor, count: int, event: Event) -> None:
        self._pinned = pinned
        self._count = count
        self._event = event
        self._tokens: IntArray | None = None

    def tokens(self) -> IntArray:
        """Wait for them: the one time in a step that the host waits for the device.

        Returns:
            [S] tokens, the caller's own.
        """
        if self._tokens is None:
            self._event.wait()
            self._tokens = self._pinned[: self._count].numpy().copy()
        return self._tokens


class Downloads:
    """Copies tokens through two pinned buffers that take turns.

    A buffer's tokens must have been taken by :meth:`PendingTokens.tokens` before the next but
    one is sent: two steps are in flight at most.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pinned = [self._allocate(_FIRST_TOKENS) for _ in range(2)]
        self._pending: list[PendingTokens | None] = [None, None]
        self._turn = 0

    def send(self, tokens: torch.Tensor) -> PendingTokens:
        """Enqueue the copy of [S] int64 tokens that earlier work writes."""
        self._turn = 1 - self._turn
        before = self._pending[self._turn]
        if before is not None:
            # Of a step that nobody waited for, as after an error: its copy may be under way.
            before.tokens()
        count = len(tokens)
        if count > len(self._pinned[self._turn]):
            self._pinned[self._turn] = self._allocate(2 * count)
        pinned = self._pinned[self._turn]
        event = self._device.new_event()
        self._device.compute.run(lambda: _copy(tokens, pinned[:count]))
        self._device.compute.record(event)
        pending = self._pending[self._turn] = PendingTokens(pinned, count, event)
        return pending

    def _allocate(self, num_tokens: int) -> torch.Tensor:
        return self._device.pinned(num_tokens * torch.int64.itemsize).view(torch.int64)


def _copy(tokens: torch.Tensor, pinned: torch.Tensor) -> None:
    pinned.copy_(tokens, non_blocking=True)
