"""A GPU's streams, events and graphs, as far as torch's own signatures can prove them."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, create_autospec, patch

import pytest
import torch

from batchgen.runtime.device.cuda import CudaDevice

_GPU = torch.device("cuda", 1)
_NAMES = (
    "Stream", "Event", "CUDAGraph", "graph", "stream", "current_stream", "graph_pool_handle",
    "empty_cache",
)  # fmt: skip


@pytest.fixture
def cuda() -> Iterator[Any]:
    """Stand-ins for torch.cuda; a call that torch's own would refuse is refused."""
    stand_ins = {name: create_autospec(getattr(torch.cuda, name)) for name in _NAMES}
    for name in ("graph", "stream"):
        stand_ins[name].return_value = MagicMock()
    with patch.multiple(torch.cuda, **stand_ins):
        yield SimpleNamespace(**stand_ins)


@contextmanager
def _noting(order: list[str], name: str) -> Iterator[None]:
    order.append(f"into the {name}")
    yield
    order.append(f"out of the {name}")


def test_events_order_streams_and_the_host(cuda: Any) -> None:
    device = CudaDevice(_GPU)
    link, event = device.new_stream(), device.new_event()
    done: list[str] = []
    device.compute.run(lambda: done.append("work"))
    device.compute.record(event)
    link.wait_for(event)
    event.wait()
    event.is_done()
    device.trim()
    assert done == ["work"]
    cuda.current_stream.assert_called_once_with(_GPU)
    cuda.Stream.assert_called_once_with(_GPU)
    cuda_event = cuda.Event.return_value
    cuda_event.record.assert_called_once_with(cuda.current_stream.return_value)
    cuda.Stream.return_value.wait_event.assert_called_once_with(cuda_event)
    cuda_event.synchronize.assert_called_once_with()
    cuda_event.query.assert_called_once_with()
    cuda.empty_cache.assert_called_once_with()


def test_work_is_captured_after_it_ran_once_where_it_is_captured(cuda: Any) -> None:
    order: list[str] = []
    side, current = cuda.Stream.return_value, cuda.current_stream.return_value
    cuda.stream.side_effect = lambda stream: _noting(order, "stream")
    cuda.graph.side_effect = lambda *given, **named: _noting(order, "graph")
    side.wait_stream.side_effect = lambda stream: order.append("side waits")
    current.wait_stream.side_effect = lambda stream: order.append("current waits")
    graph = CudaDevice(_GPU).new_graph_pool().capture(lambda: order.append("work"))
    assert graph is cuda.CUDAGraph.return_value
    cuda.graph.assert_called_once_with(
        graph,
        pool=cuda.graph_pool_handle.return_value,
        stream=side,
        capture_error_mode="thread_local",
    )
    side.wait_stream.assert_called_once_with(current)
    current.wait_stream.assert_called_once_with(side)
    assert order == [
        "into the stream", "side waits", "work", "into the graph", "work", "out of the graph",
        "out of the stream", "current waits",
    ]  # fmt: skip


def test_memory_belongs_to_the_stream_whose_work_uses_it(cuda: Any) -> None:
    order: list[str] = []
    cuda.stream.side_effect = lambda stream: _noting(order, "stream")
    link = CudaDevice(_GPU).new_stream()
    cuda.Stream.return_value.device = torch.device("cpu")
    empty = torch.empty

    def note(*size: Any, **given: Any) -> torch.Tensor:
        order.append("allocated")
        return empty(*size, **given)

    with patch.object(torch, "empty", note):
        assert link.allocate(12).shape == (12,)
    cuda.stream.assert_called_once_with(cuda.Stream.return_value)
    assert order == ["into the stream", "allocated", "out of the stream"]
