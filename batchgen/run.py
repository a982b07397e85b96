"""The job: plan, load, generate, write; its phases, its exit codes, and how it stops."""

import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from batchgen.config import Config, Mode, OutputOrder
from batchgen.data.output_dir import OutputDir
from batchgen.data.schema import output_schema
from batchgen.data.writer import PartWriter
from batchgen.errors import BatchgenError, ExitCode, JobInterruptedError
from batchgen.job.inputs import JobInputs, model_source
from batchgen.job.interrupts import Interrupts, StopRequested
from batchgen.job.load import LoadedEngine, build_engine, load_job_model, plan_ledger
from batchgen.job.planning import JobPlan, open_output, plan_job
from batchgen.job.stream import RequestStream
from batchgen.job.summary import (
    engine_figures,
    is_finished,
    machine_figures,
    memory_figures,
    output_totals,
    plan_figures,
    sharing_figures,
    step_metrics,
)
from batchgen.prompts.preview import preview
from batchgen.prompts.store import PromptStore
from batchgen.report.metrics import MetricsLog
from batchgen.report.percentiles import Percentiles
from batchgen.report.progress import Progress, Snapshot
from batchgen.runtime.memory import Ledger
from batchgen.runtime.model import DTYPES, geometry_without_weights, resolve_device

_PREVIEW_ROWS = 5


def run(config: Config, resolved_yaml: str) -> ExitCode:
    """Do what ``mode`` says.

    Args:
        config: checked, with absolute paths.
        resolved_yaml: the same as text, stored with the results.

    Raises:
        UsageError: something cannot be used; nothing was generated.
        EngineError: the engine cannot go on; finished rows are kept.
        JobInterruptedError: a signal came; finished rows are kept.
    """
    progress = Progress(config.log.every_s)
    with Interrupts() as interrupts:
        if config.mode is Mode.preview:
            return _preview(config)
        if config.mode is Mode.plan:
            return _plan(config, progress)
        return _Job(config, resolved_yaml, progress, interrupts).run()


def _preview(config: Config) -> ExitCode:
    inputs = JobInputs.open(config)
    rows = config.input.limit or _PREVIEW_ROWS
    with tempfile.TemporaryDirectory() as folder:
        prompts = inputs.prompts(replace(config.input, limit=rows))
        path = Path(folder) / "prompts.arrow"
        with PromptStore.write(path, inputs.id_type, prompts) as store:
            print(preview(store, inputs.tokenizer, rows))
    return ExitCode.DONE


def _plan(config: Config, progress: Progress) -> ExitCode:
    inputs = JobInputs.open(config)
    layers = geometry_without_weights(model_source(config))
    with OutputDir(config.output.dir) as output, progress.phase("plan"):
        planned = plan_job(config, inputs, output, None)
        print(planned.plan.describe())
        dtype = DTYPES.get(config.model.dtype)
        if dtype is None:
            on_cpu = resolve_device(config.model.device).type == "cpu"
            dtype = torch.float32 if on_cpu else inputs.model_config.dtype or torch.bfloat16
        ledger = plan_ledger(config, layers, dtype) if layers else None
        if ledger is not None:
            print(_describe_ledger(ledger, planned))
        print(f"plan written to {output.path / '_plan.json'}")
    return ExitCode.DONE


def _describe_ledger(ledger: Ledger, planned: JobPlan) -> str:
    plan = planned.plan
    return ledger.describe({"p50": plan.request_tokens_p50, "p95": plan.request_tokens_p95})


@dataclass
class _Job:
    """One ``mode=run`` job."""

    config: Config
    resolved_yaml: str
    progress: Progress
    interrupts: Interrupts
    ttft_ms: Percentiles = field(default_factory=Percentiles)
    figures: dict[str, Any] = field(default_factory=dict)
    write_s: float = 0.0
    rows_put: int = 0
    errors_put: int = 0

    def run(self) -> ExitCode:
        started = time.perf_counter()
        config = self.config
        inputs = JobInputs.open(config)
        device = resolve_device(config.model.device).type
        with OutputDir(config.output.dir, overwrite=config.output.overwrite) as output:
            with self.progress.phase("plan"):
                finished = open_output(config, inputs, output, self.resolved_yaml, device)
                if is_finished(output, finished, config.output.order):
                    self.progress.say(f"all {finished.num_rows} rows are in {output.path} already")
                    return self._exit_code(len(finished.error_row_indices), inputs.num_rows)
                planned = plan_job(config, inputs, output, finished)
                self.progress.say(planned.plan.describe())
            self.interrupts.check()
            self._generate(inputs, planned, output)
            return self._finish(inputs, planned, output, started)

    def _generate(self, inputs: JobInputs, planned: JobPlan, output: OutputDir) -> None:
        config, block_size = self.config, self.config.pool.block_size
        stream = RequestStream(
            planned.store,
            planned.plan,
            inputs.sampling,
            inputs.tokenizer,
            inputs.limits.max_model_len,
            block_size,
        )
        loaded = self._load(planned) if len(planned.plan.order) else None
        output.begin_work()
        schema = output_schema(inputs.id_type)
        try:
            # Held until the writer has closed: its pending rows are finished work.
            with (
                self.interrupts.held(),
                PartWriter(
                    output.path, schema, rows_per_part=config.output.rows_per_part
                ) as writer,
            ):
                for row in stream.planning_errors(planned.done):
                    self._put(writer, row)
                    self.interrupts.check()
                if loaded is not None:
                    self._run_engine(loaded, stream, planned, writer, output)
            self.interrupts.check()
        except StopRequested as error:
            left = planned.total_rows - output.finished_rows(inputs.id_type).num_rows
            raise JobInterruptedError(
                f"{error}; {left} of {planned.total_rows} rows are left, the finished ones are "
                f"in {output.path}; run the same command again to go on"
            ) from error
        generate_s = self.progress.phase_s.get("generate", 0.0)
        self.write_s = writer.stats.write_s
        self.figures = {
            **engine_figures(loaded, self.ttft_ms, generate_s),
            **sharing_figures(loaded, planned, config),
            **memory_figures(loaded),
        }

    def _load(self, planned: JobPlan) -> LoadedEngine:
        with self.progress.phase("load"):
            model = load_job_model(self.config)
            loaded = build_engine(
                self.config, model, future=planned.plan.future, say=self.progress.say
            )
            self.progress.say(_describe_ledger(loaded.ledger, planned))
        return loaded

    def _run_engine(
        self,
        loaded: LoadedEngine,
        stream: RequestStream,
        planned: JobPlan,
        writer: PartWriter,
        output: OutputDir,
    ) -> None:
        def snapshot() -> Snapshot:
            return self._snapshot(loaded, planned)

        metrics = MetricsLog(output.path / "_metrics.jsonl")
        with self.progress.phase("generate"), metrics:
            started = time.perf_counter()
            for finished in loaded.engine.run(stream.requests()):
                for request in finished:
                    for row in stream.results(request, started):
                        self._put(writer, row)
                self.progress.update(snapshot)
                metrics.sample(lambda: step_metrics(loaded, snapshot()))
                self.interrupts.check()
            self.progress.update(snapshot, last=True)
            if loaded.debug is not None:
                loaded.debug.check_end()

    def _put(self, writer: PartWriter, row: Any) -> None:
        writer.put(row)
        self.rows_put += 1
        self.errors_put += row.status == "error"
        if row.time_to_first_token_ms is not None:
            self.ttft_ms.add(row.time_to_first_token_ms)

    def _snapshot(self, loaded: LoadedEngine, planned: JobPlan) -> Snapshot:
        scheduler, plan = loaded.engine.scheduler, planned.plan
        counters = scheduler.counters
        requests_left = plan.requests - counters.finished_requests
        mean_output = counters.sampled_tokens / max(1, counters.started_requests)
        prefill_left = max(0, plan.expected_prefill_tokens - counters.prefill_tokens)
        admitted = counters.prefill_tokens + counters.cached_tokens
        return Snapshot(
            rows=self.rows_put + planned.done_rows,
            total_rows=planned.total_rows,
            errors=self.errors_put,
            prefill_tokens=counters.prefill_tokens,
            completion_tokens=counters.sampled_tokens,
            remaining_tokens=prefill_left + round(requests_left * mean_output),
            running=len(scheduler.running),
            waiting=requests_left - len(scheduler.running) - len(scheduler.swapped),
            swapped=len(scheduler.swapped),
            pool_use=scheduler.blocks.pool.num_owned / scheduler.blocks.pool.num_blocks,
            hit_rate=counters.cached_tokens / admitted if admitted else 0.0,
        )

    def _finish(
        self, inputs: JobInputs, planned: JobPlan, output: OutputDir, started: float
    ) -> ExitCode:
        with self.progress.phase("write"):
            finished = output.finished_rows(inputs.id_type)
            if not planned.all_done(finished):
                raise BatchgenError(
                    f"rows are missing in {output.path} although the run ended; run the same "
                    f"command again, and please report this"
                )
            output.write_errors(inputs.source, finished.error_row_indices)
            output.write_empty_part_if_none(output_schema(inputs.id_type))
            if self.config.output.order is OutputOrder.input:
                output.sort_by_input(self.config.output.rows_per_part)
            summary = self._summary(planned, output, started)
            output.write_json("_summary.json", summary)
            output.mark_success()
        self.progress.say(_closing_lines(summary, output.path))
        return self._exit_code(len(finished.error_row_indices), inputs.num_rows)

    def _summary(self, planned: JobPlan, output: OutputDir, started: float) -> dict[str, Any]:
        phases = self.progress.phase_s
        return {
            **output_totals(output),
            "output_order": self.config.output.order.value,
            **plan_figures(planned),
            **self.figures,
            "wall_s": time.perf_counter() - started,
            "phases": {
                "load_s": phases.get("load", 0.0),
                "plan_s": phases["plan"],
                "generate_s": phases.get("generate", 0.0),
                "write_s": self.write_s,
            },
            **machine_figures(),
        }

    def _exit_code(self, failed: int, rows: int) -> ExitCode:
        limit = self.config.errors.max_rate
        if limit is not None and rows and failed / rows > limit:
            self.progress.say(
                f"{failed} of {rows} rows failed, more than errors.max_rate={limit} allows"
            )
            return ExitCode.TOO_MANY_ROW_ERRORS
        return ExitCode.DONE


def _closing_lines(summary: dict[str, Any], path: Path) -> str:
    failed = sum(summary["errors"].values())
    lines = [f"done: {summary['rows']} rows in {path}, {summary['ok']} ok, {failed} failed"]
    if summary["steps"]:
        lines.append(
            f"prefill: {summary['prefill_tokens_computed']:,} tokens computed; floor "
            f"{summary['prefill_tokens_floor_block']:,} by blocks, "
            f"{summary['prefill_tokens_floor']:,} by the token"
        )
        lines.append(
            f"generated {summary['generated_tokens']:,} tokens in "
            f"{summary['phases']['generate_s']:.1f} s, {summary['preemptions']} preemptions"
        )
        lines += summary["sharing"]
    return "\n".join(lines)
