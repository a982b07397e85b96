"""CUDA graphs of decode steps: one launch for a forward pass of hundreds.

A decode step of few rows is bound by the host that launches its kernels. A graph launches them
all at once, but only with the shapes and addresses that it was captured with. So there is a
ladder of row counts, and a step takes the next rung above its own: rows behind its own are
padding (slot -1, length 0), whose results nobody reads. A step's numbers are copied to where
its graph looks for them. All graphs share their memory, since no two run at once; the largest
is captured first, so that the others find room in it (after vLLM and nano-vllm).

Capturing costs as much as some steps: a rung is captured when it has been wanted as often.
What chooses tokens is not captured: it differs from step to step.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from traceback import clear_frames
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from batchgen.engine.step import StepPlan
from batchgen.runtime.attention import LayerAttention
from batchgen.runtime.device.api import Device, Graph
from batchgen.runtime.device.host_reads import host_reads
from batchgen.runtime.device.ladder import graph_shapes, ladder
from batchgen.runtime.device.upload import Put
from batchgen.runtime.forward import ModelForward
from batchgen.runtime.kv_cache import KVCache
from batchgen.runtime.layout import SharedRun
from batchgen.runtime.paged_inputs import InputShape, PagedInputs

# Steps of a rung that run without a graph: about what capturing one costs.
_PATIENCE_STEPS = 16
# Graphs that are captured at most: each takes some memory of its own.
_MOST_GRAPHS = 32


@runtime_checkable
class CapturableBackend(Protocol):
    """A backend whose launches depend on a shape alone, so that a graph can hold them.

    Attributes:
        shares: whether rows may attend together to what they share.
    """

    shares: bool

    def shared_runs(self, plan: StepPlan, block_size: int) -> list[SharedRun]:
        """Find what rows attend to together."""

    def over(self, inputs: PagedInputs, array: torch.Tensor, cache: KVCache) -> LayerAttention:
        """Attend to what [inputs.size] int32 on the device say when the kernels run."""


@dataclass(frozen=True, slots=True)
class _Rung:
    """A forward pass over fixed tensors, and where it looks for its numbers.

    Attributes:
        inputs: where attention finds a step in ``numbers``.
        token_ids, positions: [rows] int64.
        numbers: [inputs.size] int32.
    """

    inputs: PagedInputs
    token_ids: torch.Tensor
    positions: torch.Tensor
    numbers: torch.Tensor


@dataclass(frozen=True, slots=True)
class GraphStep:
    """A step that a graph runs, its numbers on their way to the device.

    Attributes:
        graph: what was captured over the rung.
        rung: the rung.
        narrow: where ``numbers`` are; its tables are as wide as the step's.
        token_ids, positions, numbers: the step's, padded to the rung's rows.
        rows: [S] int64 rows whose logits are wanted; None where they are the first S.
        num_samples: S.
        all_logits: [most rows, V] float32, which the graph writes.
    """

    graph: Graph
    rung: _Rung
    narrow: PagedInputs
    token_ids: torch.Tensor
    positions: torch.Tensor
    numbers: torch.Tensor
    rows: torch.Tensor | None
    num_samples: int
    all_logits: torch.Tensor

    def set_up(self) -> torch.Tensor:
        """Copy the step's numbers to where the graph looks; give its token ids there."""
        self.rung.token_ids.copy_(self.token_ids)
        self.rung.positions.copy_(self.positions)
        self.rung.inputs.take(self.narrow, self.numbers, self.rung.numbers)
        return self.rung.token_ids

    def logits(self) -> torch.Tensor:
        """Run the graph; give [S, V] float32 logits, which the caller may change."""
        self.graph.replay()
        if self.rows is None:
            return self.all_logits[: self.num_samples]
        return self.all_logits.index_select(0, self.rows)


class DecodeGraphs:
    """The graphs of one model over one pool.

    Args:
        device: where they run.
        forward: the model.
        cache: the pool.
        attention: the backend.
        max_rows: rows of the largest step.
        max_keys: tokens of the longest row.
        say: is told where there can be no graphs, and all steps run without them from then on;
            and where memory holds no more of them.
        patience: steps of a rung that run without a graph before it is captured.

    Attributes:
        rungs: row counts that graphs are captured for.
        most_graphs: graphs that there are at most.
    """

    def __init__(
        self,
        device: Device,
        forward: ModelForward,
        cache: KVCache,
        attention: CapturableBackend,
        *,
        max_rows: int,
        max_keys: int,
        say: Callable[[str], None],
        patience: int = _PATIENCE_STEPS,
    ) -> None:
        self._where = device.torch_device
        self._trim = device.trim
        self._graph_pool = device.new_graph_pool()
        self._forward = forward
        self._cache = cache
        self._attention = attention
        self._say = say
        self._patience = patience
        self._is_off = False
        self._wanted: Counter[InputShape] = Counter()
        self._graphs: dict[InputShape, tuple[Graph, _Rung]] = {}
        self._logits: torch.Tensor | None = None
        width = -(-max_keys // cache.block_size)
        self.rungs = ladder(max_rows)
        # For each rung, the narrowest first.
        self._layouts = [
            [self._inputs(s) for s in graph_shapes(n, width, max_keys, shares=attention.shares)]
            for n in self.rungs
        ]
        self.most_graphs = min(_MOST_GRAPHS, sum(map(len, self._layouts)))
        self._every_row = torch.arange(self.rungs[-1], device=self._where)

    def prepare(self, plan: StepPlan, put: Put) -> GraphStep | None:
        """Upload a step for the graph that holds it; None where none does.

        Args:
            plan: the step. A graph holds it where every row has one token, and of no token
                but the sampled ones the logits are wanted.
            put: uploads an array.
        """
        samples = plan.samples
        is_decode = plan.num_tokens == plan.num_rows <= self.rungs[-1]
        if self._is_off or not is_decode or not len(samples) or len(samples.given):
            return None
        runs = self._attention.shared_runs(plan, self._cache.block_size)
        inputs = self._layout_for(plan, runs)
        if inputs is None or not self._is_captured(inputs) or self._logits is None:
            return None
        graph, rung = self._graphs[inputs.shape]
        shape = inputs.shape
        narrow = self._inputs(replace(shape, width=plan.block_tables.shape[1]))
        numbers = np.empty(narrow.size, dtype=np.int32)
        narrow.fill(numbers, plan, runs)
        is_every_row = len(samples) == plan.num_rows
        return GraphStep(
            graph=graph,
            rung=rung,
            narrow=narrow,
            token_ids=put(_padded(plan.token_ids, shape.num_rows)),
            positions=put(_padded(plan.positions, shape.num_rows)),
            numbers=put(numbers),
            rows=None if is_every_row else put(samples.rows),
            num_samples=len(samples),
            all_logits=self._logits,
        )

    def capture(self, num_rows: int) -> bool:
        """Capture the graph for so many rows that share nothing; whether there is one now."""
        at = int(np.searchsorted(self.rungs, num_rows))
        return self._capture(self._layouts[at][0])

    def _layout_for(self, plan: StepPlan, runs: list[SharedRun]) -> PagedInputs | None:
        """Find the graph that holds a step and all that its rows share."""
        at = int(np.searchsorted(self.rungs, plan.num_rows))
        for inputs in self._layouts[at]:
            if inputs.fits(plan) and inputs.holds(plan, runs):
                return inputs
        return None

    def _inputs(self, shape: InputShape) -> PagedInputs:
        return PagedInputs(shape, self._cache.block_size)

    def _is_captured(self, inputs: PagedInputs) -> bool:
        """Whether there is a graph; one that was wanted often enough is captured."""
        if inputs.shape in self._graphs:
            return True
        self._wanted[inputs.shape] += 1
        is_worth_it = self._wanted[inputs.shape] > self._patience
        return is_worth_it and len(self._graphs) < self.most_graphs and self._capture(inputs)

    def _capture(self, inputs: PagedInputs) -> bool:
        try:
            if self._logits is None:
                self._begin()
            if inputs.shape not in self._graphs and not self._is_off:
                self._graphs[inputs.shape] = self._captured(inputs)
        except torch.OutOfMemoryError as error:
            # The error knows the frames, and these the tensors, of what it ended.
            clear_frames(error.__traceback__)
            self._have_enough(f"capturing one failed: {error}")
        except RuntimeError as error:
            self._stop(f"capturing one failed: {error}")
        return inputs.shape in self._graphs and not self._is_off

    def _begin(self) -> None:
        """See whether a graph can hold the model, and capture the largest."""
        largest = self._layouts[-1][0]
        found: list[torch.Tensor] = []
        reads = host_reads(lambda: found.append(self._run(self._rung(largest))))
        if reads:
            self._stop(f"the model makes the host wait for the device ({', '.join(reads)})")
            return
        self._logits = torch.empty(found[0].shape, dtype=torch.float32, device=self._where)
        self._graphs[largest.shape] = self._captured(largest)

    def _captured(self, inputs: PagedInputs) -> tuple[Graph, _Rung]:
        assert self._logits is not None
        rung, logits = self._rung(inputs), self._logits[: inputs.shape.num_rows]

        @torch.inference_mode()
        def work() -> None:
            logits.copy_(self._run(rung))

        return self._graph_pool.capture(work), rung

    def _run(self, rung: _Rung) -> torch.Tensor:
        attention = self._attention.over(rung.inputs, rung.numbers, self._cache)
        logits_at = self._every_row[: len(rung.token_ids)]
        return self._forward(rung.token_ids, rung.positions, logits_at, attention)

    def _rung(self, inputs: PagedInputs) -> _Rung:
        """Lay out padding alone: what is run before a step is there writes nothing."""
        numbers = np.empty(inputs.size, dtype=np.int32)
        inputs.clear(numbers)
        token_ids, positions = torch.zeros(
            (2, inputs.shape.num_rows), dtype=torch.int64, device=self._where
        )
        return _Rung(inputs, token_ids, positions, torch.from_numpy(numbers).to(self._where))

    def _have_enough(self, why: str) -> None:
        """Capture no more; what was captured before took all its memory then."""
        self._trim()
        if not self._graphs:
            self._stop(why)
            return
        self.most_graphs = len(self._graphs)
        self._say(f"no more than {self.most_graphs} CUDA graphs: {why}")

    def _stop(self, why: str) -> None:
        self._is_off = True
        self._say(f"no CUDA graphs, so that small steps start slower: {why}")


def _padded(values: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]:
    padded = np.zeros(length, dtype=np.int64)
    padded[: len(values)] = values
    return padded
