"""Graphs that really run again what was recorded, over the very same tensors.

As a CUDA graph does: every operator, and every launch of a kernel, with the addresses and the
numbers that the host gave when it was captured. What the host reads or changes between two
replays is not seen, so a stale number or an input that was not copied gives a wrong result.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves


@dataclass
class RecordedGraph:
    """What was recorded, as functions that do it again."""

    steps: list[Callable[[], None]] = field(default_factory=list)

    @torch.inference_mode()
    def replay(self) -> None:
        for step in self.steps:
            step()


class Recorder(TorchDispatchMode):
    """Notes operators into a graph."""

    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)

        def again() -> None:
            new_result = func(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(new_result), strict=True):
                # A view, or what was changed in place, is there already.
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

        self.graph.steps.append(again)
        return result


class RecordedGraphPool:
    """Captures on a device that has to have done all work before, as CUDA does.

    Attributes:
        graphs: what was captured.
        recorder: of the capture under way.
    """

    def __init__(self, finish: Callable[[], None], note_replay: Callable[[], None]) -> None:
        self.graphs: list[RecordedGraph] = []
        self.recorder: Recorder | None = None
        self._finish = finish
        self._note_replay = note_replay

    def capture(self, work: Callable[[], None]) -> RecordedGraph:
        self._finish()
        work()
        graph = RecordedGraph([self._note_replay])
        with Recorder(graph) as self.recorder:
            work()
        self.recorder = None
        self.graphs.append(graph)
        return graph

    def launch(self, start: Callable[[], None]) -> None:
        """Start a kernel, whose inner workings are not operators of its caller."""
        with _disable_current_modes():
            start()
        if self.recorder is not None:
            self.recorder.graph.steps.append(start)
