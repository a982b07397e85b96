"""The floor: how long a job's matrix products take alone, at fixed shapes.

The prompt tokens that no sharing avoids (E_1) run in full steps; every other generated token
runs in steps of as many rows as there are, at most 256. Per step, the linear products use the
model's own weights, one after another, with torch's `linear`; the vocabulary's only the rows
that sample. The attention products are `bmm` at the mean context: all queries of a step at
once over what is shared, row by row over what is a row's own. No norm, no softmax, no gather,
no scheduling: no run in this dtype through the same products can be faster.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from job_rows import JobRows, compose_job
from stock import load_stock
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from batchgen.config import Config, Order
from batchgen.errors import UsageError
from batchgen.job.front import model_source
from batchgen.runtime.kv_cache import LayerGeometry
from batchgen.runtime.model import geometry_without_weights
from bench_parts.engines import stock_dtype

STEP_TOKENS = {"cpu": 512, "cuda": 8192}
DECODE_ROWS = 256
# Timed runs of each product set; the first one before them is not timed.
TIMINGS = 3
# K and V of this many bytes are read in turn, as the layers of a model are.
KV_BYTES = 1 << 30
# Below this share of a model's weights the products are not most of its work.
LEAST_COVERAGE = 0.9


@dataclass(frozen=True, slots=True)
class Work:
    """What a job's tokens come to, as sums over its requests.

    Attributes:
        prefill_tokens: E_1.
        prefill_context: tokens that these see, themselves included.
        decode_tokens: generated tokens that run through the model: all but each row's last.
        decode_shared, decode_own: tokens that these see, those that the row shares with a
            neighbour and the others.
        samples: tokens generated.
        rows: requests.
    """

    prefill_tokens: int
    prefill_context: int
    decode_tokens: int
    decode_shared: int
    decode_own: int
    samples: int
    rows: int

    @property
    def decode_rows(self) -> int:
        """Rows of a step that decodes."""
        return min(DECODE_ROWS, self.rows)


@dataclass(frozen=True, slots=True)
class Floor:
    """Seconds of the products of a whole job.

    Attributes:
        parts: by the products' name.
    """

    parts: dict[str, float]

    @property
    def seconds(self) -> float:
        """All products, one after another."""
        return sum(self.parts.values())


def count_work(lengths: Sequence[int], shared: Sequence[int], outputs: Sequence[int]) -> Work:
    """Count the tokens of requests in prefix order.

    Args:
        lengths: prompt tokens of each.
        shared: leading tokens that each has in common with the one before it.
        outputs: tokens that each generates.
    """
    length, lcp, output = (np.asarray(each, np.int64) for each in (lengths, shared, outputs))
    # A token at position p sees p + 1 tokens.
    seen = length * (length + 1) // 2 - lcp * (lcp + 1) // 2
    decoded = output - 1
    context = decoded * length + decoded * (decoded + 1) // 2
    with_neighbour = np.maximum(lcp, np.append(lcp[1:], 0))
    in_common = decoded * np.minimum(with_neighbour, length)
    return Work(
        prefill_tokens=int((length - lcp).sum()),
        prefill_context=int(seen.sum()),
        decode_tokens=int(decoded.sum()),
        decode_shared=int(in_common.sum()),
        decode_own=int((context - in_common).sum()),
        samples=int(output.sum()),
        rows=len(length),
    )


def job_work(rows: JobRows, config: Config) -> Work:
    """Count the tokens of a job's requests, those of duplicates once."""
    by_prefix = replace(config, schedule=replace(config.schedule, order=Order.prefix))
    plan, _ = rows.stream(by_prefix)
    room = rows.inputs.limits.max_model_len
    lengths = rows.store.lengths[plan.order]
    shared = plan.requests_by_prefix.shared_by_store_row(rows.store.num_rows)
    wanted = np.array([rows.params[row].max_tokens for row in plan.order.tolist()])
    return count_work(
        lengths.tolist(),
        shared[plan.order].tolist(),
        np.minimum(wanted, room - lengths).tolist(),
    )


class Products:
    """A model's products, to be timed at the shapes of a job.

    Args:
        config: the job's.

    Raises:
        UsageError: the model's weights are mostly not in linear layers (experts, say), or
            the shapes of its K and V are not known without running it.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._model = load_stock(config, stock_dtype(config), "sdpa").model
        head = self._model.get_output_embeddings().weight
        self._vocabulary: torch.Tensor = head.detach()
        self._linear = [weight for weight in _weights(self._model) if weight is not head]
        layers = geometry_without_weights(model_source(config.model))
        known = sum(weight.numel() for weight in self._linear)
        if layers is None or known < LEAST_COVERAGE * _inner_weights(self._model):
            raise UsageError(
                f"model.path={config.model.path}: there is no floor for this model, whose "
                f"weights are not mostly those of plain linear layers; add --no-floor"
            )
        self._layers = layers
        text_config = self._model.config.get_text_config(decoder=True)
        self._num_heads: int = text_config.num_attention_heads

    def run(self, rows: JobRows) -> Floor:
        """Measure the products of a job's rows."""
        return self.measure(job_work(rows, self._config))

    @torch.inference_mode()
    def measure(self, work: Work) -> Floor:
        """Time each set of products, and multiply it by how often the job needs it."""
        step = min(STEP_TOKENS[self._model.device.type], work.prefill_tokens)
        rows = work.decode_rows
        prefill_steps = work.prefill_tokens / step
        decode_steps = work.decode_tokens / rows
        parts = {
            "prefill linear": prefill_steps * self._linear_s(step),
            "vocabulary": work.samples / rows * self._vocabulary_s(rows),
            "prefill attention": prefill_steps
            * self._shared_s(step, work.prefill_context // work.prefill_tokens),
        }
        if work.decode_tokens:
            shared = work.decode_shared // work.decode_tokens
            own = work.decode_own // work.decode_tokens
            parts |= {
                "decode linear": decode_steps * self._linear_s(rows),
                "decode attention shared": decode_steps * self._shared_s(rows, shared),
                "decode attention own": decode_steps * self._own_s(rows, own),
            }
        return Floor(parts)

    def _linear_s(self, tokens: int) -> float:
        """Time all linear layers over [tokens, in] inputs."""
        inputs = {size: self._random(tokens, size) for size in {w.shape[1] for w in self._linear}}

        def products() -> None:
            for weight in self._linear:
                functional.linear(inputs[weight.shape[1]], weight)

        return self._time(products)

    def _vocabulary_s(self, rows: int) -> float:
        hidden = self._random(rows, self._vocabulary.shape[1])
        return self._time(lambda: functional.linear(hidden, self._vocabulary))

    def _shared_s(self, queries: int, context: int) -> float:
        """Time the attention of [queries] tokens that all see the same [context] ones."""

        def shapes(layer: LayerGeometry) -> tuple[int, int]:
            return layer.num_kv_heads, queries * self._group(layer)

        return self._attention_s(shapes, context)

    def _own_s(self, rows: int, context: int) -> float:
        """Time the attention of [rows] tokens that see [context] others each."""

        def shapes(layer: LayerGeometry) -> tuple[int, int]:
            return rows * layer.num_kv_heads, self._group(layer)

        return self._attention_s(shapes, context)

    def _attention_s(
        self, shapes: Callable[[LayerGeometry], tuple[int, int]], context: int
    ) -> float:
        """Time both products of all layers.

        Args:
            shapes: products in a layer's batch, and queries in each.
            context: keys that a query sees where the layer's window lets it.
        """
        if not context:
            return 0.0
        calls = list(islice(self._operands(shapes, context), len(self._layers)))

        def products() -> None:
            for query, key, weights, value in calls:
                torch.bmm(query, key)
                torch.bmm(weights, value)

        return self._time(products)

    def _operands(
        self, shapes: Callable[[LayerGeometry], tuple[int, int]], context: int
    ) -> Iterator[tuple[torch.Tensor, ...]]:
        """Make each layer's operands; layers of one shape share some where memory is short."""
        made: dict[Any, list[tuple[torch.Tensor, ...]]] = {}
        for index, layer in enumerate(self._layers):
            batch, queries = shapes(layer)
            keys = min(context, layer.window or context)
            known = made.setdefault((batch, queries, keys, layer), [])
            size = batch * keys * (layer.key_size + layer.value_size) * self._model.dtype.itemsize
            if len(known) >= max(1, KV_BYTES // size):
                yield known[index % len(known)]
                continue
            operands = (
                self._random(batch, queries, layer.key_size),
                self._random(batch, keys, layer.key_size).transpose(1, 2),
                self._random(batch, queries, keys) if not known else known[0][2],
                self._random(batch, keys, layer.value_size),
            )
            known.append(operands)
            yield operands

    def _group(self, layer: LayerGeometry) -> int:
        return self._num_heads // layer.num_kv_heads

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=self._model.dtype, device=self._model.device)

    def _time(self, products: Callable[[], object]) -> float:
        """Return the median seconds of a call."""
        seconds = []
        for _ in range(1 + TIMINGS):
            self._synchronize()
            started = time.perf_counter()
            products()
            self._synchronize()
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds[1:])

    def _synchronize(self) -> None:
        if self._model.device.type == "cuda":
            torch.cuda.synchronize(self._model.device)


def load_products(arguments: list[str]) -> Products:
    """Load a job's model for its products alone.

    Raises:
        UsageError: as for :class:`Products`, or the arguments are refused.
    """
    return Products(compose_job(arguments))


def _weights(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Return the [out, in] weights of all linear layers, in the order of the model."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            yield module.weight
        elif isinstance(module, Conv1D):
            yield module.weight.t()


def _inner_weights(model: Any) -> int:
    """Count the parameters that are no embeddings, the vocabulary's projection among these."""
    outer = {module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    outer.add(model.get_output_embeddings().weight)
    return sum(each.numel() for each in model.parameters() if each not in outer)
