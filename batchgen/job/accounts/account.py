"""The account of a run: what stands in `_summary.json` and on the page, however it ends."""

import json
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from batchgen.config import Config
from batchgen.data.output.directory import SUMMARY, OutputDir
from batchgen.errors import BatchgenError, ExitCode
from batchgen.job.accounts.failures import failure_lines
from batchgen.job.accounts.report import write_report
from batchgen.job.accounts.summary import (
    engine_figures,
    machine_figures,
    memory_figures,
    plan_figures,
    sharing_figures,
)
from batchgen.job.accounts.totals import OutputTotals
from batchgen.job.generate import Generation
from batchgen.job.inputs import JobInputs
from batchgen.job.load import LoadedEngine
from batchgen.job.planning import JobPlan, find_advice
from batchgen.job.stops.interrupts import StopRequested
from batchgen.report.percentiles import Percentiles
from batchgen.report.progress import Progress


@dataclass
class Account:
    """Collects a run's figures while it lasts.

    Attributes:
        config: the job.
        resolved_yaml: the same as text.
        progress: times the phases.
        extra: figures of further steps, by name.
        failures: what is to be said of the rows that failed, once the account is written.
    """

    config: Config
    resolved_yaml: str
    progress: Progress
    extra: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    _figures: dict[str, Any] = field(default_factory=dict)
    _generation: Generation | None = None
    _started: float = field(default_factory=time.perf_counter)

    def note_generation(
        self, loaded: LoadedEngine | None, generation: Generation | None, planned: JobPlan
    ) -> None:
        """Keep what the engine counted, so that its memory can go.

        Args:
            loaded: None where no row was left to compute, or nothing could be loaded.
            generation: None where the run did not get that far.
            planned: what was to be done.
        """
        self._generation = generation
        ttft_ms = generation.ttft_ms if generation else Percentiles()
        generate_s = self.progress.phase_s.get("generate", 0.0)
        self._figures = {
            **engine_figures(loaded, ttft_ms, generate_s),
            **sharing_figures(loaded, planned, self.config),
            **memory_figures(loaded),
        }

    def write(
        self,
        inputs: JobInputs,
        planned: JobPlan,
        output: OutputDir,
        code: ExitCode,
        message: str,
        *,
        is_complete: bool = False,
    ) -> dict[str, Any]:
        """Write ``_summary.json`` and ``_report.html``.

        Args:
            inputs: what was read.
            planned: what was to be done.
            output: what there is of it.
            code: how the run ends.
            message: why, where that is not 0.
            is_complete: whether every input row has its output.

        Returns:
            What the summary holds.

        Raises:
            OutputError: the disk does not take them.
        """
        totals = OutputTotals.read(output)
        outcome = _outcome(code, message) | {"is_complete": is_complete}
        summary = outcome | self._summary(planned, totals)
        if code in (ExitCode.DONE, ExitCode.TOO_MANY_ROW_ERRORS) and summary["sharing"] is not None:
            advice = find_advice(inputs, planned)
            summary["sharing"] += [advice.describe()] if advice else []
        output.write_json("_summary.json", summary)
        try:
            self.failures = failure_lines(totals, summary, output.path)
            write_report(self.config, self.resolved_yaml, inputs, planned, output, totals, summary)
        except BatchgenError:
            raise
        except Exception as failure:
            # All rows are there: a page that cannot be drawn must not keep a job from its end.
            self.progress.say(f"no report could be made of this run: {failure!r}")
        return summary

    def revise(self, output: OutputDir, code: ExitCode, message: str) -> None:
        """Bring the verdict in ``_summary.json`` up to date, for an output that is left as it is.

        Raises:
            OutputError: the disk does not take it.
        """
        summary = json.loads(output.read(SUMMARY))
        revised = summary | _outcome(code, message) | {"is_complete": True}
        if revised != summary:
            output.write_json(SUMMARY, revised)

    def write_broken_off(
        self,
        inputs: JobInputs,
        planned: JobPlan,
        output: OutputDir,
        error: BatchgenError | StopRequested,
    ) -> None:
        """Write both for a run that an error ends.

        Neither hides what ended the run, nor holds up one that is told to stop again.
        """
        code = error.exit_code if isinstance(error, BatchgenError) else ExitCode.INTERRUPTED
        try:
            self.write(inputs, planned, output, code, str(error))
        except StopRequested:
            pass
        except Exception as failure:
            self.progress.say(f"no account could be given of this run: {failure!r}")

    def _summary(self, planned: JobPlan, totals: OutputTotals) -> dict[str, Any]:
        phases, generation = self.progress.phase_s, self._generation
        rows_put = generation.rows_put if generation else 0
        return {
            "ended": datetime.now(UTC).isoformat(timespec="seconds"),
            **totals.figures(),
            "total_rows": planned.total_rows,
            "engine_figures_cover": {"rows": rows_put, "of_rows": totals.rows},
            "output_order": self.config.output.order.value,
            **plan_figures(planned),
            **self._figures,
            **self.extra,
            "wall_s": time.perf_counter() - self._started,
            "phases": {
                "load_s": phases.get("load", 0.0),
                "plan_s": phases["plan"],
                "generate_s": phases.get("generate", 0.0),
                "write_s": generation.writer.stats.write_s if generation else 0.0,
            },
            **machine_figures(),
        }


def _outcome(code: ExitCode, message: str) -> dict[str, str]:
    return {"outcome": code.name.lower(), "message": message}
