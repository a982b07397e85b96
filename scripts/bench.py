"""Time batchgen against transformers, its own ablations and other engines, all in one run.

    python scripts/bench.py                                   # few-shot labels: ours, static
    python scripts/bench.py --workloads all --engines all --repeats 3 --save out/bench.parquet
    python scripts/bench.py --workloads documents --repeats 3 --plot out/bench.png \\
        --peer vllm=/venvs/vllm/bin/python --peer openvino:primed=/venvs/openvino/bin/python

All engines make the same number of tokens for each row, from the same token ids, one after the
other in every repeat, so that a machine that slows down slows all of them. Times go from ids to
text, without loading a model. The floor is the time of the same matrix products alone, measured
in the same repeats. Further keys of batchgen can follow; they hold for ours. Let nothing else
run meanwhile.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bench_parts.engines import ENGINES, Measurement, load_engine, prompts_of
from bench_parts.floor import Floor, load_products
from bench_parts.peers import Peer
from bench_parts.results import Facts, Machine, Results, results_table, save_results
from bench_parts.worker import Worker
from bench_workloads import (
    WORKLOADS,
    Size,
    job_arguments,
    open_texts,
    workload_rows,
    write_workload,
)
from fetch_model import fetch_model
from job_rows import JobRows, compose_job, open_rows, positive

from batchgen.config import Config
from batchgen.errors import BatchgenError, UsageError

DEFAULT_ENGINES = ("ours", "static")


@dataclass(frozen=True, slots=True)
class Contest:
    """What runs in each repeat.

    Attributes:
        engines: of ``ENGINES``.
        peers: engines of others.
        repeats: how often each runs.
        stock_rows: rows that transformers runs, spread evenly; None for all.
        floor: whether the products are timed alone.
    """

    engines: Sequence[str]
    peers: Sequence[Peer] = ()
    repeats: int = 1
    stock_rows: int | None = None
    floor: bool = True


def bench(name: str, size: str, arguments: list[str], contest: Contest) -> Results:
    """Measure a job.

    Args:
        name, size: what to call it.
        arguments: as for ``python -m batchgen``.
        contest: who runs it.

    Raises:
        BatchgenError: an engine refused the job or failed.
    """
    config = compose_job(arguments)
    with ExitStack() as held:
        rows = held.enter_context(open_rows(config))
        runners: dict[str, Callable[[], Measurement]] = {}
        for engine in contest.engines:
            load = partial(load_engine, engine, arguments, contest.stock_rows)
            runners[engine] = held.enter_context(Worker(engine, load, arguments)).run
        for peer in contest.peers:
            runners[peer.name] = held.enter_context(peer.start(rows, config)).run
        floor: Callable[[], Floor] | None = None
        if contest.floor:
            products = partial(load_products, arguments)
            floor = held.enter_context(Worker("floor", products, arguments)).run
        return _measure(_facts(name, size, arguments, rows, config), runners, floor, contest)


def _measure(
    facts: Facts,
    runners: dict[str, Callable[[], Measurement]],
    floor: Callable[[], Floor] | None,
    contest: Contest,
) -> Results:
    results = Results(facts, {name: [] for name in runners})
    for repeat in range(contest.repeats):
        where = f"{facts.workload}, run {repeat + 1} of {contest.repeats}"
        for name, run in runners.items():
            _say(f"{where}: {name}")
            results.runs[name].append(run())
            _say(f"{where}: {name} took {results.runs[name][-1].seconds:.2f} s")
        if floor is not None:
            _say(f"{where}: floor")
            results.floors.append(floor())
    return results


def _facts(name: str, size: str, arguments: list[str], rows: JobRows, config: Config) -> Facts:
    plan, _ = rows.stream(config)
    return Facts(
        workload=name,
        size=size,
        rows=plan.rows,
        prompt_tokens=plan.prompt_tokens,
        output_tokens=sum(prompt.max_tokens for prompt in prompts_of(rows)),
        floor_tokens=plan.prefill_tokens_floor,
        floor_tokens_block=plan.prefill_tokens_floor_block,
        arguments=arguments,
    )


def bench_workloads(options: argparse.Namespace, overrides: list[str]) -> Iterator[Results]:
    """Make the workloads and measure one after the other.

    Raises:
        BatchgenError: as for :func:`bench`.
    """
    _check_overrides(overrides)
    contest = Contest(
        engines=options.engines,
        peers=[Peer.parse(text) for text in options.peer],
        repeats=options.repeats,
        stock_rows=options.stock_rows,
        floor=options.floor,
    )
    model = options.model or str(fetch_model())
    texts = open_texts(model)
    for name in options.workloads:
        rows = workload_rows(name, options.size, texts, limit=options.rows, cap=options.max_tokens)
        with tempfile.TemporaryDirectory(prefix="batchgen-bench-") as folder:
            path = Path(folder) / f"{name}.parquet"
            write_workload(rows, path)
            arguments = [*job_arguments(path, model, options.size), *overrides]
            yield bench(name, options.size.value, arguments, contest)


def _check_overrides(overrides: Sequence[str]) -> None:
    for argument in overrides:
        if argument.lstrip("+").startswith(("model.path=", "input.path=", "job=")):
            raise UsageError(
                f"{argument}: the workloads bring their own rows, made for one model; name the "
                f"model with --model"
            )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def _reported() -> Iterator[None]:
    """Turn an error into its message and exit code."""
    try:
        yield
    except BatchgenError as error:
        _say(f"bench: {error}")
        sys.exit(error.exit_code)


def main() -> int:
    """Measure, print, keep the results, and give the exit code."""
    options, overrides = _parser().parse_known_args()
    machine = Machine.here()
    print(machine.describe(), flush=True)
    done: list[Results] = []
    with _reported():
        for results in bench_workloads(options, overrides):
            print(f"\n{results.describe()}", flush=True)
            done.append(results)
            # After each workload, so that a run that is stopped has not been in vain.
            if options.save is not None:
                save_results(done, machine, options.save)
    if options.plot is not None:
        from bench_plot import plot_results

        plot_results(results_table(done, machine), options.plot)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [options] [key=value ...]",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--workloads", type=partial(names, known=tuple(WORKLOADS)), default=["few_shot"])
    add("--size", type=Size, choices=list(Size), default=Size.CPU)
    add("--engines", type=partial(names, known=ENGINES), default=list(DEFAULT_ENGINES))
    add("--peer", action="append", default=[], metavar="NAME[:VARIANT]=PYTHON")
    add("--repeats", type=positive, default=1)
    add("--rows", type=positive, help="only so many rows of each workload")
    add("--max-tokens", type=positive, help="at most so many tokens out for a row")
    add("--stock-rows", type=positive, help="transformers on so many rows, spread evenly")
    add("--model", help="a directory or hub name (default: the demo's model)")
    add("--floor", action=argparse.BooleanOptionalAction, default=True)
    add("--save", type=Path, metavar="FILE.parquet", help="one row for every run")
    add("--plot", type=Path, metavar="FILE.png")
    return parser


def names(text: str, known: Sequence[str]) -> list[str]:
    """Read names with commas between them, or ``all``, for argparse."""
    if text == "all":
        return list(known)
    given = text.split(",")
    if set(given) - set(known):
        raise argparse.ArgumentTypeError(f"{text}: choose from {','.join(known)}, or all")
    return given


if __name__ == "__main__":
    sys.exit(main())
