"""A device whose streams do their work as late, or as early, as the fences allow.

Work handed to a stream waits in its queue. A *prompt* stream does it as soon as it may, an
idle one only when somebody has to have it: the host that waits for an event, or a stream that
does. What a fence does not hold back therefore really happens at the worst moment, and a
missing fence is a wrong number.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch

from tests.support.recorded_graphs import RecordedGraphPool


class Temper(StrEnum):
    """How the streams go about their work."""

    LATE = "all as late as possible"
    EARLY = "all at once"
    LATE_COMPUTE = "the compute stream late, the others at once"
    LATE_OTHERS = "the compute stream at once, the others late"


@dataclass(eq=False)
class Mark:
    """A place in a stream's queue."""

    stream: "ModelStream"
    is_reached: bool = False


@dataclass(eq=False)
class ModelEvent:
    """An event; waiting for one that is not done is what the device counts."""

    device: "ModelDevice"
    mark: Mark | None = None

    def is_done(self) -> bool:
        return self.mark is None or self.mark.is_reached

    def wait(self) -> None:
        if not self.is_done():
            self.device.host_waits += 1
            assert self.mark is not None
            self.mark.stream.run_up_to(self.mark)


@dataclass(eq=False)
class ModelStream:
    """A queue of work, marks that it sets and marks that it waits for.

    Attributes:
        allocated: addresses of memory that was allocated for its work.
    """

    device: "ModelDevice"
    is_prompt: bool
    queue: deque[tuple[str, Any]] = field(default_factory=deque)
    allocated: set[int] = field(default_factory=set)

    def run(self, work: Callable[[], None]) -> None:
        self._enqueue("work", work)

    def record(self, event: ModelEvent) -> None:
        event.mark = Mark(self)
        self._enqueue("mark", event.mark)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        # Work that is still queued has views of it: it cannot be given to others too early.
        tensor = torch.empty(num_bytes, dtype=torch.uint8)
        self.allocated.add(tensor.data_ptr())
        return tensor

    def wait_for(self, event: ModelEvent) -> None:
        if event.mark is not None:
            self._enqueue("wait", event.mark)

    def run_up_to(self, mark: Mark) -> None:
        """Do all work before a mark, and what that work waits for in other streams."""
        while not mark.is_reached:
            if not self._step():
                blocking = self.queue[0][1]
                blocking.stream.run_up_to(blocking)

    def run_what_may(self) -> bool:
        """Do work until the queue is empty or waits; whether any was done."""
        did = False
        while self._step():
            did = True
        return did

    def _step(self) -> bool:
        if not self.queue:
            return False
        kind, what = self.queue[0]
        if kind == "wait" and not what.is_reached:
            return False
        self.queue.popleft()
        if kind == "work":
            what()
        elif kind == "mark":
            what.is_reached = True
        return True

    def _enqueue(self, kind: str, what: Any) -> None:
        self.queue.append((kind, what))
        self.device.settle()


class ModelDevice:
    """The fake behind :class:`batchgen.runtime.device.api.Device`, on CPU tensors.

    Attributes:
        host_waits: times that the host had to wait for an event.
        replays: graphs that ran.
        graph_pools: what was captured, for each user.
    """

    torch_device = torch.device("cpu")
    has_graphs = True

    def __init__(self, temper: Temper) -> None:
        self.host_waits = 0
        self.replays = 0
        self.graph_pools: list[RecordedGraphPool] = []
        self._temper = temper
        self._streams: list[ModelStream] = []
        self._is_settling = False
        self.compute = self._new_stream(temper in (Temper.EARLY, Temper.LATE_OTHERS))

    def new_stream(self) -> ModelStream:
        return self._new_stream(self._temper in (Temper.EARLY, Temper.LATE_COMPUTE))

    def new_event(self) -> ModelEvent:
        return ModelEvent(self)

    def new_graph_pool(self) -> RecordedGraphPool:
        self.graph_pools.append(RecordedGraphPool(self.finish, self._note_replay))
        return self.graph_pools[-1]

    def trim(self) -> None:
        self.finish()

    def pinned(self, num_bytes: int) -> torch.Tensor:
        # Filled, so that what was never copied is not right by chance.
        return torch.full((num_bytes,), 0x55, dtype=torch.uint8)

    def settle(self) -> None:
        """Let the prompt streams do what they may."""
        if self._is_settling:
            return
        self._is_settling = True
        prompt = [stream for stream in self._streams if stream.is_prompt]
        while any(stream.run_what_may() for stream in prompt):
            pass
        self._is_settling = False

    def finish(self) -> None:
        """Do all that is left."""
        for stream in self._streams:
            event = self.new_event()
            stream.record(event)
            stream.run_up_to(event.mark)

    def _note_replay(self) -> None:
        self.replays += 1

    def _new_stream(self, is_prompt: bool) -> ModelStream:
        stream = ModelStream(self, is_prompt)
        self._streams.append(stream)
        return stream
