"""An executor that keeps what the model said."""

from typing import Any

import torch

from batchgen.engine.core import EngineCore, PendingOutput


class LogitsRecorder:
    """Keeps the logits of every sampled position beside the tokens that led to it."""

    def __init__(self, engine: EngineCore) -> None:
        self.records: list[tuple[list[int], torch.Tensor]] = []
        self._checked = engine._executor
        self._scheduler = engine.scheduler

    def execute(self, plan: Any) -> PendingOutput:
        output = self._checked.execute(plan)
        # The same plan again: writing the same K and V to the same slots changes nothing.
        executor = self._checked._executor
        logits = executor.logits(executor.prepare(plan))
        in_flight = self._scheduler._in_flight.steps[-1]
        sampled = self._scheduler.running.requests(in_flight.sampled.indices)
        for request, values in zip(sampled, logits[: len(sampled)], strict=True):
            self.records.append((request.token_ids.tolist(), values.clone()))
        return output
