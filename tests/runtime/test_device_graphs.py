"""Decode steps as graphs, on a device whose graphs run the recorded operators again."""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchgen.engine.core import EngineCore
from batchgen.engine.step import StepPlan
from batchgen.runtime import model as model_module
from batchgen.runtime.attention import ModelForward
from batchgen.runtime.attention_metadata import AttentionMetadata
from batchgen.runtime.device.api import HostDevice
from batchgen.runtime.device.graphs import (
    MOST_GRAPH_ROWS,
    DecodeGraphs,
    GraphStep,
    capture_sizes,
    graph_shapes,
    host_reads,
)
from batchgen.runtime.executor import ModelExecutor
from batchgen.runtime.kv_cache import KVCache
from batchgen.runtime.memory_profile import full_step
from batchgen.runtime.model import LoadedModel, ModelSource, load_model
from batchgen.runtime.shared_prefixes import SharedPrefix, SharedRun, shared_runs
from batchgen.sampling import SamplingParams
from tests.support.drive import make_requests, make_scheduler, run_all
from tests.support.model_device import ModelDevice, Temper
from tests.support.recorded_graphs import RecordedGraphPool
from tests.support.sample_batch import OneSample, sample_batch
from tests.support.tensor_attention import TensorAttention
from tests.support.tiny_models import save

MOST_ROWS, MOST_KEYS, BLOCK_SIZE = 7, 64, 4
NONE = np.zeros((0, 2), dtype=np.int64)


def _load(family: str, directory: Path) -> LoadedModel:
    return load_model(
        ModelSource(str(save(family, directory))),
        dtype="float32",
        device=torch.device("cpu"),
        max_model_len=None,
    )


@pytest.fixture(scope="module", autouse=True)
def _only_operators() -> Iterator[None]:
    """No layers of our own in C: a recorder of operators does not see them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_module, "can_fuse", lambda device, dtype: False)
        yield


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return _load("llama", Path(tmp_path_factory.mktemp("llama")))


class _Run:
    """An engine whose decode steps may run as graphs."""

    def __init__(
        self,
        loaded: LoadedModel,
        device: Any,
        *,
        graphs: bool = True,
        ahead: bool = False,
        num_blocks: int = 80,
        patience: int = 0,
        say: Callable[[str], None] = pytest.fail,
    ) -> None:
        self.cache = KVCache(
            loaded.layers,
            num_blocks,
            BLOCK_SIZE,
            num_swap_blocks=8,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        attention = TensorAttention()
        self.graphs = None
        if graphs:
            self.graphs = DecodeGraphs(
                device,
                ModelForward(loaded.model),
                self.cache,
                attention,
                max_rows=MOST_ROWS,
                max_keys=MOST_KEYS,
                say=say,
                patience=patience,
            )
        self.executor = ModelExecutor(loaded.model, self.cache, attention, device, self.graphs)
        self.scheduler = make_scheduler(
            num_blocks, BLOCK_SIZE, budget=24, swap_blocks=8, max_num_seqs=MOST_ROWS, eos=(2, 30)
        )
        self.engine = EngineCore(self.scheduler, self.executor, overlap=ahead)

    def outputs(self, params: list[SamplingParams] | None = None) -> list[list[int]]:
        """Rows of different lengths, more than fit at once: they leave and others come."""
        params = params or [
            SamplingParams(max_tokens=4 + 3 * i, temperature=0.9 * (i % 2), min_tokens=3 * (i % 3))
            for i in range(9)
        ]
        prompts = [[*range(3, 9), 20 + i] for i in range(len(params))]
        finished = run_all(self.engine, make_requests(prompts, params))
        return [request.output_token_ids for request in finished]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("temper", Temper)
def test_tokens_are_the_same_with_graphs(loaded: LoadedModel, temper: Temper, ahead: bool) -> None:
    expected = _Run(loaded, HostDevice(), graphs=False).outputs()
    device = ModelDevice(temper)
    run = _Run(loaded, device, ahead=ahead)
    assert run.outputs() == expected
    assert run.executor.graph_steps == device.replays > 15
    # Chunks and prompts go kernel by kernel.
    assert run.executor.eager_steps > 0
    assert run.executor.graph_steps + run.executor.eager_steps == run.engine.stats.steps
    # Rows leave one by one: several sizes, each captured once.
    sizes = [shape.num_rows for shape in run.graphs._graphs]
    assert len(set(sizes)) == len(sizes) == len(device.graph_pools[0].graphs) >= 3


@pytest.mark.parametrize("ahead", [False, True])
def test_tokens_are_the_same_with_graphs_where_rows_make_room(
    loaded: LoadedModel, ahead: bool
) -> None:
    params = [
        SamplingParams(max_tokens=14, temperature=0.9 * (i % 2), ignore_eos=True) for i in range(8)
    ]
    expected = _Run(loaded, HostDevice(), graphs=False).outputs(params)
    run = _Run(loaded, ModelDevice(Temper.LATE), ahead=ahead, num_blocks=17)
    assert run.outputs(params) == expected
    assert run.scheduler.counters.swapped_in_blocks > 0
    assert run.executor.graph_steps > 15


@pytest.mark.parametrize("left_out", ["token_ids", "positions", "numbers"])
def test_an_input_that_is_not_copied_to_where_the_graph_looks_is_a_wrong_token(
    loaded: LoadedModel, left_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = _Run(loaded, HostDevice(), graphs=False).outputs()
    set_up = GraphStep.set_up

    def set_up_the_others(step: GraphStep) -> torch.Tensor:
        target = getattr(step.bucket, left_out)
        before = target.clone()
        set_up(step)
        target.copy_(before)
        return step.bucket.token_ids

    monkeypatch.setattr(GraphStep, "set_up", set_up_the_others)
    assert _Run(loaded, ModelDevice(Temper.EARLY)).outputs() != expected


def test_a_rung_is_captured_when_it_was_wanted_often_enough(loaded: LoadedModel) -> None:
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (8, 8, 14, 14)]
    run = _Run(loaded, ModelDevice(Temper.EARLY), patience=4)
    run.outputs(params)
    # Seven decode steps of four rows, then six of two. The largest bucket was captured first.
    assert [shape.num_rows for shape in run.graphs._graphs] == [MOST_ROWS, 4, 2]
    assert run.executor.graph_steps == (7 - 4) + (6 - 4)


def test_no_more_graphs_are_captured_than_memory_was_counted_for(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchgen.runtime.device.graphs._MOST_GRAPHS", 2)
    expected = _Run(loaded, HostDevice(), graphs=False).outputs()
    device = ModelDevice(Temper.EARLY)
    run = _Run(loaded, device)
    assert run.graphs.most_graphs == 2
    assert run.outputs() == expected
    assert len(device.graph_pools[0].graphs) == 2


def test_rows_whose_prompts_are_logged_go_kernel_by_kernel(loaded: LoadedModel) -> None:
    run = _Run(loaded, ModelDevice(Temper.EARLY))
    plan = _plan([(9, 1), (5, 1)])
    assert run.executor.prepare(plan).body.__class__ is GraphStep
    given = replace(plan, samples=replace(plan.samples, given=np.array([0])))
    assert run.executor.prepare(given).body.__class__ is not GraphStep


_NOT_PERMITTED = RuntimeError("operation not permitted when stream is capturing")


@pytest.mark.parametrize(
    ("error", "good"),
    [(_NOT_PERMITTED, 0), (_NOT_PERMITTED, 2), (torch.OutOfMemoryError("no room"), 0)],
)
def test_where_capturing_fails_the_run_goes_on_without_and_the_user_is_told(
    loaded: LoadedModel, error: Exception, good: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = _Run(loaded, HostDevice(), graphs=False).outputs()
    capture = RecordedGraphPool.capture

    def refuse(self: RecordedGraphPool, work: Any) -> Any:
        if len(self.graphs) == good:
            raise error
        return capture(self, work)

    monkeypatch.setattr(RecordedGraphPool, "capture", refuse)
    lines: list[str] = []
    run = _Run(loaded, ModelDevice(Temper.LATE), ahead=True, say=lines.append)
    assert run.outputs() == expected
    assert len(lines) == 1
    assert lines[0].startswith("no CUDA graphs") and str(error) in lines[0]
    assert (run.executor.graph_steps > 0) == (good > 0)


def test_where_memory_holds_no_further_graph_those_that_there_are_go_on(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = _Run(loaded, HostDevice(), graphs=False).outputs()
    capture = RecordedGraphPool.capture
    held: list[weakref.ref[torch.Tensor]] = []
    lines: list[str] = []
    device = ModelDevice(Temper.LATE)
    run = _Run(loaded, device, ahead=True, say=lines.append)
    steps_before: list[int] = []

    def refuse(self: RecordedGraphPool, work: Any) -> Any:
        if len(self.graphs) < 2:
            return capture(self, work)
        states = torch.ones(1000)
        held.append(weakref.ref(states))
        steps_before.append(run.executor.graph_steps)
        raise torch.OutOfMemoryError("no room")

    def trim() -> None:
        # What the failed capture held can be given back.
        assert held[0]() is None

    monkeypatch.setattr(RecordedGraphPool, "capture", refuse)
    assert run.graphs is not None
    monkeypatch.setattr(run.graphs, "_trim", trim)
    # A second time, so that there are steps again that the first graphs hold.
    assert [run.outputs(), run.outputs()] == [expected] * 2
    assert lines == ["no more than 2 CUDA graphs: capturing one failed: no room"]
    # It is not tried again.
    assert len(steps_before) == 1
    assert run.executor.graph_steps > steps_before[0]


def test_a_model_that_reads_the_device_is_not_captured(tmp_path: Path) -> None:
    mixture = _load("qwen3_moe", tmp_path)
    # Transformers' plain way through the experts looks at which of them have rows.
    mixture.model.config._experts_implementation = "eager"
    device, lines = ModelDevice(Temper.EARLY), list[str]()
    expected = _Run(mixture, HostDevice(), graphs=False).outputs()
    assert _Run(mixture, device, say=lines.append).outputs() == expected
    assert device.replays == len(device.graph_pools[0].graphs) == 0
    assert len(lines) == 1
    assert "makes the host wait for the device" in lines[0]


def test_what_no_graph_can_hold_is_found_before_it_is_captured(loaded: LoadedModel) -> None:
    run = _Run(loaded, HostDevice(), graphs=False)
    step = run.executor.prepare(full_step(6, 6, BLOCK_SIZE, max_row_tokens=40))
    assert host_reads(lambda: run.executor.logits(step)) == []
    ones = torch.ones(3)
    for work in (
        lambda: ones.max().item(),
        lambda: ones[ones > 0],
        ones.nonzero,
        lambda: torch.repeat_interleave(ones, torch.tensor([1, 2, 0])),
        lambda: ones.to("meta"),
    ):
        assert len(host_reads(work)) > 0
    assert host_reads(lambda: (ones.double() + 1)[torch.tensor([2, 0])].copy_(ones[:2])) == []


# -- capture sizes -----------------------------------------------------------------------


@given(st.integers(1, 2000))
def test_a_rung_is_never_much_wider_than_its_step(max_rows: int) -> None:
    sizes = capture_sizes(max_rows)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == min(max_rows, MOST_GRAPH_ROWS)
    for rows in range(1, sizes[-1] + 1):
        bucket = sizes[int(np.searchsorted(sizes, rows))]
        assert rows <= bucket < 2 * rows or bucket == rows == 1
        assert rows < 16 or bucket <= rows + rows // 4


def _plan(rows: list[tuple[int, int]], shared_blocks: list[int] | None = None) -> StepPlan:
    """A decode step of (context, 1) rows, each with blocks of its own but leading common ones."""
    width = max(-(-context // BLOCK_SIZE) for context, _ in rows)
    tables = np.zeros((len(rows), width), dtype=np.int32)
    for row, (context, _) in enumerate(rows):
        count = -(-context // BLOCK_SIZE)
        tables[row, :count] = row * width + np.arange(count)
        if row and shared_blocks is not None:
            common = min(shared_blocks[row - 1], count - 1, -(-rows[row - 1][0] // BLOCK_SIZE) - 1)
            tables[row, :common] = tables[row - 1, :common]
    contexts = np.array([context for context, _ in rows])
    blocks = tables[np.arange(len(rows)), (contexts - 1) // BLOCK_SIZE].astype(np.int64)
    return StepPlan(
        step=0,
        token_ids=np.full(len(rows), 5),
        positions=contexts - 1,
        slots=blocks * BLOCK_SIZE + (contexts - 1) % BLOCK_SIZE,
        query_starts=np.arange(len(rows) + 1),
        context_lens=contexts,
        block_tables=tables,
        samples=sample_batch([OneSample(SamplingParams())] * len(rows)),
        swap_out=NONE,
        swap_in=NONE,
        copies=NONE,
    )


@st.composite
def _decode_steps(draw: st.DrawFn) -> StepPlan:
    num_rows = draw(st.integers(1, 40))
    contexts = draw(st.lists(st.integers(1, 60), min_size=num_rows, max_size=num_rows))
    shared = draw(st.lists(st.integers(0, 14), min_size=num_rows, max_size=num_rows))
    return _plan([(context, 1) for context in contexts], shared)


@given(plan=_decode_steps(), sharing=st.sampled_from(SharedPrefix))
def test_a_step_takes_the_narrowest_graph_that_holds_it_with_all_that_its_rows_share(
    plan: StepPlan, sharing: SharedPrefix
) -> None:
    runs = shared_runs(plan, BLOCK_SIZE, sharing)
    sizes = capture_sizes(64)
    num_rows = sizes[int(np.searchsorted(sizes, plan.num_rows))]
    layouts = [
        AttentionMetadata(shape, BLOCK_SIZE)
        for shape in graph_shapes(num_rows, 15, 60, shares=sharing is not SharedPrefix.OFF)
    ]
    fitting = [inputs for inputs in layouts if inputs.fits(plan) and inputs.holds(plan, runs)]
    levels = _depth(runs, plan.num_rows)
    assert bool(fitting) == (levels <= 2)
    if not fitting:
        return
    chosen = fitting[0].shape
    few = levels == 1 and len(runs) <= 4
    assert chosen.num_levels == (0 if not levels else 1 if few else 2)
    # What comes by way of narrow tables is what was written there at once.
    direct = np.empty(fitting[0].size, dtype=np.int32)
    fitting[0].fill(direct, plan, runs)
    narrow = AttentionMetadata(replace(chosen, width=plan.block_tables.shape[1]), BLOCK_SIZE)
    numbers = np.empty(narrow.size, dtype=np.int32)
    narrow.fill(numbers, plan, runs)
    cleared = np.empty(fitting[0].size, dtype=np.int32)
    fitting[0].clear(cleared)
    target = torch.from_numpy(cleared)
    fitting[0].take(narrow, torch.from_numpy(numbers), target)
    np.testing.assert_array_equal(target.numpy(), direct)


def _depth(runs: list[SharedRun], num_rows: int) -> int:
    """Count how many runs a row is in, at most."""
    levels = np.zeros(num_rows, dtype=np.int64)
    for run in runs:
        levels[run.first : run.end] += 1
    return int(levels.max())
