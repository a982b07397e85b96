"""Where a job's progress is shown, by the `log` keys."""

from pathlib import Path

from batchgen.report.json_log import JsonDisplay, stderr_lines
from batchgen.report.progress import Display, Progress
from batchgen.report.prometheus import PrometheusFile
from batchgen.report.terminal import TextDisplay


def make_progress(
    *, as_json: bool, every_s: float, prometheus_file: str | None = None, output: str = ""
) -> Progress:
    """Make a progress that is shown on standard error, and in a file where one is named.

    Args:
        as_json: ``log.format=json``.
        every_s: ``log.every_s``.
        prometheus_file: ``log.prometheus_file``.
        output: ``output.dir``, which labels the metrics.
    """
    shown: list[Display] = [
        JsonDisplay(every_s, stderr_lines()) if as_json else TextDisplay(every_s)
    ]
    if prometheus_file is not None:
        shown.append(PrometheusFile(Path(prometheus_file), output, every_s))
    return Progress(shown)
