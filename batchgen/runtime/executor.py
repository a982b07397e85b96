"""Runs step plans: swap copies, the forward pass, the sampler."""

import time

import torch
from transformers import PreTrainedModel

from batchgen.engine.step import IntArray, StepPlan
from batchgen.runtime.attention import AttentionBackend
from batchgen.runtime.kv_cache import KVCache
from batchgen.runtime.sampler import sample


class ModelExecutor:
    """The executor over a stock transformers model and a KV pool on one device.

    Attributes:
        cache: the pool's tensors.
        swap_s: seconds spent on swap copies.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: KVCache,
        attention: AttentionBackend,
    ) -> None:
        self.cache = cache
        self.swap_s = 0.0
        self._model = model
        self._device = model.device
        self._attention = attention

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> IntArray:
        """Run a plan; see :class:`batchgen.engine.loop.Executor`."""
        started = time.perf_counter()
        self.cache.swap_out(plan.swap_out)
        self.cache.copy(plan.copies)
        self.cache.swap_in(plan.swap_in)
        self.swap_s += time.perf_counter() - started
        logits = self.logits(plan)
        return sample(logits, plan.samples)

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> torch.Tensor:
        """Run the forward pass.

        Returns:
            [S + P, V] float32 logits of the plan's samples, then of its given tokens.
        """
        samples = plan.samples
        output = self._model(
            input_ids=torch.from_numpy(plan.token_ids).to(self._device)[None],
            position_ids=torch.from_numpy(plan.positions).to(self._device)[None],
            use_cache=False,
            logits_to_keep=torch.from_numpy(plan.logits_at).to(self._device),
            paged=self._attention.begin(plan, self.cache),
        )
        logits: torch.Tensor = output.logits[0, : len(samples) + len(samples.given)]
        return logits.float()
