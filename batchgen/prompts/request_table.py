"""The requests of a plan, measured: their lengths, and what each shares with its neighbour."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchgen.prompts.order import Rows, neighbour_lcp, prefill_tokens, repeat_rows
from batchgen.prompts.row_sampling import RowNeeds
from batchgen.prompts.store import PromptStore


@dataclass(frozen=True, slots=True)
class RequestTable:
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
    ) -> "RequestTable":
        """Measure the requests of rows, of which those in one window may share."""
        none = np.empty(0, np.int64)
        rows = np.concatenate([none, *windows])
        samples = needs.samples[rows]
        alike = np.concatenate([none, *(neighbour_lcp(store.ids, each) for each in windows)])
        lengths, shared = repeat_rows(store.lengths[rows], alike, samples)
        taken = _taken_from_cache(shared, samples, needs.logs_prompt[rows] > 0, block_size)
        whole = np.minimum(lengths + np.repeat(needs.max_tokens[rows], samples), max_model_len)
        return cls(rows, samples, lengths, shared, taken, whole)

    def __len__(self) -> int:
        """Number of requests."""
        return len(self.lengths)

    def floor(self, block_size: int = 1) -> int:
        """Return the least prefill that sharing leaves, in whole blocks of a size."""
        return prefill_tokens(self.lengths, self.taken, block_size)

    def shared_by_store_row(self, num_rows: int) -> Rows:
        """Return ``[store rows]`` tokens that each row's first request shares; -1 for others."""
        shared = np.full(num_rows, -1, np.int64)
        shared[self.rows] = self.shared[np.cumsum(self.samples) - self.samples]
        return shared


def _taken_from_cache(
    shared: Rows, samples: Rows, logs: npt.NDArray[np.bool_], block_size: int
) -> Rows:
    """Return what each request need not compute, of what it shares with the one before it.

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
