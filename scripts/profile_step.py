"""Show where the time of a workload's steps goes.

    python scripts/profile_step.py --workload few_shot
    python scripts/profile_step.py --workload sharegpt --rows 16 --max-tokens 16 pool.block_size=32

Every function of a list is timed without what it calls of that list, and so is every linear
product of the model, by the operator. The list is below; where a function has been renamed the
script says so. Timing costs some 10 microseconds an operator, so small steps look slower than
they are. Not to be called profile.py: the standard library has a module of that name.
"""

import argparse
import functools
import importlib
import inspect
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from bench_parts.worker import WARM_UP_ROWS
from bench_workloads import (
    WORKLOADS,
    Size,
    job_arguments,
    open_texts,
    workload_rows,
    write_workload,
)
from fetch_model import fetch_model
from job_rows import Run, compose_job, open_rows, positive
from torch.utils._python_dispatch import TorchDispatchMode

from batchgen.errors import BatchgenError
from batchgen.job.load import load_job_model

LINEAR = "linear products"
VOCABULARY = "linear products: vocabulary"
MODEL = "model: norms, elementwise, Python"
REST = "loop, planning, requests"

# What is timed: a label, and where the functions are looked up when they are called.
SCOPES: dict[str, tuple[str, ...]] = {
    "scheduler": (
        "batchgen.engine.scheduler:Scheduler.schedule",
        "batchgen.engine.scheduler:Scheduler.update",
    ),
    "layout": ("batchgen.runtime.torch_attention:cascade_layout",),
    "attention: shared": ("batchgen.kernels.cascade:_join_segment",),
    "attention: own": ("batchgen.kernels.cascade:_attend_own",),
    "attention: kernel": ("batchgen.runtime.cpu.attention:native_paged_attention",),
    "attention: rest": (
        "batchgen.runtime.cpu.attention:_NativeStep.attend",
        "batchgen.runtime.torch_attention:_TorchStep.attend",
    ),
    "sampling": ("batchgen.runtime.executor:prepare", "batchgen.runtime.executor:sample_tokens"),
    "swap and copies": ("batchgen.runtime.executor:ModelExecutor._move_blocks",),
    "detokenise": ("batchgen.job.stream:RequestStream.results",),
    MODEL: ("batchgen.runtime.executor:ModelExecutor.logits",),
    "step: rest": ("batchgen.runtime.executor:ModelExecutor.execute",),
}
_PRODUCTS = frozenset({"aten::mm", "aten::addmm"})


class MissingError(LookupError):
    """A function of ``SCOPES`` is no longer where it was."""


@dataclass(slots=True)
class Timer:
    """Seconds by label, each without what runs inside it under another label.

    Threads are timed side by side: their sum may exceed the wall's seconds.

    Attributes:
        synchronize: waits for a device, so that its work counts where it was started.
        vocab_size: the width by which the vocabulary's product is known.
        seconds, calls: by label.
        flops: of the linear products, by label.
    """

    synchronize: Callable[[], None]
    vocab_size: int
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: Counter[str] = field(default_factory=Counter)
    flops: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _local: threading.local = field(default_factory=threading.local)

    @contextmanager
    def scope(self, label: str) -> Iterator[None]:
        """Count the time until the end of the ``with`` for a label."""
        stack = self._stack()
        self._count(stack)
        stack.append(label)
        try:
            yield
        finally:
            self._count(stack)
            ended = stack.pop()
            with self._lock:
                self.calls[ended] += 1

    def innermost(self) -> str:
        """Return the label that this thread's time now counts for."""
        return self._stack()[-1]

    def relabel(self, label: str) -> None:
        """Count the innermost scope's time, which must have no scope in it, for this label."""
        self._stack()[-1] = label

    def add_flops(self, flops: int) -> None:
        """Add floating-point operations to the innermost label."""
        with self._lock:
            self.flops[self.innermost()] += flops

    def _stack(self) -> list[str]:
        if not hasattr(self._local, "stack"):
            self._local.stack = []
            self._local.mark = time.perf_counter()
        stack: list[str] = self._local.stack
        return stack

    def _count(self, stack: list[str]) -> None:
        """Return the time since the last look to the innermost label."""
        self.synchronize()
        now = time.perf_counter()
        if stack:
            with self._lock:
                self.seconds[stack[-1]] += now - self._local.mark
        self._local.mark = now

    def wrap(self, label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same and is timed."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with ExitStack() as held:
                held.enter_context(self.scope(label))
                if label == MODEL:
                    held.enter_context(_LinearProducts(self))
                if inspect.isgeneratorfunction(function):
                    return iter(list(function(*args, **kwargs)))
                return function(*args, **kwargs)

        return timed


class _LinearProducts(TorchDispatchMode):
    """Times the products of the model's linear layers as they reach torch's dispatcher.

    Whatever runs inside the attention is counted there.
    """

    def __init__(self, timer: Timer) -> None:
        super().__init__()
        self._timer = timer

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator; see torch."""
        name = func.name().split(".")[0]
        is_product = name in _PRODUCTS or "linear" in name
        if not is_product or self._timer.innermost() != MODEL:
            return func(*args, **(kwargs or {}))
        left = args[1] if name == "aten::addmm" else args[0]
        with self._timer.scope(LINEAR):
            out = func(*args, **(kwargs or {}))
            if out.shape[-1] == self._timer.vocab_size:
                self._timer.relabel(VOCABULARY)
            self._timer.add_flops(2 * out.numel() * left.shape[-1])
        return out


@contextmanager
def timed_functions(timer: Timer) -> Iterator[None]:
    """Replace the functions of ``SCOPES`` by timed ones.

    Raises:
        MissingError: one is not there.
    """
    with ExitStack() as restored:
        for label, places in SCOPES.items():
            for place in places:
                holder, name = _find(place)
                original = getattr(holder, name)
                setattr(holder, name, timer.wrap(label, original))
                restored.callback(setattr, holder, name, original)
        yield


def _find(place: str) -> tuple[Any, str]:
    module, _, path = place.partition(":")
    *holders, name = path.split(".")
    try:
        holder = functools.reduce(getattr, holders, importlib.import_module(module))
        getattr(holder, name)
    except (ImportError, AttributeError) as error:
        raise MissingError(f"{place} is no longer there ({error}); correct SCOPES") from error
    return holder, name


def report(timer: Timer, run: Run, steps: int) -> str:
    """Write the table: what each label took, in all and a step."""
    seconds = dict(timer.seconds)
    # What the loop does outside all timed functions.
    seconds[REST] = max(0.0, run.seconds - sum(seconds.values()))
    width = max(map(len, seconds))
    lines = [f"{'':{width}}  seconds   share  ms a step    calls  GFLOP/s"]
    for label, spent in sorted(seconds.items(), key=lambda item: -item[1]):
        rate = f"{timer.flops[label] / spent / 1e9:9.1f}" if timer.flops[label] else ""
        lines.append(
            f"{label:{width}}  {spent:7.2f}  {spent / run.seconds:6.1%}  "
            f"{1000 * spent / steps:9.2f}  {timer.calls[label]:7,}{rate}"
        )
    return "\n".join(lines)


def profile(arguments: Sequence[str]) -> str:
    """Run a job's rows with every scope timed, and say where the time went.

    Raises:
        BatchgenError: as ``python -m batchgen`` with these arguments.
        MissingError: a function of ``SCOPES`` is not there.
    """
    config = compose_job(arguments)
    model = load_job_model(config)
    on_gpu = model.model.device.type == "cuda"
    timer = Timer(torch.cuda.synchronize if on_gpu else _nothing, model.vocab_size)
    with open_rows(config, WARM_UP_ROWS) as few:
        few.run(config, model)
    with open_rows(config) as rows, timed_functions(timer):
        run = rows.run(config, model)
    steps = timer.calls[MODEL]
    output = sum(len(answer.output_token_ids or ()) for answer in run.answers.values())
    return (
        f"{len(run.answers):,} rows, {run.prefill_tokens:,} prompt tokens computed, {output:,} "
        f"tokens out, {steps:,} steps in {run.seconds:.2f} s; {torch.get_num_threads()} threads\n"
        f"{report(timer, run, steps)}"
    )


def _nothing() -> None:
    """A CPU's work is done when the call returns."""


def main() -> int:
    """Profile, print, and give the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [options] [key=value ...]",
        allow_abbrev=False,
    )
    parser.add_argument("--workload", choices=list(WORKLOADS), default="few_shot")
    parser.add_argument("--size", type=Size, choices=list(Size), default=Size.CPU)
    parser.add_argument("--rows", type=positive, help="only so many rows")
    parser.add_argument("--max-tokens", type=positive, help="at most so many tokens out for a row")
    parser.add_argument("--model", help="a directory or hub name (default: the demo's model)")
    options, overrides = parser.parse_known_args()
    model = options.model or str(fetch_model())
    try:
        texts = open_texts(model)
        rows = workload_rows(
            options.workload, options.size, texts, limit=options.rows, cap=options.max_tokens
        )
        with tempfile.TemporaryDirectory(prefix="batchgen-profile-") as folder:
            path = Path(folder) / f"{options.workload}.parquet"
            write_workload(rows, path)
            print(profile([*job_arguments(path, model, options.size), *overrides]))
    except (BatchgenError, MissingError) as error:
        print(f"profile_step: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, BatchgenError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
