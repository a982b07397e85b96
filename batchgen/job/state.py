"""The state of a running job in words, for whoever wonders what it is doing."""

import time

from batchgen.data.writer import PartWriter
from batchgen.engine.request import Request
from batchgen.job.load import LoadedEngine
from batchgen.job.stream import RequestStream

_SHOWN_ROWS = 5


def describe_state(loaded: LoadedEngine, stream: RequestStream, writer: PartWriter) -> str:
    """Say how the scheduler, the pool, the oldest rows and the writer stand."""
    scheduler, stats = loaded.engine.scheduler, loaded.engine.stats
    counters = scheduler.counters
    started = [*scheduler.running, *scheduler.swapped]
    started.sort(key=lambda request: request.timeline.admitted or 0.0)
    return "\n".join(
        [
            f"state after {stats.steps} steps: {scheduler.describe()}",
            f"tokens: {counters.prefill_tokens} of prompts computed, {counters.sampled_tokens} "
            f"generated, {counters.recomputed_tokens} computed again; "
            f"{counters.preemptions} preemptions",
            f"rows: {counters.finished_requests} requests ended; the oldest that run:",
            *(f"  {_row(request, stream)}" for request in started[:_SHOWN_ROWS]),
            f"writer: {writer.num_pending} rows wait for their part, {writer.stats.parts} parts "
            f"are written",
        ]
    )


def _row(request: Request, stream: RequestStream) -> str:
    admitted = request.timeline.admitted
    age = "" if admitted is None else f", started {time.perf_counter() - admitted:.0f} s ago"
    return (
        f"{stream.name_of(request)}: {request.status}, {request.num_prompt_tokens} prompt tokens, "
        f"{request.num_output_tokens} of {request.params.max_tokens} generated, "
        f"{len(request.block_table)} blocks{age}"
    )
