"""CUDA graphs of decode steps: one launch for a forward pass of hundreds.

A decode step of few rows is bound by the host that launches its kernels. A graph launches them
all at once, but only with the shapes and addresses that it was captured with. So graphs are
captured for some row counts (:func:`capture_sizes`, as vLLM's), and a step is padded to the next
of them: padding rows have slot -1 and length 0, and their results are discarded. A step's
arrays are copied to where its graph reads them. All graphs share one memory pool, since no two
run at once; the largest is captured first, so that the others fit into it (after vLLM and
nano-vllm).

Capturing costs as much as some steps: a size is captured once it was wanted as often. The
sampler is not captured: it differs from step to step.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from traceback import clear_frames
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from batchgen.engine.step import StepPlan
from batchgen.runtime.attention import LayerAttention, ModelForward
from batchgen.runtime.attention_metadata import AttentionMetadata, InputShape
from batchgen.runtime.device.api import Device, Graph
from batchgen.runtime.device.transfers import Put
from batchgen.runtime.kv_cache import KVCache
from batchgen.runtime.shared_prefixes import SharedRun

# Operators whose result's shape or value the host has to know.
_READING = frozenset({
    "_local_scalar_dense", "nonzero", "nonzero_numpy", "masked_select", "_unique2", "unique_dim",
    "unique_consecutive", "equal", "is_nonzero", "bincount",
})  # fmt: skip
_COPYING = frozenset({"_to_copy", "copy_"})


def host_reads(work: Callable[[], object]) -> list[str]:
    """Run work and list its operators that read the device, or copy from or to another."""
    with _NotingReads() as noting:
        work()
    return sorted(noting.found)


class _NotingReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            # Made of others, which were looked at.
            return result
        result = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name in _READING or _is_masked(name, args) or _is_ragged(name, kwargs):
            self.found.add(name)
        elif name in _COPYING and _crosses(name, args, result):
            self.found.add(f"{name} between devices")
        return result


def _is_masked(name: str, args: Any) -> bool:
    """Whether an index is a mask, whose places have to be counted."""
    if name not in ("index", "index_put", "index_put_", "_index_put_impl_"):
        return False
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])


def _is_ragged(name: str, kwargs: Any) -> bool:
    """Whether numbers on the device say how long the result is."""
    return name == "repeat_interleave" and kwargs.get("output_size") is None


def _crosses(name: str, args: Any, result: Any) -> bool:
    source = args[0] if name == "_to_copy" else args[1]
    return bool(source.device != result.device)


# Beyond this many rows a step is bound by the device, which a graph makes no faster.
MOST_GRAPH_ROWS = 512
# Runs of rows with a common prefix in a graph of one level: more would make its launch over
# them larger than the work of a step that has few.
_FEW_RUNS = 4


def capture_sizes(max_rows: int) -> list[int]:
    """Return the sizes up to the first that holds all rows, or the most that a graph has.

    From 16 rows on no step is padded by more than a quarter.
    """
    max_rows = min(max_rows, MOST_GRAPH_ROWS)
    sizes = [1]
    while sizes[-1] < max_rows:
        last = sizes[-1]
        # 1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, ...
        power = 1 << (last.bit_length() - 1)
        sizes.append(last + max(1, power // 4 if last >= 16 else min(power, 4)))
    sizes[-1] = max_rows
    return sizes


def graph_shapes(num_rows: int, width: int, max_keys: int, *, shares: bool) -> list[InputShape]:
    """Return what graphs of some rows have room for: the first that holds a step takes it.

    Without shared prefixes; with few of them, one a row; with any number, two a row.

    Args:
        num_rows: of a bucket.
        width: entries of a block table.
        max_keys: most tokens of a row.
        shares: whether prefixes may be shared at all.
    """
    shapes = [InputShape(num_rows, num_rows, width, 1, max_keys)]
    levels = {1: min(_FEW_RUNS, num_rows // 2), 2: num_rows} if shares and num_rows > 1 else {}
    for num_levels, num_segments in levels.items():
        shape = InputShape(
            num_tokens=num_rows,
            num_rows=num_rows,
            width=width,
            max_query_len=1,
            max_keys=max_keys,
            num_segments=num_segments,
            num_places=num_levels * num_rows,
            num_levels=num_levels,
            max_segment_len=num_rows,
        )
        shapes.append(shape)
    return shapes


# Steps of a bucket that run without a graph: about what capturing one costs.
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

    def over(
        self, inputs: AttentionMetadata, array: torch.Tensor, cache: KVCache
    ) -> LayerAttention:
        """Attend to what [inputs.size] int32 on the device say when the kernels run."""


@dataclass(frozen=True, slots=True)
class _Bucket:
    """A forward pass over fixed tensors, and where it looks for its numbers.

    Attributes:
        inputs: where attention finds a step in ``numbers``.
        token_ids, positions: [rows] int64.
        numbers: [inputs.size] int32.
    """

    inputs: AttentionMetadata
    token_ids: torch.Tensor
    positions: torch.Tensor
    numbers: torch.Tensor


@dataclass(frozen=True, slots=True)
class GraphStep:
    """A step that a graph runs, its numbers on their way to the device.

    Attributes:
        graph: what was captured over the bucket.
        bucket: the bucket.
        narrow: where ``numbers`` are; its tables are as wide as the step's.
        token_ids, positions, numbers: the step's, padded to the bucket's rows.
        rows: [S] int64 rows whose logits are wanted; None if they are the first S.
        num_samples: S.
        all_logits: [most rows, V] float32, which the graph writes.
    """

    graph: Graph
    bucket: _Bucket
    narrow: AttentionMetadata
    token_ids: torch.Tensor
    positions: torch.Tensor
    numbers: torch.Tensor
    rows: torch.Tensor | None
    num_samples: int
    all_logits: torch.Tensor

    def set_up(self) -> torch.Tensor:
        """Copy the step's numbers to where the graph looks; return its token ids there."""
        self.bucket.token_ids.copy_(self.token_ids)
        self.bucket.positions.copy_(self.positions)
        self.bucket.inputs.take(self.narrow, self.numbers, self.bucket.numbers)
        return self.bucket.token_ids

    def logits(self) -> torch.Tensor:
        """Run the graph; return [S, V] float32 logits, which the caller may change."""
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
        say: takes the reason if there can be no graphs, and all steps run without them then;
            and where memory holds no more of them.
        patience: steps of a bucket that run without a graph before it is captured.

    Attributes:
        sizes: row counts that graphs are captured for.
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
        self._graphs: dict[InputShape, tuple[Graph, _Bucket]] = {}
        self._logits: torch.Tensor | None = None
        width = -(-max_keys // cache.block_size)
        self.sizes = capture_sizes(max_rows)
        # For each bucket, the narrowest first.
        self._layouts = [
            [self._inputs(s) for s in graph_shapes(n, width, max_keys, shares=attention.shares)]
            for n in self.sizes
        ]
        self.most_graphs = min(_MOST_GRAPHS, sum(map(len, self._layouts)))
        self._every_row = torch.arange(self.sizes[-1], device=self._where)

    def prepare(self, plan: StepPlan, put: Put) -> GraphStep | None:
        """Upload a step for the graph that holds it; None if none does.

        Args:
            plan: the step. A graph holds it where every row has one token, and of no token
                but the sampled ones the logits are wanted.
            put: uploads an array.
        """
        samples = plan.samples
        is_decode = plan.num_tokens == plan.num_rows <= self.sizes[-1]
        if self._is_off or not is_decode or not len(samples) or len(samples.given):
            return None
        runs = self._attention.shared_runs(plan, self._cache.block_size)
        inputs = self._layout_for(plan, runs)
        if inputs is None or not self._is_captured(inputs) or self._logits is None:
            return None
        graph, bucket = self._graphs[inputs.shape]
        shape = inputs.shape
        narrow = self._inputs(replace(shape, width=plan.block_tables.shape[1]))
        numbers = np.empty(narrow.size, dtype=np.int32)
        narrow.fill(numbers, plan, runs)
        is_every_row = len(samples) == plan.num_rows
        return GraphStep(
            graph=graph,
            bucket=bucket,
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
        at = int(np.searchsorted(self.sizes, num_rows))
        return self._capture(self._layouts[at][0])

    def _layout_for(self, plan: StepPlan, runs: list[SharedRun]) -> AttentionMetadata | None:
        """Find the graph that holds a step and all that its rows share."""
        at = int(np.searchsorted(self.sizes, plan.num_rows))
        for inputs in self._layouts[at]:
            if inputs.fits(plan) and inputs.holds(plan, runs):
                return inputs
        return None

    def _inputs(self, shape: InputShape) -> AttentionMetadata:
        return AttentionMetadata(shape, self._cache.block_size)

    def _is_captured(self, inputs: AttentionMetadata) -> bool:
        """Whether there is a graph; one that was wanted often enough is captured."""
        if inputs.shape in self._graphs:
            return True
        self._wanted[inputs.shape] += 1
        is_worth_it = self._wanted[inputs.shape] > self._patience
        return is_worth_it and len(self._graphs) < self.most_graphs and self._capture(inputs)

    def _capture(self, inputs: AttentionMetadata) -> bool:
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
        reads = host_reads(lambda: found.append(self._run(self._bucket(largest))))
        if reads:
            self._stop(f"the model makes the host wait for the device ({', '.join(reads)})")
            return
        self._logits = torch.empty(found[0].shape, dtype=torch.float32, device=self._where)
        self._graphs[largest.shape] = self._captured(largest)

    def _captured(self, inputs: AttentionMetadata) -> tuple[Graph, _Bucket]:
        assert self._logits is not None
        bucket, logits = self._bucket(inputs), self._logits[: inputs.shape.num_rows]

        @torch.inference_mode()
        def work() -> None:
            logits.copy_(self._run(bucket))

        return self._graph_pool.capture(work), bucket

    def _run(self, bucket: _Bucket) -> torch.Tensor:
        attention = self._attention.over(bucket.inputs, bucket.numbers, self._cache)
        logits_at = self._every_row[: len(bucket.token_ids)]
        return self._forward(bucket.token_ids, bucket.positions, logits_at, attention)

    def _bucket(self, inputs: AttentionMetadata) -> _Bucket:
        """Lay out padding alone: what is run before a step is there writes nothing."""
        numbers = np.empty(inputs.size, dtype=np.int32)
        inputs.clear(numbers)
        token_ids, positions = torch.zeros(
            (2, inputs.shape.num_rows), dtype=torch.int64, device=self._where
        )
        return _Bucket(inputs, token_ids, positions, torch.from_numpy(numbers).to(self._where))

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
