"""Making the plan of a job from its tokenised prompts."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchgen.prompts.future import PlannedFuture
from batchgen.prompts.needs import RowNeeds, row_needs
from batchgen.prompts.order import (
    Rows,
    find_duplicates,
    length_order,
    neighbour_lcp,
    prefill_tokens,
    prefix_groups,
    prefix_order,
    repeat_rows,
)
from batchgen.prompts.outlook.blocks import block_costs
from batchgen.prompts.outlook.lengths import Histogram
from batchgen.prompts.plan import Plan
from batchgen.prompts.row_sampling import num_samples
from batchgen.prompts.store import PromptStore
from batchgen.prompts.truncation_audit import TruncationAudit
from batchgen.sampling import SamplingParams

MAX_GROUPS = 20


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
    compare_orders: bool = False,
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
        compare_orders: whether to count the input's order too, which is another pass.
    """
    good = store.good_rows
    if done is not None:
        good = good[~done[good]]
    needs = row_needs(store.sampling_params, sampling, max_model_len, requests_of)
    rows, duplicates = find_duplicates(store.ids, good, needs.result_keys[good])
    windows = _windows(store, rows, window_rows)
    requests = _Requests.of(store, windows, needs, max_model_len, block_size)
    floor = prefill_tokens(requests.lengths, requests.taken)
    ordered, expected, basis = requests.rows, floor, "shared by the token in prefix order"
    if order != "prefix":
        ordered = rows if order == "input" else length_order(store.lengths, rows)
        basis = f"{order} order, if the pool keeps what later rows need"
    ordered = ordered[np.argsort(store.priorities[ordered], kind="stable")]
    if not prefix_caching:
        expected = int(requests.lengths.sum())
        basis = "every prompt whole, prefix caching is off"
    unsorted = None
    if compare_orders:
        found = _Requests.of(store, [rows], needs, max_model_len, block_size)
        unsorted = prefill_tokens(found.lengths, found.taken)
    groups = prefix_groups(requests.shared, block_size, MAX_GROUPS)
    row_index = np.repeat(store.row_index[requests.rows], requests.samples)
    return Plan(
        order=ordered,
        duplicates=duplicates,
        rows=store.num_rows,
        requests=len(requests.lengths),
        prompt_tokens=int(store.lengths[good].sum(dtype=np.int64)),
        request_tokens=int(requests.lengths.sum()),
        block_size=block_size,
        windows=len(windows),
        prefill_tokens_floor=floor,
        prefill_tokens_floor_block=prefill_tokens(requests.lengths, requests.taken, block_size),
        expected_prefill_tokens=expected,
        expected_basis=basis,
        longest_request_tokens=int(requests.whole.max(initial=0)),
        request_tokens_p50=_percentile(requests.whole, 50),
        request_tokens_p95=_percentile(requests.whole, 95),
        own_tokens_p95=_percentile(requests.whole - requests.shared, 95),
        longest_shared_tokens=int(requests.shared.max(initial=0)),
        max_output_tokens=int((requests.whole - requests.lengths).sum()),
        lengths=Histogram.of(requests.lengths),
        block_costs=block_costs(requests.lengths, requests.taken, block_size),
        input_order_tokens=unsorted,
        groups=groups,
        group_row_index=[int(row_index[group.position]) for group in groups],
        row_errors=dict(Counter(error.type.value for _, error in store.errors())),
        future=PlannedFuture(
            _request_numbers(ordered, requests.rows, needs.samples), requests.shared
        ),
        shared_tokens=requests.shared_by_store_row(store.num_rows),
        truncation=TruncationAudit.of(truncation, store, good, needs.max_tokens, max_model_len),
    )


@dataclass(frozen=True, slots=True)
class _Requests:
    """Requests in the order of their rows, each after the one it is compared with.

    Attributes:
        rows: ``[R]`` the store rows.
        samples: ``[R]`` requests of each row.
        lengths: ``[N]`` prompt tokens of each request.
        shared: ``[N]`` leading tokens that the request before it has too.
        taken: ``[N]`` of these, what the request need not compute.
        whole: ``[N]`` the most tokens that it can come to, prompt and output.
    """

    rows: Rows
    samples: Rows
    lengths: Rows
    shared: Rows
    taken: Rows
    whole: Rows

    @classmethod
    def of(
        cls,
        store: PromptStore,
        windows: Sequence[Rows],
        needs: RowNeeds,
        max_model_len: int,
        block_size: int,
    ) -> "_Requests":
        """Measure the requests of rows, of which those in one window may share."""
        none = np.empty(0, np.int64)
        rows = np.concatenate([none, *windows])
        samples = needs.samples[rows]
        alike = np.concatenate([none, *(neighbour_lcp(store.ids, each) for each in windows)])
        lengths, shared = repeat_rows(store.lengths[rows], alike, samples)
        taken = _taken_from_cache(shared, samples, needs.logs_prompt[rows] > 0, block_size)
        whole = np.minimum(lengths + np.repeat(needs.max_tokens[rows], samples), max_model_len)
        return cls(rows, samples, lengths, shared, taken, whole)

    def shared_by_store_row(self, num_rows: int) -> Rows:
        """Give what each row's first request shares; -1 for rows without one."""
        shared = np.full(num_rows, -1, np.int64)
        shared[self.rows] = self.shared[np.cumsum(self.samples) - self.samples]
        return shared


def _windows(store: PromptStore, rows: Rows, window_rows: int | None) -> list[Rows]:
    """Sort the rows by their tokens, window by window."""
    size = window_rows or max(1, len(rows))
    return [
        prefix_order(store.ids, rows[start : start + size]) for start in range(0, len(rows), size)
    ]


def _taken_from_cache(
    shared: Rows, samples: Rows, logs: npt.NDArray[np.bool_], block_size: int
) -> Rows:
    """Give what each request need not compute, of what it shares with the one before it.

    A row's first request logs the prompt for all of them and takes nothing. Where others have
    entered the prompt's first block before, its own blocks stay its own, so that what comes
    after it finds only what came before it.
    """
    firsts = np.cumsum(samples) - samples
    taken = shared.copy()
    # What of each row's prompt is there when its first request comes.
    there = shared[firsts]
    for row in np.flatnonzero(logs & (there >= block_size)).tolist():
        if samples[row] > 1:
            taken[firsts[row] + 1] = there[row]
        elif row + 1 < len(there):
            there[row + 1] = min(there[row + 1], there[row])
    taken[firsts] = np.where(logs, 0, there)
    return taken


def _request_numbers(ordered: Rows, by_prefix: Rows, samples: Rows) -> Rows:
    """Number the requests in running order, and give them in prefix order."""
    first = np.zeros(len(samples), np.int64)
    counts = samples[ordered]
    first[ordered] = np.cumsum(counts) - counts
    counts = samples[by_prefix]
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    numbers: Rows = np.repeat(first[by_prefix], counts) + within
    return numbers


def _percentile(values: npt.NDArray[np.int64], percent: int) -> int:
    return int(np.percentile(values, percent, method="higher")) if len(values) else 0
