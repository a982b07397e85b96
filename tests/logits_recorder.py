"""An executor that keeps what the model said."""

from typing import Any

import torch

from batchgen.engine.loop import Engine
from batchgen.engine.step import IntArray


class LogitsRecorder:
    """Keeps the logits of every sampled position beside the tokens that led to it."""

    def __init__(self, engine: Engine) -> None:
        self.records: list[tuple[list[int], torch.Tensor]] = []
        self._checked = engine._executor
        self._scheduler = engine.scheduler

    def execute(self, plan: Any) -> IntArray:
        tokens = self._checked.execute(plan)
        # The same plan again: writing the same K and V to the same slots changes nothing.
        executor = self._checked._executor
        logits = executor.logits(executor.prepare(plan))
        sampled = self._scheduler.running.requests(self._scheduler._sampled)
        for request, values in zip(sampled, logits[: len(sampled)], strict=True):
            self.records.append((request.token_ids.tolist(), values.clone()))
        return tokens
