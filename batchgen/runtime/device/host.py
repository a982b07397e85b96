"""A CPU as a device: work is done when it is handed over, so every event is done."""

from collections.abc import Callable

import torch

from batchgen.runtime.device.api import Event, GraphPool, Stream


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
