"""An executor that proves, step by step, that shared KV is never written again."""

from collections.abc import Callable
from typing import Protocol

from batchgen.engine.step import StepPlan
from batchgen.errors import EngineError
from batchgen.runtime.executor import ModelExecutor, PendingStep


class InvariantChecker(Protocol):
    """Checks of a plan by what the scheduler knows (``batchgen.engine.invariants``)."""

    def describe(self, plan: StepPlan) -> str:
        """Write the pool and the tables."""

    def check_plan(self, plan: StepPlan) -> None:
        """Raise if a slot that is written is not its row's own."""

    def protected(self) -> dict[int, int]:
        """Return blocks and the number of their leading tokens that may not change."""


class CheckingExecutor:
    """Runs plans through another executor, prints them and compares checksums.

    Slow: all indexed KV is read twice a step.
    """

    def __init__(
        self, executor: ModelExecutor, checker: InvariantChecker, say: Callable[[str], None]
    ) -> None:
        self._executor = executor
        self._checker = checker
        self._say = say
        self._sums: dict[tuple[int, int], int] = {}

    def execute(self, plan: StepPlan) -> PendingStep:
        """Run a plan to its end; see :class:`batchgen.engine.core.Executor`.

        Raises:
            EngineError: the plan would write, or has written, where it may not.
        """
        self._say(self._checker.describe(plan))
        self._checker.check_plan(plan)
        protected = self._checker.protected()
        before = self._checksums(protected)
        for entry, value in before.items():
            if self._sums.get(entry, value) != value:
                raise EngineError(f"block {entry[0]} changed before step {plan.step}")
        output = self._executor.execute(plan)
        output.result()
        self._sums = self._checksums(protected)
        for entry, value in before.items():
            if self._sums[entry] != value:
                raise EngineError(
                    f"step {plan.step} changed block {entry[0]}, whose first {entry[1]} tokens "
                    f"are shared or cached"
                )
        return output

    def _checksums(self, protected: dict[int, int]) -> dict[tuple[int, int], int]:
        cache = self._executor.cache
        return {entry: cache.checksum(*entry) for entry in protected.items()}
