"""Making the plan of a job from its tokenised prompts."""

from collections import Counter
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from batchgen.prompts.future import PlannedFuture
from batchgen.prompts.order import Rows, find_duplicates, length_order, prefix_order
from batchgen.prompts.plan import Plan
from batchgen.prompts.request_table import RequestTable
from batchgen.prompts.row_sampling import num_samples, row_needs
from batchgen.prompts.store import PromptStore
from batchgen.prompts.truncation import TruncationAudit
from batchgen.sampling import SamplingParams


def make_plan(
    store: PromptStore,
    sampling: SamplingParams,
    *,
    max_model_len: int,
    block_size: int,
    prefix_caching: bool,
    order: str,
    window_rows: int | None = None,
    done: npt.NDArray[np.bool_] | None = None,
    requests_of: Callable[[SamplingParams], int] = num_samples,
    truncation: str = "error",
) -> Plan:
    """Plan a job over its prompts.

    Args:
        store: the prompts.
        sampling: the job's parameters, which a row's own in the store override.
        max_model_len: tokens of a prompt and its output together.
        block_size: tokens in a block of the pool.
        prefix_caching: whether blocks are shared at all.
        order: ``prefix``, ``input`` or ``length`` (longest prompt first).
        window_rows: rows sorted together; None sorts all, in as little memory. Rows of
            different windows are not counted as sharing anything, in the floors neither.
        done: for each store row whether an earlier run has its result already; such rows
            count in nothing but ``rows`` and ``row_errors``.
        requests_of: gives the requests of a row with some parameters.
        truncation: ``prompt.truncation``, which has been done already.
    """
    good = store.good_rows
    if done is not None:
        good = good[~done[good]]
    needs = row_needs(store.sampling_params, sampling, max_model_len, requests_of)
    rows, duplicates = find_duplicates(store.ids, good, needs.result_keys[good])
    windows = _windows(store, rows, window_rows)
    requests = RequestTable.of(store, windows, needs, max_model_len, block_size)
    floor = requests.floor()
    ordered, expected, basis = requests.rows, floor, "shared by the token in prefix order"
    if order != "prefix":
        ordered = rows if order == "input" else length_order(store.lengths, rows)
        basis = f"{order} order, if the pool keeps what later rows need"
    ordered = ordered[np.argsort(store.priorities[ordered], kind="stable")]
    if not prefix_caching:
        expected = int(requests.lengths.sum())
        basis = "every prompt whole, prefix caching is off"
    return Plan(
        order=ordered,
        duplicates=duplicates,
        requests_by_prefix=requests,
        row_index=store.row_index[requests.rows],
        rows=store.num_rows,
        row_errors=dict(Counter(error.type.value for _, error in store.errors())),
        prompt_tokens=int(store.lengths[good].sum(dtype=np.int64)),
        block_size=block_size,
        windows=len(windows),
        expected_prefill_tokens=expected,
        expected_basis=basis,
        future=PlannedFuture(
            _request_numbers(ordered, requests.rows, needs.samples), requests.shared
        ),
        truncation=TruncationAudit.of(truncation, store, good, needs.max_tokens, max_model_len),
    )


def input_order_tokens(
    plan: Plan,
    store: PromptStore,
    sampling: SamplingParams,
    max_model_len: int,
    requests_of: Callable[[SamplingParams], int] = num_samples,
) -> int:
    """Return the prefill in the input's order where only the row before is still cached."""
    needs = row_needs(store.sampling_params, sampling, max_model_len, requests_of)
    rows = np.sort(plan.order)
    return RequestTable.of(store, [rows], needs, max_model_len, plan.block_size).floor()


def _windows(store: PromptStore, rows: Rows, window_rows: int | None) -> list[Rows]:
    """Sort the rows by their tokens, window by window."""
    size = window_rows or max(1, len(rows))
    return [
        prefix_order(store.ids, rows[start : start + size]) for start in range(0, len(rows), size)
    ]


def _request_numbers(ordered: Rows, by_prefix: Rows, samples: Rows) -> Rows:
    """Number the requests in running order, and give them in prefix order."""
    first = np.zeros(len(samples), np.int64)
    counts = samples[ordered]
    first[ordered] = np.cumsum(counts) - counts
    counts = samples[by_prefix]
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    numbers: Rows = np.repeat(first[by_prefix], counts) + within
    return numbers
