"""The stock transformers model of a job: what our own path is held against."""

import time
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from job_rows import SampleKey
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    StoppingCriteria,
)

from batchgen.config import Config
from batchgen.data.output.schema import RowResult
from batchgen.engine.input_batch import InputBatch
from batchgen.engine.request import Request
from batchgen.engine.step import NO_TOKEN, SampleBatch
from batchgen.engine.stopping import StopRules
from batchgen.errors import EngineError
from batchgen.job.front import ModelFront, model_source
from batchgen.job.stream import RequestStream
from batchgen.runtime.model import resolve_device
from batchgen.runtime.sampler import sample


@dataclass(frozen=True, slots=True)
class Stock:
    """A loaded model without a generation config: what it samples with is the caller's alone.

    Attributes:
        model: in evaluation mode, on the job's device.
        eos_token_ids: ids that end a sequence.
    """

    model: Any
    eos_token_ids: frozenset[int]


def load_stock(config: Config, dtype: torch.dtype, attention: str) -> Stock:
    """Load a job's model with an attention of transformers' own."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        **model_source(config.model).keywords(), dtype=dtype, attn_implementation=attention
    )
    ids = ModelFront.load(config.model).eos_token_ids
    model.generation_config = GenerationConfig()
    return Stock(model.eval().to(resolve_device(config.model.device)), ids)


class StockModel:
    """The stock model, one row at a time; loaded when it is first asked for something."""

    def __init__(self, config: Config, dtype: torch.dtype, attention: str) -> None:
        self._how = (config, dtype, attention)

    @cached_property
    def _stock(self) -> Stock:
        return load_stock(*self._how)

    @property
    def stop_rules(self) -> StopRules:
        """When a request ends, as in our own path."""
        return StopRules(self._stock.eos_token_ids)

    def next_sample(self, request: Request) -> SampleBatch:
        """Describe how a request's next token is chosen: a batch of one."""
        alone = InputBatch(1)
        alone.join(request)
        batch = alone.samples(np.array([0]), alone.indices(), self.stop_rules.banned_now)
        alone.leave(request)
        return batch

    @torch.no_grad()
    def next_logits(self, request: Request) -> torch.Tensor:
        """Return the [V] float32 logits after a request's tokens."""
        model = self._stock.model
        ids = torch.tensor([request.token_ids.tolist()], device=model.device)
        logits: torch.Tensor = model(input_ids=ids, logits_to_keep=1).logits[0, -1].float()
        return logits

    def generate(self, stream: RequestStream) -> dict[SampleKey, RowResult]:
        """Run requests through ``generate`` in batches of 1, with our sampler in it.

        Raises:
            EngineError: logits are not numbers.
        """
        started = time.perf_counter()
        answers = {}
        for request in stream.requests():
            self._generate(request)
            for result in stream.results(request, started):
                answers[result.row_index, result.sample_index] = result
        return answers

    @torch.inference_mode()
    def _generate(self, request: Request) -> None:
        times = request.timeline
        times.admitted = times.first_token = time.perf_counter()
        model = self._stock.model
        ids = torch.tensor([request.token_ids.tolist()], device=model.device)
        turn = _Turn(request, self)
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            logits_processor=[_Choose(turn)],
            stopping_criteria=[_Stop(turn)],
            max_new_tokens=request.max_total_tokens - request.num_prompt_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        times.finished = time.perf_counter()


class _Turn:
    """One request on its way through ``generate``."""

    def __init__(self, request: Request, stock: StockModel) -> None:
        self.request = request
        self._stock = stock

    def choose(self, scores: torch.Tensor) -> int:
        """Choose the next token from [1, V] logits by our sampler, and look whether it ends."""
        request = self.request
        token = int(sample(scores.float().clone(), self._stock.next_sample(request)).token_ids[0])
        if token == NO_TOKEN:
            raise EngineError("the stock model's logits are not numbers (NaN)")
        request.token_ids.append(token)
        ended = self._stock.stop_rules.check(request)
        if ended is not None:
            request.finish_reason, request.stop_reason = ended
        return token


class _Choose(LogitsProcessor):
    """Leaves only the token that the request's parameters choose."""

    def __init__(self, turn: _Turn) -> None:
        self._turn = turn

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> Any:
        """See transformers: [1, L] ids and [1, V] scores to [1, V] scores."""
        chosen = torch.full_like(scores, float("-inf"))
        chosen[:, self._turn.choose(scores)] = 0
        return chosen


class _Stop(StoppingCriteria):
    """Ends where the request ends."""

    def __init__(self, turn: _Turn) -> None:
        self._turn = turn

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **kwargs: Any) -> Any:
        """See transformers: whether each of the rows is done, [1]."""
        done = self._turn.request.finish_reason is not None
        return torch.tensor([done], device=input_ids.device)
