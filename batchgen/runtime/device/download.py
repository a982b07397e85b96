"""Copy a step's tokens to the host: one asynchronous copy, one event to wait for."""

import torch

from batchgen.engine.step import IntArray
from batchgen.runtime.device.api import Device, Event

_FIRST_TOKENS = 512


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
