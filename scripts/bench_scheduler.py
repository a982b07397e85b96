"""Time the scheduler alone: many running rows, no model.

    python scripts/bench_scheduler.py                    # 1,024 rows
    python scripts/bench_scheduler.py --rows 256 --new-tokens 128

Two phases of the same rows: all of them decoding, and a stream of rows that end and start.
A step is its planning and its commit; medians, means and 90th percentiles in milliseconds.
Let nothing else run meanwhile.
"""

import argparse
import random
import time
from dataclasses import dataclass

import numpy as np
from job_rows import positive

from batchgen.engine.admission import AdmissionPolicy
from batchgen.engine.block_manager import BlockManager
from batchgen.engine.preemption import SwapSpace
from batchgen.engine.request import Request
from batchgen.engine.scheduler import Scheduler, SchedulerLimits
from batchgen.engine.step import StepOutput
from batchgen.engine.stopping import StopRules
from batchgen.sampling import SamplingParams

BLOCK_SIZE = 16
EOS = 0


@dataclass(frozen=True, slots=True)
class Setting:
    """What is scheduled.

    Attributes:
        rows: rows at once.
        shared_tokens, own_tokens: of each prompt.
        new_tokens: most tokens a row generates; it ends anywhere on the way.
    """

    rows: int
    shared_tokens: int
    own_tokens: int
    new_tokens: int


def make_scheduler(setting: Setting) -> Scheduler:
    """Make a scheduler whose pool holds all rows."""
    tokens = setting.own_tokens + setting.new_tokens + BLOCK_SIZE
    num_blocks = setting.shared_tokens // BLOCK_SIZE + 1 + setting.rows * (tokens // BLOCK_SIZE + 1)
    return Scheduler(
        BlockManager(num_blocks, BLOCK_SIZE),
        SwapSpace(0),
        StopRules(frozenset([EOS])),
        SchedulerLimits(setting.rows, 8192),
        admission=AdmissionPolicy.AUTO,
        clock=time.perf_counter,
    )


def make_requests(setting: Setting, count: int, rng: random.Random) -> list[Request]:
    """Make rows that share a prefix, with lengths of output of their own."""
    shared = [rng.randrange(1, 30_000) for _ in range(setting.shared_tokens)]
    return [
        Request.create(
            number,
            shared + [rng.randrange(1, 30_000) for _ in range(setting.own_tokens)],
            SamplingParams(max_tokens=rng.randint(setting.new_tokens // 2, setting.new_tokens)),
            max_model_len=1 << 20,
        )
        for number in range(count)
    ]


def time_steps(scheduler: Scheduler, steps: int, rng: np.random.Generator) -> list[float]:
    """Run steps of a model that says anything but the end; return the seconds of each."""
    seconds = []
    for _ in range(steps):
        started = time.perf_counter()
        plan = scheduler.schedule()
        planned = time.perf_counter()
        if plan is None:
            break
        tokens = rng.integers(1, 30_000, len(plan.samples))
        sampled = time.perf_counter()
        scheduler.advance()
        scheduler.update(StepOutput(tokens))
        seconds.append(time.perf_counter() - sampled + planned - started)
    return seconds


def describe(name: str, seconds: list[float]) -> str:
    """Say median, mean and 90th percentile."""
    figures = np.array(seconds) * 1e3
    return (
        f"{name:<28} {len(figures):4d} steps: median {np.median(figures):.2f} ms, "
        f"mean {figures.mean():.2f} ms, p90 {np.percentile(figures, 90):.2f} ms"
    )


def main() -> None:
    """Measure both phases and print them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=positive, default=1024)
    parser.add_argument("--shared-tokens", type=positive, default=1000)
    parser.add_argument("--own-tokens", type=positive, default=60)
    parser.add_argument("--new-tokens", type=positive, default=200)
    options = parser.parse_args()
    setting = Setting(**vars(options))
    rng, model = random.Random(0), np.random.default_rng(0)
    scheduler = make_scheduler(setting)
    for request in make_requests(setting, 3 * setting.rows, rng):
        scheduler.add(request)
    while len(scheduler.running) < setting.rows:
        time_steps(scheduler, 1, model)
    # No row ends before half of its tokens.
    steady = time_steps(scheduler, setting.new_tokens // 4, model)
    while not scheduler.counters.finished_requests:
        time_steps(scheduler, 1, model)
    turnover = time_steps(scheduler, setting.new_tokens, model)
    print(
        f"{setting.rows} rows at once, prompts of {setting.shared_tokens} shared tokens and "
        f"{setting.own_tokens} own, blocks of {BLOCK_SIZE}"
    )
    print(describe("all rows decode", steady))
    print(describe("rows end and others start", turnover))


if __name__ == "__main__":
    main()
