"""The pieces of gpu_check.py: a fault must show, wherever it comes from."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import memory_machines
import numpy as np
import pytest
import torch
from gpu_check_parts import command, equality, machine, prediction, syncs
from gpu_check_parts.attention_right import judge
from gpu_check_parts.batches import Shape, exact_attention, make_batch, relative_error
from gpu_check_parts.clock import time_host, time_kernels
from gpu_check_parts.context import Context
from gpu_check_parts.engines import (
    Row,
    Settings,
    make_requests,
    make_scheduler,
    ordered,
    run_rows,
)
from gpu_check_parts.forks import Part, run_part
from gpu_check_parts.models import FAMILIES, random_model
from gpu_check_parts.outcome import Check, Figure, LeftOut, PartOutcome
from gpu_check_parts.table import summary_table
from gpu_check_parts.throughput import job_work
from gpu_check_parts.workloads import WORKLOADS
from kernel_roofline import Card
from torch.autograd import DeviceType

from batchgen.engine.core import EngineCore, FinishedOutput
from batchgen.engine.step import StepOutput
from batchgen.kernels.reference import AttentionOptions, paged_attention
from tests.support.dense_attention import dense_attention
from tests.support.model_device import ModelDevice, Temper
from tests.support.tensor_attention import TensorAttention

CPU = torch.device("cpu")
DOCS = Path(__file__).resolve().parents[2] / "docs" / "gpu.md"


def _context(records: list, seconds: float = 60.0) -> Context:
    return Context(CPU, dry_run=True, seed=1, seconds=seconds, emit=records.append)


# -- processes ----------------------------------------------------------------------------


def _run(body, seconds: float = 20.0, lanes: int = 1) -> PartOutcome:
    def run(emit, seconds, lane):
        body(emit)

    return run_part(Part("it", run, lanes), seconds, lambda record: None)


def test_a_part_that_dies_leaves_its_records_and_a_failed_check() -> None:
    def dies(emit):
        emit(Figure("before", 1.0, "s"))
        os.kill(os.getpid(), signal.SIGKILL)

    outcome = _run(dies)
    assert [figure.name for figure in outcome.figures] == ["before"]
    assert [check.passed for check in outcome.checks] == [False]
    assert "-9" in outcome.checks[0].detail


def test_a_part_that_hangs_is_stopped() -> None:
    started = time.monotonic()
    outcome = _run(lambda emit: time.sleep(60), seconds=0.2)
    assert time.monotonic() - started < 20
    assert "stopped after" in outcome.failed[0].detail


def test_lanes_share_the_items_and_all_of_them_report() -> None:
    def run(emit, seconds, lane):
        context = Context(CPU, dry_run=True, seed=1, seconds=9.0, emit=emit, lane=lane, lanes=3)
        for item in context.mine(list("abcdefg")):
            context.check(item, True, str(os.getpid()))

    outcome = run_part(Part("it", run, 3), 20.0, lambda record: None)
    assert sorted(check.name for check in outcome.checks) == list("abcdefg")
    assert len({check.detail for check in outcome.checks}) == 3


def test_an_exception_of_a_part_is_a_failed_check() -> None:
    def raises(emit):
        raise ValueError("of some kind")

    assert "ValueError: of some kind" in _run(raises).failed[0].detail


def test_an_exception_of_an_attempt_names_its_place_and_the_part_goes_on() -> None:
    records: list = []
    context = _context(records)
    with context.attempt("it"):
        torch.zeros(2) + torch.zeros(3)
    context.check("next", True)
    assert [record.passed for record in records] == [False, True]
    assert "test_gpu_check.py" in records[0].detail


def test_what_there_is_no_time_for_is_named() -> None:
    records: list = []
    context = _context(records, seconds=0.0)
    assert list(context.in_time([1, 2], str)) == []
    assert records == [LeftOut("1"), LeftOut("2")]


# -- the command --------------------------------------------------------------------------


@pytest.fixture
def fake_parts(monkeypatch: pytest.MonkeyPatch) -> dict:
    def good(context):
        context.check("fine", True)

    def bad(context):
        context.check("not fine", False, "it is wrong")

    def dead(context):
        os.kill(os.getpid(), signal.SIGKILL)

    parts = {
        name: command.Entry(SimpleNamespace(run=run), 1.0)
        for name, run in (("good", good), ("bad", bad), ("dead", dead), ("last", good))
    }
    monkeypatch.setattr(command, "PARTS", parts)
    return parts


@pytest.mark.parametrize(("only", "code"), [("good", 0), ("bad", 1), ("dead", 1)])
def test_the_exit_code_says_whether_a_check_failed(fake_parts, only, code) -> None:
    assert command.main(["--dry-run", "--only", only]) == code


def test_all_parts_run_whatever_became_of_the_ones_before(fake_parts, tmp_path, capfd) -> None:
    path = tmp_path / "figures.json"
    assert command.main(["--dry-run", "--json", str(path)]) == 1
    shown = capfd.readouterr().out
    assert "FAIL not fine: it is wrong" in shown
    assert "| last | 1 of 1 |  |" in shown
    assert '"part": "last"' in path.read_text()


def test_without_a_gpu_it_does_not_begin(monkeypatch, capfd) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main([]) == 2
    assert "--dry-run" in capfd.readouterr().err


def test_without_what_starts_kernels_it_does_not_begin(monkeypatch, capfd) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(machine, "problem_with_launching", lambda: "there is no C compiler")
    assert command.main([]) == 2
    assert "there is no C compiler" in capfd.readouterr().err


def test_unused_time_goes_to_later_parts(fake_parts, monkeypatch) -> None:
    given = []

    def noted(part, seconds, on_record):
        given.append(seconds)
        return PartOutcome(part.name)

    options = command._parse(["--dry-run", "--budget-s", "100"])
    monkeypatch.setattr(command, "run_part", noted)
    command._run_all(options, CPU, 0)
    assert given == pytest.approx([22.5, 30, 45, 90], rel=0.01)


def test_the_table_gives_the_share_of_what_is_possible() -> None:
    outcome = PartOutcome("rates")
    for record in (
        Figure("a time", 20.0, "us", 10.0),
        Figure("a rate", 30.0, "GB/s", 40.0),
        Check("right", True),
        Check("wrong", False),
        LeftOut("late"),
    ):
        outcome.add(record)
    table = summary_table([outcome])
    assert "| rates | a time | 20 us | 10 | 50% |" in table
    assert "| rates | a rate | 30 GB/s | 40 | 75% |" in table
    assert "| rates | 1 of 2 | wrong | late |" in table


# -- what kernels are held against ----------------------------------------------------------


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_float64_attention_is_that_of_the_written_out_one(window, softcap) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(shape, generator=generator) for shape in ((5, 6, 8), (9, 2, 8), (9, 2, 12))
    )
    sinks = torch.randn(6, generator=generator)
    for each in (None, sinks):
        options = AttentionOptions(0.3, window, softcap, each)
        ours = exact_attention(query, key, value, options)
        torch.testing.assert_close(ours, dense_attention(query, key, value, options))


@pytest.mark.parametrize(("groups", "shared"), [(1, 0), (2, 8)])
def test_a_batch_is_what_its_pool_holds_and_nothing_else_may_be_read(groups, shared) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = Shape(4, 2, 8, block_size=4, dtype=torch.float32)
    rows = [(11, 1), (12, 3), (9, 1), (16, 7)]
    batch = make_batch(generator, shape, rows, groups=groups, shared=shared)
    options = AttentionOptions(0.3)
    out = paged_attention(
        batch.query, batch.key_cache, batch.value_cache, batch.query_starts.tolist(),
        batch.context_lens.tolist(), batch.block_tables.long(), options,
    )  # fmt: skip
    assert relative_error(out, batch.expected(options)) < 1e-5
    written = int((~batch.key_cache[..., 0, 0].isnan()).sum())
    assert written == sum(context for context, _ in rows) - shared * (4 - groups)
    assert (batch.block_tables[:, -1] > 1 << 20).all()


def test_an_unwritten_or_wrong_element_fails_a_check() -> None:
    out, expected = torch.zeros(4), torch.zeros(4, dtype=torch.float64)
    shape = Shape(1, 1, 8, dtype=torch.float32)
    verdicts = []
    for wrong in (0.0, float("nan"), 1e-3):
        out[2] = wrong
        verdicts.append(judge(shape, relative_error(out, expected))[0])
    assert verdicts == [True, False, False]


def test_inputs_of_a_check_depend_on_its_name_and_the_seed_alone() -> None:
    def draw(seed: int, name: str) -> float:
        context = Context(CPU, dry_run=True, seed=seed, seconds=1.0, emit=lambda record: None)
        return torch.rand(1, generator=context.generator(name)).item()

    assert draw(1, "a") == draw(1, "a")
    assert len({draw(1, "a"), draw(2, "a"), draw(1, "b")}) == 3


# -- what the engine is held against ----------------------------------------------------------


def _stock(gap: float) -> SimpleNamespace:
    """A model that finds token 5 best, and token 6 nearly so."""
    logits = torch.zeros(1, 1, 8)
    logits[..., 5], logits[..., 6] = 1.0, 1.0 - gap

    class Stock(SimpleNamespace):
        def __call__(self, input_ids):
            return SimpleNamespace(logits=logits)

    return Stock(device=CPU)


@pytest.mark.parametrize(
    ("gap", "output", "verdict"),
    [(1.0, [5, 5], "equal"), (1.0, [5, 6], "wrong at token 1"), (1e-5, [5, 6], "tie at token 1"),
     (1.0, [5], "wrong: 1 tokens")],
)  # fmt: skip
def test_only_a_near_tie_excuses_another_token(gap, output, verdict) -> None:
    row = Row([1, 2, 3], 2)
    assert equality._judge(_stock(gap), row, [5, 5], output).startswith(verdict)


class _AnyToken:
    """Executes nothing: what is planned is what counts."""

    def execute(self, plan):
        return FinishedOutput(StepOutput(np.zeros(len(plan.samples), dtype=np.int64)))


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("dry_run", [True, False])
def test_a_tight_pool_preempts_whatever_is_drawn(dry_run, family) -> None:
    window = FAMILIES[family](dry_run).to_dict().get("sliding_window")
    context = Context(CPU, dry_run=dry_run, seed=5, seconds=9.0, emit=lambda record: None)
    rows = equality.mixed_rows(context)
    for variant in equality.variants(context, rows):
        scheduler = make_scheduler(variant.settings, window)
        engine = EngineCore(scheduler, _AnyToken())
        for _ in engine.run(make_requests(rows, ordered(rows), 4096)):
            pass
        for name in variant.must_count:
            assert getattr(scheduler.counters, name) > 0, (variant.name, name)


@pytest.mark.parametrize("overlap", [True, False])
def test_steps_run_as_graphs_unless_they_may_not(overlap, monkeypatch) -> None:
    device = ModelDevice(Temper.LATE)
    monkeypatch.setattr(memory_machines, "device_of", lambda torch_device: device)
    monkeypatch.setattr(memory_machines, "choose_attention", lambda *_, **__: TensorAttention())
    loaded = random_model(FAMILIES["llama"](True), torch.float32, CPU, 3, loud=True)
    rows = [Row(list(range(3, 8 + n)), 30) for n in range(3)]
    with_graphs = Settings(40, max_num_seqs=4, overlap=overlap)
    on, off = (
        run_rows(loaded, replace(with_graphs, cuda_graphs=cuda_graphs), rows)
        for cuda_graphs in (True, False)
    )
    assert on.outputs == off.outputs
    assert on.graph_steps == device.replays > 5
    assert off.graph_steps == 0


def _event(name: str, start: int, end: int, device=DeviceType.CPU) -> SimpleNamespace:
    span = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
    return SimpleNamespace(name=name, time_range=span, device_type=device)


def _profiled(num_waits: int) -> SimpleNamespace:
    """Four steps of 10 us with a kernel each, and a wait behind them."""
    events = [_event(syncs.STEP, 10 * i, 10 * i + 10) for i in range(4)]
    events += [_event("cudaLaunchKernel", 10 * i + 2, 10 * i + 3) for i in range(4)]
    events += [_event("a kernel", 10 * i + 4, 10 * i + 9, DeviceType.CUDA) for i in range(4)]
    events += [_event("cudaStreamSynchronize", i, i + 1) for i in range(num_waits)]
    events += [_event("cudaDeviceSynchronize", 41, 60)]
    events += [_event(syncs.STEP, 0, 60, DeviceType.CUDA)]
    return SimpleNamespace(events=lambda: events)


@pytest.mark.parametrize(("waits", "passed"), [(0, True), (4, True), (5, False)])
def test_more_than_one_wait_a_step_fails(waits, passed) -> None:
    records: list = []
    syncs._report(_context(records), "it", _profiled(waits), steps=4)
    assert records[0].passed is passed
    assert [record.value for record in records[1:]] == [1, 5]


# -- time, work and predictions -------------------------------------------------------------


def test_times_are_medians_of_one_call() -> None:
    calls = [lambda: time.sleep(0.002), lambda: time.sleep(0.004)]
    for timing in (time_kernels(CPU, calls, repeats=3), time_host(CPU, calls)):
        assert 0.003 <= timing.least_s <= timing.median_s <= timing.most_s
        assert timing.least_s < 0.02


def _counted(rows: list[Row], at_once: int) -> tuple[float, float]:
    """Pairs and KV reads of rows that share one prefix, token by token."""
    shared = int((np.array(rows[0].prompt[:150]) == np.array(rows[1].prompt[:150])).sum())
    assert shared == 150
    pairs = reads = 0.0
    for index, row in enumerate(rows):
        length = len(row.prompt)
        # One of them computes the prefix, and counts as if it read it alone.
        first = 0 if index == 0 else shared
        pairs += sum(position + 1 for position in range(first, length + row.output_tokens - 1))
        for made in range(1, row.output_tokens):
            reads += length + made - first + first / at_once
    return pairs, reads


def test_the_work_of_a_job_is_that_of_its_tokens() -> None:
    rows = WORKLOADS["few_shot"].make(np.random.default_rng(3), 40, 100_000, 0.1)
    work = job_work(rows, steps=9, rows_at_once=8)
    pairs, reads = _counted(rows, 8)
    assert work.prefill_tokens == 150 + sum(len(row.prompt) - 150 for row in rows)
    assert (work.output_tokens, work.decode_tokens) == (320, 280)
    assert work.pairs == pairs
    assert work.kv_tokens_read == pytest.approx(reads, rel=0.02)


@pytest.mark.parametrize("sharing", [True, False])
def test_the_headline_counts_each_token_and_pair(sharing) -> None:
    rows, own, outputs = 7, 5, 4
    work = prediction.few_shot_work(
        rows, 30, own, outputs, rows_at_once=2, step_tokens=1000, sharing=sharing
    )
    first = 30 if sharing else 0
    pairs = rows * sum(position + 1 for position in range(first, 30 + own + outputs - 1))
    assert work.pairs == pairs
    assert work.prefill_tokens == (30 + 7 * 5 if sharing else 7 * 35)
    assert (work.output_tokens, work.decode_tokens) == (28, 21)
    assert work.steps == 14


def test_llama_8b_has_its_parameters() -> None:
    model = prediction.LLAMA_3_8B
    # 8.03 billion with norms and the embedding, which is as large as the head.
    assert model.linear_params + 2 * model.head_params == pytest.approx(8.03e9, rel=1e-3)
    assert model.kv_bytes_per_token == 131_072


def test_a_bound_is_that_of_the_slower_resource() -> None:
    work = prediction.Work(0, 0, 1, 0, 0, 1)
    model = prediction.LLAMA_3_8B
    slow_memory, slow_arithmetic = Card("", 1.0, 1e30, 1.0), Card("", 1e30, 1.0, 1.0)
    assert prediction.bound(model, work, slow_memory).seconds == (
        2 * (model.linear_params + model.head_params) + 131_072
    )
    assert prediction.bound(model, work, slow_arithmetic).seconds == 2 * model.linear_params


def test_the_docs_show_the_predictions_as_they_are_computed() -> None:
    assert prediction.headline_table() in DOCS.read_text(encoding="utf-8")


def test_the_docs_name_every_part() -> None:
    text = DOCS.read_text(encoding="utf-8")
    for name in command.PARTS:
        assert f"`{name}`" in text


def test_workloads_have_their_lengths() -> None:
    rng = np.random.default_rng(0)
    for name, workload in WORKLOADS.items():
        rows = workload.make(rng, 2000, 1000)
        mean_in = np.mean([len(row.prompt) for row in rows])
        mean_out = np.mean([row.output_tokens for row in rows])
        expected = {"few_shot": (1560, 8), "sharegpt": (205, 145), "unshared": (512, 64)}[name]
        assert (mean_in, mean_out) == pytest.approx(expected, rel=0.12)
        assert max(len(row.prompt) + row.output_tokens for row in rows) <= 2048
