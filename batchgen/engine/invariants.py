"""The pool step by step, for `engine.debug`: who holds what, and what may not change."""

from batchgen.engine.request import Request
from batchgen.engine.scheduler import Scheduler
from batchgen.engine.step import StepPlan
from batchgen.errors import EngineError


class InvariantChecker:
    """Looks over the scheduler's shoulder; changes nothing."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        # The request and the step in which a block was last in a table.
        self._last_holder: dict[int, tuple[int, int]] = {}

    def describe(self, plan: StepPlan) -> str:
        """Write the pool and every running request's table with its reference counts."""
        pool = self._scheduler.blocks.pool
        counts = pool.ref_counts
        lines = [
            f"step {plan.step}: {plan.num_rows} rows, {plan.num_tokens} tokens; pool "
            f"{pool.num_free} free, {pool.num_cached} cached, {pool.num_owned} owned; "
            f"copies {plan.copies.tolist()}, out {plan.swap_out.tolist()}, "
            f"in {plan.swap_in.tolist()}"
        ]
        for request in self._scheduler.running:
            table = " ".join(
                f"{block}x{counts[block]}" for block in request.block_table[request.num_released :]
            )
            lines.append(
                f"  request {request.request_id}: {request.num_computed} of "
                f"{len(request.token_ids)} tokens computed, blocks {table}"
            )
        return "\n".join(lines)

    def check_plan(self, plan: StepPlan) -> None:
        """Check that every slot written lies in a block with one owner.

        Raises:
            EngineError: one does not; the block and the step are named.
        """
        counts = self._scheduler.blocks.pool.ref_counts
        block_size = self._scheduler.blocks.block_size
        shareable_before = self.protected()
        for slot in plan.slots.tolist():
            block, offset = divmod(slot, block_size)
            # Rows planned behind the writer may hold the block already: they read it in
            # this step, after the write.
            if counts[block] < 1 or offset < shareable_before.get(block, 0):
                raise EngineError(
                    f"step {plan.step} writes slot {offset} of block {block}, which has "
                    f"{counts[block]} owners and shares its first "
                    f"{shareable_before.get(block, 0)} tokens"
                )
        for request in self._scheduler.running:
            self._note(request, plan.step)

    def protected(self) -> dict[int, int]:
        """Return the blocks in the index with the tokens that no step may change any more.

        What the step being planned writes itself is left out.
        """
        index, step = self._scheduler.blocks.index, self._scheduler.blocks.step
        return {node.block: len(node.key) for node in index.nodes() if node.written_in < step}

    def check_end(self) -> None:
        """Check that no block is held once all requests have ended.

        Raises:
            EngineError: a leak, with the request and the step that held the block last.
        """
        counts = self._scheduler.blocks.pool.ref_counts
        leaked = [block for block, count in enumerate(counts) if count]
        if leaked:
            request_id, step = self._last_holder.get(leaked[0], (-1, -1))
            raise EngineError(
                f"{len(leaked)} blocks are held although no request is left; block {leaked[0]} "
                f"was last in the table of request {request_id}, in step {step}"
            )

    def _note(self, request: Request, step: int) -> None:
        for block in request.block_table[request.num_released :]:
            self._last_holder[block] = (request.request_id, step)
