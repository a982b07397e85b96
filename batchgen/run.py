"""The job: plan, load, generate, write; its phases, its exit codes, and how it stops."""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pyarrow as pa

from batchgen import activity
from batchgen.config import Config, LogFormat, Mode, OutputOrder
from batchgen.data.output.carry import CarriedRows
from batchgen.data.output.directory import ERRORS, METRICS, OutputDir
from batchgen.data.output.finished import FinishedRows
from batchgen.data.output.writer import PartWriter
from batchgen.data.stores.store import Place
from batchgen.errors import BatchgenError, ExitCode, JobInterruptedError, UsageError
from batchgen.job.accounts.account import Account
from batchgen.job.accounts.summary import closing_lines, is_finished
from batchgen.job.calibrate import Calibration
from batchgen.job.carry import carried_rows, copy_carried
from batchgen.job.dry_run.modes import describe_ledger, show_plan, show_prompts
from batchgen.job.dry_run.outlook import remember_speed
from batchgen.job.generate import Generation
from batchgen.job.inputs import JobInputs
from batchgen.job.load import LoadedEngine, build_engine, load_job_model
from batchgen.job.planning import JobPlan, open_output, plan_job
from batchgen.job.status import describe_output
from batchgen.job.stops.breaker import Breaker, TooManyRowErrorsError
from batchgen.job.stops.interrupts import Interrupts, Stalled, StopRequested
from batchgen.job.stops.wall_time import WallTime
from batchgen.job.stops.watchdog import (
    Watchdog,
    describe_activity,
    loading_progress,
    planning_progress,
)
from batchgen.job.stream import RequestStream
from batchgen.job.verdict import judge
from batchgen.report.displays import make_progress
from batchgen.report.progress import Progress
from batchgen.runtime.model import resolve_device
from batchgen.text import printable


def run(config: Config, resolved_yaml: str) -> ExitCode:
    """Do what ``mode`` says.

    Args:
        config: checked, with absolute paths.
        resolved_yaml: the same as text, stored with the results.

    Raises:
        UsageError: something cannot be used; nothing was generated.
        EngineError: the engine cannot go on; finished rows are kept.
        JobInterruptedError: a signal came, or the time is over; finished rows are kept.
        TooManyRowErrorsError: so many rows fail that it stopped early; finished rows are kept.
    """
    if config.mode is Mode.status:
        print(printable(describe_output(config)))
        return ExitCode.DONE
    is_run = config.mode is Mode.run
    progress = make_progress(
        as_json=config.log.format is LogFormat.json,
        every_s=config.log.every_s,
        # A plan or a preview is no news of the job.
        prometheus_file=config.log.prometheus_file if is_run else None,
        output=config.output.dir,
    )
    code = ExitCode.UNEXPECTED
    try:
        code = _do(config, resolved_yaml, progress)
    except BatchgenError as error:
        code = error.exit_code
        raise
    finally:
        progress.close(code)
    return code


def _do(config: Config, resolved_yaml: str, progress: Progress) -> ExitCode:
    wall_time = WallTime(config.budget.wall_time_s)
    with Interrupts(
        alarm_s=wall_time.stop_after_s, alarm_reason=wall_time.reason, say=progress.say
    ) as interrupts:
        interrupts.check()
        if config.mode is Mode.preview:
            with _watched("planning", config, interrupts, progress):
                show_prompts(config, progress)
            return ExitCode.DONE
        if config.mode is Mode.plan:
            with _watched("planning", config, interrupts, progress):
                show_plan(config, progress)
            return ExitCode.DONE
        account = Account(config, resolved_yaml, progress)
        job = _Job(config, resolved_yaml, progress, interrupts, wall_time, account)
        try:
            return job.run()
        except (JobInterruptedError, StopRequested) as error:
            if job.was_too_short(error):
                raise JobInterruptedError(f"{error}; {job.what_took_the_time()}") from error
            raise


@dataclass
class _Job:
    """One ``mode=run`` job."""

    config: Config
    resolved_yaml: str
    progress: Progress
    interrupts: Interrupts
    wall_time: WallTime
    account: Account
    generation: Generation | None = None

    def run(self) -> ExitCode:
        with ExitStack() as watch:
            watch.enter_context(_watched("planning", self.config, self.interrupts, self.progress))
            return self._run(watch)

    def _run(self, watch: ExitStack) -> ExitCode:
        config = self.config
        inputs = JobInputs.open(config)
        for warning in inputs.warnings():
            self.progress.say(warning, level="warning")
        for note in inputs.notes():
            self.progress.say(note)
        calibration = Calibration(config.sampling, inputs)
        device = resolve_device(config.model.device).type
        with OutputDir(config.output.dir, overwrite=config.output.overwrite) as output:
            with self.progress.phase("plan"):
                finished = open_output(config, inputs, output, self.resolved_yaml, device)
                if is_finished(output, finished, config.output.order):
                    return self._settle(inputs, output, finished)
                planned = plan_job(config, inputs, output, finished)
                copy_carried(inputs, output)
                inputs.source.refuse_changes(advice="; start again once it stays as it is")
                self.progress.say(planned.describe())
            watch.close()
            self.interrupts.check()
            try:
                self._generate(inputs, planned, output, finished, calibration)
                return self._finish(inputs, planned, output, calibration)
            except UsageError:
                raise
            except (BatchgenError, StopRequested) as error:
                self.account.write_broken_off(inputs, planned, output, error)
                raise

    def was_too_short(self, error: BaseException) -> bool:
        """Whether the wall time ended before a single row did, as it will in the next run."""
        is_over = bool(self.wall_time.reason) and self.wall_time.reason in str(error)
        return is_over and (self.generation is None or not self.generation.rows_put)

    def what_took_the_time(self) -> str:
        """Return where the time went of a run that generated nothing, and what to set."""
        spent = {name: s for name, s in self.progress.phase_s.items() if s >= 0.05}
        phases = " and ".join(f"the phase {name} took {s:.1f} s" for name, s in spent.items())
        enough = math.ceil(2 * sum(spent.values())) + 1
        return (
            f"no row was finished: {phases or 'the time was over at once'}. The same command would "
            f"end here again: set budget.wall_time_s={max(enough, 60)} or more"
        )

    def _settle(self, inputs: JobInputs, output: OutputDir, finished: FinishedRows) -> ExitCode:
        """Give the verdict of an output whose rows are all done: it is the output's, not a run's.

        ``errors.max_rate`` may be another than in the run that ended it.
        """
        rate = self.config.errors.max_rate
        code, message = judge(len(finished.error_row_indices), inputs.num_rows, rate)
        if code is not ExitCode.DONE:
            output.withhold_success()
        elif not output.is_complete:
            output.mark_success()
        self.account.revise(output, code, message)
        said = _finished_already(finished, output.path)
        rows, failed = finished.num_rows, finished.num_errors
        self.progress.say(said, event="finished", rows=rows, failed=failed)
        if message:
            self.progress.say(message)
        return code

    def _generate(
        self,
        inputs: JobInputs,
        planned: JobPlan,
        output: OutputDir,
        before: FinishedRows,
        calibration: Calibration,
    ) -> None:
        config = self.config
        stream = RequestStream(
            planned.store,
            planned.plan,
            inputs.sampling,
            inputs.tokenizer,
            inputs.limits.max_model_len,
            config.pool.block_size,
            inputs.grammars,
            inputs.bad_words,
        )
        breaker = _breaker(config, inputs, planned, before)
        is_idle = breaker.is_tripped or not (len(planned.plan.order) or calibration.asks_model)
        self.account.note_generation(None, None, planned)
        loaded = None if is_idle else self._load(inputs, planned)
        output.begin_work()
        try:
            with carried_rows(inputs, output) as carried:
                self._run_engine(
                    stream,
                    planned,
                    loaded,
                    breaker,
                    output,
                    output.marked(inputs.output_schema),
                    carried,
                    before.num_errors,
                )
            self.interrupts.check()
        except StopRequested as error:
            left = planned.total_rows - output.finished_rows(inputs.id_type).num_rows
            raise JobInterruptedError(
                f"{error}; {left} of {planned.total_rows} rows are left, the finished ones are "
                f"in {output.path}; run the same command again to go on"
            ) from error
        finally:
            self.account.note_generation(loaded, self.generation, planned)
        if breaker.is_tripped:
            self._refuse_to_go_on(inputs, planned, output)
        if loaded is not None:
            calibration.ask(loaded.engine)
            self.account.note_generation(loaded, self.generation, planned)
            generate_s = self.progress.phase_s.get("generate", 0.0)
            remember_speed(config, inputs, loaded, generate_s, planned.plan.max_output_tokens)

    def _run_engine(
        self,
        stream: RequestStream,
        planned: JobPlan,
        loaded: LoadedEngine | None,
        breaker: Breaker,
        output: OutputDir,
        schema: pa.Schema,
        carried: CarriedRows | None,
        errors_before: int,
    ) -> None:
        rows_per_part = self.config.output.rows_per_part
        # Held until the writer has closed: its pending rows are finished work.
        with (
            self.interrupts.held(),
            PartWriter(output.path, schema, rows_per_part=rows_per_part, carried=carried) as writer,
        ):
            self.generation = Generation(
                planned=planned,
                stream=stream,
                writer=writer,
                progress=self.progress,
                interrupts=self.interrupts,
                wall_time=self.wall_time,
                breaker=breaker,
                stall_s=self.config.engine.stall_s,
                errors_before=errors_before,
            )
            self.generation.put_planning_errors()
            if loaded is not None:
                with output.appended(METRICS) as metrics:
                    self.generation.run(loaded, metrics)

    def _refuse_to_go_on(self, inputs: JobInputs, planned: JobPlan, output: OutputDir) -> None:
        """End a hopeless run, unless it was at its end.

        Raises:
            TooManyRowErrorsError: rows are left.
        """
        finished = output.finished_rows(inputs.id_type)
        if planned.all_done(finished):
            return
        output.write_errors(inputs.source, finished.error_row_indices)
        kinds = ", ".join(f"{count} {kind}" for kind, count in finished.errors_by_type.items())
        raise TooManyRowErrorsError(
            f"errors.max_rate={self.config.errors.max_rate}: {finished.num_errors} of "
            f"{inputs.num_rows} rows have failed ({kinds}), so the run stops early; "
            f"{planned.total_rows - finished.num_rows} of {planned.total_rows} rows are left. "
            f"The finished ones are in {output.path}, the failed input rows in "
            f"{output.path / ERRORS}. Raise errors.max_rate to go on; "
            "output.retry_errors=true runs the failed rows again"
        )

    def _load(self, inputs: JobInputs, planned: JobPlan) -> LoadedEngine:
        with (
            self.progress.phase("load"),
            _watched("loading", self.config, self.interrupts, self.progress),
        ):
            model = load_job_model(self.config)
            loaded = build_engine(
                self.config,
                model,
                eos_token_ids=inputs.eos_token_ids,
                future=planned.plan.future,
                say=self.progress.say,
            )
            self.progress.say(describe_ledger(loaded.ledger, planned))
        return loaded

    def _finish(
        self,
        inputs: JobInputs,
        planned: JobPlan,
        output: OutputDir,
        calibration: Calibration,
    ) -> ExitCode:
        with self.progress.phase("write"):
            finished = output.finished_rows(inputs.id_type)
            if not planned.all_done(finished):
                raise BatchgenError(
                    f"rows are missing in {output.path} although the run ended; run the same "
                    f"command again, and please report this"
                )
            output.write_errors(inputs.source, finished.error_row_indices)
            output.write_empty_part_if_none(inputs.output_schema)
            self.account.extra |= calibration.apply(output)
            if self.config.output.order is OutputOrder.input:
                output.sort_by_input(self.config.output.rows_per_part)
            rate = self.config.errors.max_rate
            code, message = judge(len(finished.error_row_indices), inputs.num_rows, rate)
            summary = self.account.write(inputs, planned, output, code, message, is_complete=True)
            if code is ExitCode.DONE:
                output.mark_success()
            else:
                output.withhold_success()
        closing = closing_lines(summary, output.path, self.account.failures)
        self.progress.say(closing, event="summary", figures=summary)
        if message:
            self.progress.say(message)
        return code


@contextmanager
def _watched(
    phase: str, config: Config, interrupts: Interrupts, progress: Progress
) -> Iterator[None]:
    """Let a watchdog end a phase before the engine runs, where it makes no progress."""
    activity.note(phase)
    stall_s = config.engine.stall_s
    if stall_s is None:
        yield
        return
    with Watchdog(
        stall_s,
        progress=lambda: loading_progress(stall_s) if phase == "loading" else planning_progress(),
        lacking=f"{phase} made no progress",
        describe=describe_activity,
        say=progress.say,
        give_up=lambda error: interrupts.give_up(Stalled(error)),
        rescue=lambda: None,
    ):
        yield


def _breaker(config: Config, inputs: JobInputs, planned: JobPlan, before: FinishedRows) -> Breaker:
    """Give the breaker, with the rows that failed in earlier runs and in planning."""
    return Breaker(
        config.errors.max_rate,
        inputs.num_rows,
        num_failed=len(before.error_row_indices) + planned.failed_rows,
    )


def _finished_already(finished: FinishedRows, path: Place) -> str:
    said = f"all {finished.num_rows} rows are in {path} already"
    if finished.num_errors:
        said += f", {finished.num_errors} of them failed; output.retry_errors=true runs them again"
    return said
