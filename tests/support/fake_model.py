"""A model without weights whose KV can be checked slot by slot.

A slot holds the token prefix that its KV stands for, so a row that reads a slot of
another prefix, an unwritten one or a freed one is caught at once. The next token is a
hash of all tokens so far: any mistake in what a row attends to changes its output.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from batchgen.engine.core import FinishedOutput
from batchgen.engine.step import (
    NO_TOKEN,
    FloatArray,
    IntArray,
    LogprobRows,
    SampleBatch,
    StepOutput,
)
from batchgen.errors import OutOfDeviceMemoryError

VOCAB = 1000


def next_token(tokens: Sequence[int], vocab: int = VOCAB) -> int:
    """What the model says after these tokens."""
    return zlib.crc32(repr(list(tokens)).encode()) % vocab


def generate(prompt: Sequence[int], max_tokens: int, vocab: int = VOCAB) -> list[int]:
    """The output that no pool, order or preemption may change."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(next_token(tokens, vocab))
    return tokens[len(prompt) :]


class FakeExecutor:
    """Executes step plans over slots of token prefixes."""

    def __init__(
        self,
        block_size: int,
        *,
        vocab: int = VOCAB,
        before: Callable[[Any], None] = lambda plan: None,
        choose: Callable[[Sequence[int]], int | None] | None = None,
        is_short: Callable[[Any], bool] = lambda plan: False,
        window: int | None = None,
    ) -> None:
        self.block_size = block_size
        self.slots: dict[int, tuple[int, ...]] = {}
        self.swap: dict[int, dict[int, tuple[int, ...]]] = {}
        self.plans: list[Any] = []
        self._sampled: IntArray = np.empty(0, dtype=np.int64)
        self._vocab = vocab
        self._before = before
        self._choose = choose
        self._is_short = is_short
        self._window = window

    def forget(self, blocks: Sequence[int]) -> None:
        """Drop the content of freed blocks."""
        for block in blocks:
            for offset in range(self.block_size):
                self.slots.pop(block * self.block_size + offset, None)

    def execute(self, plan: Any) -> FinishedOutput:
        """Swap, write all rows' KV, then let every row read what its table names."""
        self._before(plan)
        self.plans.append(plan)
        plan = replace(plan, token_ids=self._fed(plan.token_ids))
        size = self.block_size
        for block, cpu in plan.swap_out.tolist():
            self.swap[cpu] = {o: self.slots[block * size + o] for o in range(size)
                              if block * size + o in self.slots}  # fmt: skip
        for source, target in plan.copies.tolist():
            for offset in range(size):
                if source * size + offset in self.slots:
                    self.slots[target * size + offset] = self.slots[source * size + offset]
        for cpu, block in plan.swap_in.tolist():
            for offset, value in self.swap[cpu].items():
                self.slots[block * size + offset] = value
        short = self._is_short(plan)
        # Out of memory in the middle of a pass: some rows' KV is written.
        rows = plan.num_rows // 2 if short else plan.num_rows
        histories = [self._write(plan, row) for row in range(rows)]
        if short:
            raise OutOfDeviceMemoryError("the fake has no memory")
        for row, history in enumerate(histories):
            self._read(plan, row, history)
        rows = plan.samples.rows.tolist()
        tokens = [self._sample(histories[row], plan.samples, i) for i, row in enumerate(rows)]
        tokens = [NO_TOKEN if token is None else token for token in tokens]
        self._sampled = np.array(tokens, dtype=np.int64)
        scores = [self._score(histories[rows[entry.index]]) for entry in plan.samples.scored]
        logprobs = self._logprobs(plan, self._sampled)
        return FinishedOutput(StepOutput(self._sampled, tuple(scores), logprobs))

    def _fed(self, token_ids: IntArray) -> IntArray:
        """Put what the step before sampled in the place of what stands for it."""
        token_ids = token_ids.copy()
        unread = token_ids < 0
        token_ids[unread] = np.maximum(0, self._sampled[-1 - token_ids[unread]])
        return token_ids

    def _write(self, plan: Any, row: int) -> tuple[int, ...]:
        start, end = plan.query_starts[row], plan.query_starts[row + 1]
        positions = plan.positions[start:end].tolist()
        assert positions == list(range(positions[0], positions[0] + len(positions)))
        history: tuple[int, ...] = ()
        if positions[0] > 0:
            table, at = plan.block_tables[row].tolist(), positions[0] - 1
            slot = table[at // self.block_size] * self.block_size + at % self.block_size
            assert slot in self.slots, f"row {row} continues after KV that was never written"
            history = self.slots[slot]
        for slot, token in zip(
            plan.slots[start:end].tolist(), plan.token_ids[start:end].tolist(), strict=True
        ):
            history = (*history, token)
            self.slots[slot] = history
        return history

    def _read(self, plan: Any, row: int, history: tuple[int, ...]) -> None:
        assert len(history) == plan.context_lens[row]
        table = plan.block_tables[row].tolist()
        first_query = plan.positions[plan.query_starts[row]]
        first = 0 if self._window is None else max(0, first_query - self._window + 1)
        for position in range(first, len(history)):
            block, offset = table[position // self.block_size], position % self.block_size
            found = self.slots.get(block * self.block_size + offset)
            assert found == history[: position + 1], (
                f"row {row} reads another prefix at position {position}"
            )

    def _sample(self, history: tuple[int, ...], samples: SampleBatch, index: int) -> int | None:
        """Choose the token of one sample of the batch."""
        if self._choose is not None:
            return self._choose(history)
        return next_token(history, self._vocab)

    def _score(self, history: tuple[int, ...]) -> FloatArray:
        """The scores of a scored sample after these tokens."""
        return np.array([float(next_token(history, self._vocab))])

    def _logprobs(self, plan: Any, sampled: IntArray) -> tuple[LogprobRows, ...]:
        """The entries of the step's logged tokens."""
        return ()
