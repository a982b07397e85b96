"""A GPU through torch.cuda."""

from collections.abc import Callable

import torch

from batchgen.runtime.device.api import Device, Event, Graph, GraphPool, HostDevice, Stream


class _CudaEvent:
    def __init__(self) -> None:
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def is_done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self.event.synchronize()


class _CudaStream:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def run(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def record(self, event: Event) -> None:
        assert isinstance(event, _CudaEvent)
        event.event.record(self._stream)

    def wait_for(self, event: Event) -> None:
        assert isinstance(event, _CudaEvent)
        self._stream.wait_event(event.event)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        # torch gives memory back to the stream that was current when it was allocated.
        with torch.cuda.stream(self._stream):
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._stream.device)


class _CudaGraphPool:
    def __init__(self, torch_device: torch.device) -> None:
        self._device = torch_device
        self._stream = torch.cuda.Stream(torch_device)  # type: ignore[no-untyped-call]
        self._memory = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], None]) -> Graph:
        current = torch.cuda.current_stream(self._device)
        graph = torch.cuda.CUDAGraph()
        # This context puts the current stream back where a capture fails.
        with torch.cuda.stream(self._stream):
            self._stream.wait_stream(current)
            # What libraries and Triton set up at first use cannot be captured; some of it
            # belongs to a stream.
            work()
            # Threads that have nothing to do with this may use the device meanwhile.
            with torch.cuda.graph(
                graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"
            ):
                work()
        current.wait_stream(self._stream)
        return graph


class CudaDevice:
    """See :class:`batchgen.runtime.device.api.Device`.

    The compute stream is the one that is current when this is made: what was allocated and
    loaded before needs no fence.
    """

    has_graphs = True

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self.compute: Stream = _CudaStream(torch.cuda.current_stream(torch_device))

    def new_stream(self) -> Stream:
        """See :meth:`Device.new_stream`."""
        stream = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        return _CudaStream(stream)

    def new_event(self) -> Event:
        """See :meth:`Device.new_event`."""
        return _CudaEvent()

    def new_graph_pool(self) -> GraphPool:
        """See :meth:`Device.new_graph_pool`."""
        return _CudaGraphPool(self.torch_device)

    def trim(self) -> None:
        """See :meth:`Device.trim`."""
        torch.cuda.empty_cache()

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """See :meth:`Device.pinned`."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def device_of(torch_device: torch.device) -> Device:
    """Return the device behind torch's name."""
    return CudaDevice(torch_device) if torch_device.type == "cuda" else HostDevice()
