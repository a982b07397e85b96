"""What the runtime asks of a device; nothing else in it names a stream or an event.

Work is handed to a stream as a function that enqueues it. On a GPU the function is called at
once and what it enqueues runs later; a test's device may call it as late, or as early, as the
fences allow, so a missing fence shows as a wrong token.
"""

from collections.abc import Callable
from typing import Protocol

import torch


class Event(Protocol):
    """A place in a stream's work."""

    def is_done(self) -> bool:
        """Whether all work before the place is done; True before it was ever recorded."""

    def wait(self) -> None:
        """Keep the host waiting until it is."""


class Stream(Protocol):
    """Work that the device does in order."""

    def run(self, work: Callable[[], None]) -> None:
        """Enqueue work."""

    def record(self, event: Event) -> None:
        """Set an event after all work enqueued so far."""

    def wait_for(self, event: Event) -> None:
        """Let later work wait until an event's place is reached; the host does not wait."""

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Allocate memory of the device for this stream's work.

        Once dropped it is given to none but later work of this stream, so that work under way
        that still reads it is done by then.

        Returns:
            [num_bytes] uint8, unwritten.
        """


class Graph(Protocol):
    """Captured work, with the shapes and addresses that it had then."""

    def replay(self) -> None:
        """Enqueue it on the current stream."""


class GraphPool(Protocol):
    """Memory that graphs share, of which no two are under way at once."""

    def capture(self, work: Callable[[], None]) -> Graph:
        """Do work once, after all that was enqueued so far, then capture it.

        Raises:
            RuntimeError: it cannot be captured, or there is no memory for it.
        """


class Device(Protocol):
    """One device.

    Attributes:
        torch_device: its name in torch.
        has_graphs: whether it can capture work.
        compute: the stream of the model's work, which is torch's current one.
    """

    torch_device: torch.device
    has_graphs: bool
    compute: Stream

    def new_stream(self) -> Stream:
        """Make a stream beside the compute stream."""

    def new_event(self) -> Event:
        """Make an event."""

    def new_graph_pool(self) -> GraphPool:
        """Make memory for graphs."""

    def trim(self) -> None:
        """Return back memory that is kept in hand for later; waits for the device."""

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Allocate host memory that the device copies from and to by itself.

        Returns:
            [num_bytes] uint8, unwritten.
        """


class _HostEvent:
    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class _HostStream:
    def run(self, work: Callable[[], None]) -> None:
        work()

    def record(self, event: Event) -> None:
        pass

    def wait_for(self, event: Event) -> None:
        pass

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)


class HostDevice:
    """See :class:`batchgen.runtime.device.api.Device`."""

    torch_device = torch.device("cpu")
    has_graphs = False

    def __init__(self) -> None:
        self.compute: Stream = _HostStream()

    def new_stream(self) -> Stream:
        """See :meth:`Device.new_stream`; all streams of a CPU are one."""
        return self.compute

    def new_event(self) -> Event:
        """See :meth:`Device.new_event`."""
        return _HostEvent()

    def new_graph_pool(self) -> GraphPool:
        """See :meth:`Device.new_graph_pool`; a CPU has none."""
        raise RuntimeError("a CPU has no graphs")

    def trim(self) -> None:
        """See :meth:`Device.trim`; nothing is kept here."""

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """See :meth:`Device.pinned`; memory is memory here."""
        return torch.empty(num_bytes, dtype=torch.uint8)
