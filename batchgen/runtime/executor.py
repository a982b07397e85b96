"""Runs step plans: swap copies, the forward pass, the sampler."""

from collections.abc import Callable
from dataclasses import dataclass
from traceback import clear_frames
from typing import Protocol

import torch
from transformers import PreTrainedModel

from batchgen.engine.step import StepOutput, StepPlan
from batchgen.errors import OutOfDeviceMemoryError
from batchgen.runtime.attention import AttentionBackend, LayerAttention, ModelForward
from batchgen.runtime.device.api import Device
from batchgen.runtime.device.cuda import device_of
from batchgen.runtime.device.graphs import DecodeGraphs, GraphStep
from batchgen.runtime.device.swap import Returning, SwapLink, written_blocks
from batchgen.runtime.device.transfers import (
    Downloads,
    PendingTokens,
    Put,
    SampledTokenBuffers,
    Uploads,
    fill_placeholders,
    has_placeholders,
)
from batchgen.runtime.kv_cache import KVCache
from batchgen.runtime.memory import is_out_of_memory
from batchgen.runtime.sampler import SamplerOutput, SamplingMetadata, prepare, sample_tokens


class StepBody(Protocol):
    """The forward pass of a step, its numbers on their way to the device."""

    def set_up(self) -> torch.Tensor:
        """Bring the numbers to where they are read; return the token ids there."""

    def logits(self) -> torch.Tensor:
        """Run it; return float32 logits, which the caller may change."""


@dataclass(frozen=True, slots=True)
class _EagerBody:
    """A forward pass kernel by kernel.

    Attributes:
        forward: the model.
        token_ids, positions: [T] int64.
        logits_at: int64, ``StepPlan.logits_at``.
        attention: the attention that all layers call.
        num_logits: S + P.
    """

    forward: ModelForward
    token_ids: torch.Tensor
    positions: torch.Tensor
    logits_at: torch.Tensor
    attention: LayerAttention
    num_logits: int

    def set_up(self) -> torch.Tensor:
        return self.token_ids

    def logits(self) -> torch.Tensor:
        logits = self.forward(self.token_ids, self.positions, self.logits_at, self.attention)
        return logits[: self.num_logits].float()


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A step whose inputs are on their way to the device.

    The tensors hold their values only while the step's work runs.

    Attributes:
        plan: what it computes.
        body: its forward pass.
        sampling: how the tokens are chosen.
        copies: [N, 2] int64, ``StepPlan.copies``.
        returning: ``StepPlan.swap_in``.
    """

    plan: StepPlan
    body: StepBody
    sampling: SamplingMetadata
    copies: torch.Tensor
    returning: list[Returning]


@dataclass(frozen=True, slots=True)
class PendingStep:
    """The output of an enqueued step; see :class:`batchgen.engine.core.PendingOutput`.

    Attributes:
        tokens: the sampled tokens, on their way to the host.
        found: what the sampler found, once the step has run.
    """

    tokens: PendingTokens
    found: list[SamplerOutput]

    def result(self) -> StepOutput:
        """Wait for the tokens."""
        token_ids = self.tokens.tokens()
        (found,) = self.found
        return StepOutput(token_ids, found.scores, found.logprobs)


class ModelExecutor:
    """The executor over a stock transformers model and a KV pool on one device.

    Args:
        model: in evaluation mode.
        cache: the pool's tensors.
        attention: the backend.
        device: the model's; None finds it.
        graphs: of decode steps; None runs all steps kernel by kernel.

    Attributes:
        cache: the pool's tensors.
        swap: the way to the CPU pool.
        graph_steps, eager_steps: forward passes that ran as a graph, and the others.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: KVCache,
        attention: AttentionBackend,
        device: Device | None = None,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self.cache = cache
        self.graph_steps = self.eager_steps = 0
        self._forward = ModelForward(model)
        self._graphs = graphs
        self._attention = attention
        self._device = device or device_of(model.device)
        self.swap = SwapLink(self._device, cache.moves, cache.swap_pool)
        self._uploads = Uploads(self._device)
        self._downloads = Downloads(self._device)
        self._sampled = SampledTokenBuffers(self._device)

    def execute(self, plan: StepPlan) -> PendingStep:
        """Enqueue all work of a plan; the host waits for nothing but a free buffer.

        Raises:
            OutOfDeviceMemoryError: the forward pass found no memory; the copies are done.
        """
        step = self._prepare_or_trim(plan)
        last, sampled = self._sampled.begin(len(plan.samples))
        feeds = has_placeholders(plan)
        self._move_blocks(step)
        found: list[SamplerOutput] = []

        @torch.inference_mode()
        def work() -> None:
            token_ids = step.body.set_up()
            if feeds:
                fill_placeholders(token_ids, last)
            found.append(sample_tokens(self.logits(step), step.sampling))
            sampled.copy_(found[-1].token_ids)

        self._run_or_refuse(work)
        is_graph = isinstance(step.body, GraphStep)
        self.graph_steps += is_graph
        self.eager_steps += not is_graph
        return PendingStep(self._downloads.send(sampled), found)

    def prepare(self, plan: StepPlan) -> PreparedStep:
        """Send a plan's arrays to the device."""
        self._uploads.begin()
        put = self._uploads.put
        body: StepBody | None = self._graphs.prepare(plan, put) if self._graphs else None
        step = PreparedStep(
            plan=plan,
            body=body or self._eager(plan, put),
            sampling=prepare(plan.samples, put),
            copies=put(plan.copies),
            returning=self.swap.prepare_return(plan.swap_in, put),
        )
        self._uploads.send()
        return step

    def _prepare_or_trim(self, plan: StepPlan) -> PreparedStep:
        """Send a plan's arrays, at a second attempt after torch gave up what it keeps in hand."""
        try:
            return self.prepare(plan)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self._device.trim()
        return self.prepare(plan)

    @torch.inference_mode()
    def logits(self, step: PreparedStep) -> torch.Tensor:
        """Run the forward pass of a prepared step.

        Returns:
            [S + P, V] float32 logits of the plan's samples, then of its given tokens.
        """
        return step.body.logits()

    def _eager(self, plan: StepPlan, put: Put) -> StepBody:
        return _EagerBody(
            forward=self._forward,
            token_ids=put(plan.token_ids),
            positions=put(plan.positions),
            logits_at=put(plan.logits_at),
            attention=self._attention.begin(plan, self.cache, put),
            num_logits=len(plan.samples) + len(plan.samples.given),
        )

    def _run_or_refuse(self, work: Callable[[], None]) -> None:
        """Enqueue a forward pass; where memory is short, what torch keeps in hand goes first.

        Raises:
            OutOfDeviceMemoryError: there is not enough. What was enqueued of the pass writes
                what the pass would have written, and nothing else.
        """
        try:
            self._device.compute.run(work)
            return
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            problem = str(error)
            # The error knows the model's frames, and these the pass's tensors: they would be
            # held as long as somebody deals with it, which is to run the step in halves.
            clear_frames(error.__traceback__)
        self._device.trim()
        raise OutOfDeviceMemoryError(problem)

    def _move_blocks(self, step: PreparedStep) -> None:
        """Enqueue a plan's copies, each after what it has to wait for."""
        plan = step.plan
        if len(plan.swap_out) or self.swap.is_sending:
            written = written_blocks(plan, self.cache.block_size)
            self.swap.send(plan.swap_out, first=written)
            self.swap.guard(written)
        if len(plan.copies):

            @torch.inference_mode()
            def copy() -> None:
                self.cache.moves.copy(*step.copies.unbind(1))

            self._device.compute.run(copy)
        self.swap.fetch(step.returning)
