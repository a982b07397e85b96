"""The generate phase: planned requests into the engine, finished rows into the writer."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from batchgen.data import failpoints
from batchgen.data.output.files import OutputError
from batchgen.data.output.schema import RowResult
from batchgen.data.output.writer import PartWriter
from batchgen.engine.request import Request
from batchgen.job.load import LoadedEngine
from batchgen.job.planning import JobPlan
from batchgen.job.state import describe_state, step_metrics
from batchgen.job.stops.breaker import Breaker
from batchgen.job.stops.drain import Drain
from batchgen.job.stops.interrupts import Interrupts, StopRequested
from batchgen.job.stops.wall_time import WallTime
from batchgen.job.stops.watchdog import Watchdog
from batchgen.job.stream import RequestStream
from batchgen.report.eta import Eta, Left, Pace
from batchgen.report.metrics import MetricsLog
from batchgen.report.percentiles import Percentiles
from batchgen.report.progress import Progress, Snapshot


@dataclass
class Generation:
    """One run's generate phase, and what may end it early.

    Attributes:
        planned: the plan.
        stream: its requests.
        writer: takes the output rows.
        progress: shows how it stands.
        interrupts: signals; held back while this runs.
        wall_time: the time there is.
        breaker: ends a hopeless run.
        stall_s: ``engine.stall_s``; None for no watchdog.
        ttft_ms: times to the first token so far.
        eta: estimates the time left.
        rows_put: output rows so far.
        errors_put: of them, the failed ones.
        errors_before: failed output rows of earlier runs.
        computed: tokens computed up to the last step.
    """

    planned: JobPlan
    stream: RequestStream
    writer: PartWriter
    progress: Progress
    interrupts: Interrupts
    wall_time: WallTime
    breaker: Breaker
    stall_s: float | None
    ttft_ms: Percentiles = field(default_factory=Percentiles)
    eta: Eta = field(default_factory=Eta)
    rows_put: int = 0
    errors_put: int = 0
    errors_before: int = 0
    computed: int = 0

    def put_planning_errors(self) -> None:
        """Write the rows that failed before the run and have no output yet.

        Raises:
            StopRequested: a signal came.
        """
        for row in self.stream.planning_errors(self.planned.done):
            self._put(row)
            self.interrupts.check()

    def run(self, loaded: LoadedEngine, metrics_path: Path) -> None:
        """Run the engine until its rows have ended, or until it is time to stop.

        Raises:
            EngineError: the engine failed, or stood still.
            OutputError: the disk takes no rows or figures.
            StopRequested: a signal came, or the time is over and rows are left.
        """
        drain = Drain(self.stream.requests())

        def snapshot() -> Snapshot:
            return self._snapshot(loaded)

        with (
            self.progress.phase("generate"),
            _metrics_log(metrics_path) as sample,
            self._watched(loaded),
        ):
            started = perf_counter()
            self.wall_time.begin_steps()
            for finished in loaded.engine.run(drain.requests()):
                for request in finished:
                    if request.error is None:
                        self.eta.note_output(request.num_output_tokens)
                    for row in self.stream.results(request, started):
                        self._put_result(row)
                self.progress.update(snapshot)
                sample(lambda: step_metrics(loaded, snapshot()))
                failpoints.reached("engine.step")
                self._look_around(loaded, drain)
                if self.breaker.is_tripped:
                    break
            self.progress.update(snapshot, last=True)
        if not drain.is_open:
            self._stop_for_time(loaded)
        if loaded.debug is not None and not self.breaker.is_tripped:
            loaded.debug.check_end()

    def _watched(self, loaded: LoadedEngine) -> ExitStack:
        """Give a context in which the watchdog looks on, where one is wanted."""
        stack = ExitStack()
        if self.stall_s is not None:
            counters = loaded.engine.scheduler.counters
            watchdog = Watchdog(
                self.stall_s,
                # Tokens computed again are no progress: rows that drive each other out for
                # ever compute nothing else.
                progress=lambda: counters.prefill_tokens + counters.sampled_tokens,
                describe=self._describe(loaded),
                say=self.progress.say,
                give_up=self.interrupts.give_up,
                rescue=self.writer.flush,
            )
            stack.enter_context(watchdog)
        return stack

    def _look_around(self, loaded: LoadedEngine, drain: Drain) -> None:
        """Between two steps: signals, the time, and whoever asks for the state."""
        if self.interrupts.take_dump_request():
            self.progress.say(self._describe(loaded)())
        self.interrupts.check()
        wall_time, write_s = self.wall_time, self.writer.stats.last_write_s
        self.eta.note_step(wall_time.note_step(), self._take_step_tokens(loaded))
        if wall_time.limit_s is None:
            return
        if wall_time.is_over(write_s):
            self._stop_for_time(loaded)
        if drain.is_open and wall_time.should_drain(write_s):
            drain.close(loaded.engine.scheduler)
            self.progress.say(
                f"{wall_time.reason} is near: no row starts any more, "
                f"{loaded.engine.scheduler.num_unfinished} that run are brought to their end"
            )

    def _take_step_tokens(self, loaded: LoadedEngine) -> int:
        """Count the tokens computed since the last call."""
        counters = loaded.engine.scheduler.counters
        before, self.computed = self.computed, counters.computed_tokens
        return self.computed - before

    def _stop_for_time(self, loaded: LoadedEngine) -> None:
        """Stop, unless every row has ended all the same.

        Raises:
            StopRequested: rows are left.
        """
        ended = loaded.engine.scheduler.counters.finished_requests
        if ended < self.planned.plan.requests:
            raise StopRequested(f"stopped by {self.wall_time.reason}")

    def _describe(self, loaded: LoadedEngine) -> Callable[[], str]:
        return lambda: describe_state(loaded, self.stream, self.writer)

    def _put_result(self, row: RowResult) -> None:
        self._put(row)
        # Every input row has exactly one output row of this number.
        if row.sample_index == 0:
            self.breaker.add(failed=row.status == "error")
        if row.completion_tokens is not None:
            self.wall_time.note_output(row.completion_tokens)

    def _put(self, row: RowResult) -> None:
        self.writer.put(row)
        self.rows_put += 1
        self.errors_put += row.status == "error"
        if row.time_to_first_token_ms is not None:
            self.ttft_ms.add(row.time_to_first_token_ms)

    def _snapshot(self, loaded: LoadedEngine) -> Snapshot:
        scheduler, plan = loaded.engine.scheduler, self.planned.plan
        counters = scheduler.counters
        requests_left = plan.requests - counters.finished_requests
        begun = [*scheduler.running, *scheduler.swapped]
        admitted = counters.prefill_tokens + counters.cached_tokens
        return Snapshot(
            rows=self.rows_put + self.planned.done_rows,
            total_rows=self.planned.total_rows,
            errors=self.errors_before + self.errors_put,
            prefill_tokens=counters.prefill_tokens,
            completion_tokens=counters.sampled_tokens,
            running=len(scheduler.running),
            waiting=requests_left - len(begun),
            swapped=len(scheduler.swapped),
            pool_use=scheduler.blocks.pool.num_owned / scheduler.blocks.pool.num_blocks,
            hit_rate=counters.cached_tokens / admitted if admitted else 0.0,
            eta_s=self._seconds_left(loaded, begun, requests_left - len(begun)),
        )

    def _seconds_left(
        self, loaded: LoadedEngine, begun: Sequence[Request], waiting: int
    ) -> float | None:
        stats, counters = loaded.engine.stats, loaded.engine.scheduler.counters
        pace = Pace(
            seconds=perf_counter(),
            prefill_tokens=counters.prefill_tokens,
            output_tokens=counters.sampled_tokens,
            prefill_s=stats.prefill_s,
            decode_s=stats.decode_s,
        )
        expected = self.planned.plan.expected_prefill_tokens
        left = Left(
            prefill_tokens=max(0, expected - counters.prefill_tokens) if waiting else 0,
            waiting=waiting,
            lengths=[request.num_output_tokens for request in begun],
            limits=[request.max_total_tokens - request.num_prompt_tokens for request in begun],
        )
        return self.eta.seconds_left(pace, left)


@contextmanager
def _metrics_log(path: Path) -> Iterator[Callable[[Callable[[], Mapping[str, Any]]], None]]:
    """Open the log of figures; give what writes a line to it if it is time to.

    Raises:
        OutputError: the disk does not take it.
    """
    log = MetricsLog(path)

    def sample(take: Callable[[], Mapping[str, Any]]) -> None:
        try:
            log.sample(take)
        except OSError as error:
            raise OutputError.at(path, error) from error

    with ExitStack() as stack:
        try:
            stack.enter_context(log)
        except OSError as error:
            raise OutputError.at(path, error) from error
        yield sample
