"""`log.prometheus_file`: how the run stands, for node exporter's textfile collector.

The file is replaced whole, so that a reader never sees half of it. Every series has the label
``output``, the output directory: a collector refuses two files with the same series. Metrics
and their meanings are listed in docs/operations.md.
"""

import logging
import math
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from batchgen.report.machine import rss_bytes
from batchgen.report.progress import Snapshot

logger = logging.getLogger(__name__)

_LAST_SUCCESS = "batchgen_last_success_timestamp_seconds"
METRICS: dict[str, tuple[str, str]] = {
    "batchgen_up": ("gauge", "Whether the run is at work (1) or has ended (0)."),
    "batchgen_start_timestamp_seconds": ("gauge", "When the run began."),
    "batchgen_update_timestamp_seconds": ("gauge", "When this file was written."),
    "batchgen_end_timestamp_seconds": ("gauge", "When the run ended; absent before that."),
    "batchgen_exit_code": ("gauge", "The run's exit code; absent before its end."),
    _LAST_SUCCESS: ("gauge", "When a run last ended with exit code 0; absent if none did."),
    "batchgen_phase_seconds": ("gauge", "Seconds that a phase has taken so far."),
    "batchgen_rows": ("gauge", "Output rows that the whole job has."),
    "batchgen_rows_done": ("gauge", "Output rows that are done, those of earlier runs included."),
    "batchgen_rows_failed": ("gauge", "Output rows that failed, those of earlier runs included."),
    "batchgen_prefill_tokens": ("gauge", "Prompt tokens computed in this run."),
    "batchgen_generated_tokens": ("gauge", "Tokens generated in this run."),
    "batchgen_tokens_per_second": ("gauge", "Prompt and output tokens a second, lately."),
    "batchgen_requests": ("gauge", "Requests in the engine's queues."),
    "batchgen_pool_use_ratio": ("gauge", "Share of the KV pool's blocks that rows hold."),
    "batchgen_prefix_hit_ratio": ("gauge", "Share of prompt tokens that came from the cache."),
    "batchgen_eta_seconds": ("gauge", "Estimate of the seconds left; absent while unknown."),
    "batchgen_resident_memory_bytes": ("gauge", "Memory that the process holds."),
}
Labels = tuple[tuple[str, str], ...]


class PrometheusFile:
    """A display of progress that keeps the file.

    A file that cannot be written is told once and costs the run nothing.

    Args:
        path: ``log.prometheus_file``.
        output: ``output.dir``.
        every_s: seconds between two replacements in the generate phase.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        path: Path,
        output: str,
        every_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.every_s = every_s
        self._path = path
        self._output = output
        self._clock = clock
        self._has_failed = False
        self._phases: dict[str, float] = {}
        self._values: dict[tuple[str, Labels], float] = {}
        self._set("batchgen_up", 1)
        self._set("batchgen_start_timestamp_seconds", clock())
        last_success = _last_success(path)
        if last_success is not None:
            self._set(_LAST_SUCCESS, last_success)
        self._replace()

    def say(self, text: str, level: str, event: str, fields: dict[str, Any]) -> None:
        """Take the figures of the whole output, which the end of a job states."""
        if event == "finished":
            rows, done, failed = fields["rows"], fields["rows"], fields["failed"]
        elif event == "summary":
            figures = fields["figures"]
            rows, done = figures["total_rows"], figures["rows"]
            failed = sum(figures["errors"].values())
        else:
            return
        self._set("batchgen_rows", rows)
        self._set("batchgen_rows_done", done)
        self._set("batchgen_rows_failed", failed)

    def begin(self, phase: str) -> None:
        """Name the phase with the seconds it has had before, if any."""
        self._phases.setdefault(phase, 0.0)
        self._set("batchgen_phase_seconds", self._phases[phase], phase=phase)
        self._replace()

    def end(self, phase: str, seconds: float) -> None:
        """Add a phase's time."""
        self._phases[phase] = self._phases.get(phase, 0.0) + seconds
        self._set("batchgen_phase_seconds", self._phases[phase], phase=phase)
        self._replace()

    def show(self, snapshot: Snapshot, tokens_per_s: float) -> None:
        """Take the figures of the generate phase."""
        self._set("batchgen_rows", snapshot.total_rows)
        self._set("batchgen_rows_done", snapshot.rows)
        self._set("batchgen_rows_failed", snapshot.errors)
        self._set("batchgen_prefill_tokens", snapshot.prefill_tokens)
        self._set("batchgen_generated_tokens", snapshot.completion_tokens)
        self._set("batchgen_tokens_per_second", tokens_per_s)
        for state in ("running", "waiting", "swapped"):
            self._set("batchgen_requests", getattr(snapshot, state), state=state)
        self._set("batchgen_pool_use_ratio", snapshot.pool_use)
        self._set("batchgen_prefix_hit_ratio", snapshot.hit_rate)
        self._set("batchgen_eta_seconds", snapshot.eta_s)
        self._replace()

    def close(self, exit_code: int) -> None:
        """Say how the run has ended."""
        now = self._clock()
        self._set("batchgen_up", 0)
        self._set("batchgen_end_timestamp_seconds", now)
        self._set("batchgen_exit_code", exit_code)
        self._set("batchgen_eta_seconds", None)
        if exit_code == 0:
            self._set(_LAST_SUCCESS, now)
        self._replace()

    def _set(self, name: str, value: float | None, **labels: str) -> None:
        key = name, (("output", self._output), *labels.items())
        if value is None:
            self._values.pop(key, None)
        else:
            self._values[key] = value

    def _replace(self) -> None:
        self._set("batchgen_update_timestamp_seconds", self._clock())
        self._set("batchgen_resident_memory_bytes", rss_bytes())
        # The collector reads *.prom and nothing else.
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}.tmp")
        try:
            temporary.write_text(exposition(self._values), encoding="utf-8")
            # It is written by one user and read by another.
            temporary.chmod(0o644)
            temporary.replace(self._path)
        except OSError as error:
            if not self._has_failed:
                logger.warning("log.prometheus_file=%s cannot be written: %s", self._path, error)
            self._has_failed = True
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


def exposition(values: dict[tuple[str, Labels], float]) -> str:
    """Give metrics in Prometheus' text format, version 0.0.4.

    Args:
        values: by name, one of ``METRICS``, and labels.
    """
    lines: list[str] = []
    for name, (kind, meaning) in METRICS.items():
        series = [(labels, value) for (each, labels), value in values.items() if each == name]
        if series:
            lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]
            lines += [f"{name}{{{_labels(labels)}}} {_number(value)}" for labels, value in series]
    return "\n".join(lines) + "\n"


def _labels(labels: Labels) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels)


def _escaped(value: str) -> str:
    # A path may hold bytes that are no UTF-8.
    value = value.encode("utf-8", "replace").decode()
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(float(value)) if isinstance(value, float) else str(value)


def _last_success(path: Path) -> float | None:
    """Read when a run last succeeded from the file that an earlier one left."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    found = re.search(rf"^{_LAST_SUCCESS}\{{[^\n]*\}} ([0-9.e+]+)$", text, re.MULTILINE)
    try:
        return float(found[1]) if found else None
    except ValueError:
        return None
