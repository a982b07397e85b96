"""A run in its middle, as displays are told of it."""

from batchgen.report.progress import Snapshot

SNAPSHOT = Snapshot(
    rows=3,
    total_rows=9,
    errors=1,
    prefill_tokens=100,
    completion_tokens=20,
    running=2,
    waiting=4,
    swapped=0,
    pool_use=0.5,
    hit_rate=0.25,
    eta_s=None,
)
