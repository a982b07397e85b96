"""The engines that the benchmark runs in processes of its own: batchgen and transformers.

Each makes the same tokens out of the same token ids, and the texts they stand for.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import transformers
from job_rows import JobRows, compose_job
from stock import load_stock
from transformers import ContinuousBatchingConfig, GenerationConfig

from batchgen.config import Config
from batchgen.errors import EngineError
from batchgen.job.front import model_source
from batchgen.job.load import load_job_model
from batchgen.runtime.kv_cache import kv_bytes_per_token
from batchgen.runtime.memory import available_host_bytes, blocks_in, default_cpu_pool_bytes
from batchgen.runtime.model import DTYPES, geometry_without_weights, resolve_device

STATIC_BATCH = 16
# Rows that transformers' continuous batching runs at once on a CPU, where its mask is dense,
# and tokens in a step and in a page there.
CONTINUOUS_ROWS = 64
CONTINUOUS_STEP_TOKENS = 512
CONTINUOUS_PAGE = 256

# What each of ours changes.
OURS: dict[str, tuple[str, ...]] = {
    "ours": (),
    "ours_no_prefix_cache": ("pool.prefix_caching=false",),
    "ours_no_cascade": ("engine.shared_prefix_attention=off",),
    "ours_input_order": ("schedule.order=input",),
    "ours_torch": ("engine.attention=torch",),
    "ours_torch_no_cascade": ("engine.attention=torch", "engine.shared_prefix_attention=off"),
}


@dataclass(frozen=True, slots=True)
class Prompt:
    """A row as engines other than ours get it.

    Attributes:
        row_index: its position in the input.
        token_ids: the prompt.
        max_tokens: tokens to make, ends of sequence included.
    """

    row_index: int
    token_ids: list[int]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run of one engine; None is what an engine does not say.

    Attributes:
        outputs: tokens generated for each row, by its position in the input.
        seconds: from token ids to text.
        version: of the engine.
        prefill_tokens: prompt tokens that went through the model, padding included.
        generate_s: of the seconds, those since the engine was ready.
        model_s: of the seconds, those in which the model ran.
        weights_bytes, pool_bytes: what the weights take, and the KV pool.
        peak_memory_bytes: the most that the process held in this run; on a GPU, what torch
            held there.
    """

    outputs: dict[int, list[int]]
    seconds: float
    version: str
    prefill_tokens: int | None = None
    generate_s: float | None = None
    model_s: float | None = None
    weights_bytes: int | None = None
    pool_bytes: int | None = None
    peak_memory_bytes: int | None = None

    @property
    def rows_per_s(self) -> float:
        """Rows finished in a second."""
        return len(self.outputs) / self.seconds

    @property
    def output_tokens(self) -> int:
        """Tokens generated."""
        return sum(map(len, self.outputs.values()))


class Engine(Protocol):
    """A loaded model, ready to run the same rows again and again."""

    def run(self, rows: JobRows) -> Measurement:
        """Run all rows."""


class Ours:
    """batchgen with the job's own keys."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._model = load_job_model(config)

    def run(self, rows: JobRows) -> Measurement:
        """See :class:`Engine`."""
        run = rows.run(self._config, self._model)
        outputs = {
            answer.row_index: list(answer.output_token_ids or ()) for answer in run.answers.values()
        }
        return Measurement(
            outputs=outputs,
            seconds=run.seconds,
            version=f"torch {torch.__version__}",
            prefill_tokens=run.prefill_tokens,
            generate_s=run.generate_s,
            model_s=run.model_s,
            weights_bytes=run.ledger.weights_bytes,
            pool_bytes=run.ledger.pool_bytes,
        )


class Static:
    """transformers' ``generate`` over batches of rows of like length, padded on the left.

    A batch runs until its longest output is there; what the others make beyond theirs is
    thrown away.

    Args:
        limit: how many rows to run, spread evenly; None for all.
    """

    def __init__(self, config: Config, limit: int | None) -> None:
        self._limit = limit
        self._model = load_stock(config, stock_dtype(config), "sdpa").model

    def run(self, rows: JobRows) -> Measurement:
        """See :class:`Engine`."""
        prompts = spread(prompts_of(rows), self._limit)
        started = time.perf_counter()
        prompts.sort(key=lambda prompt: -len(prompt.token_ids))
        outputs: dict[int, list[int]] = {}
        prefill_tokens = 0
        for start in range(0, len(prompts), STATIC_BATCH):
            batch = prompts[start : start + STATIC_BATCH]
            prefill_tokens += len(batch) * len(batch[0].token_ids)
            generated = self._generate(batch)
            _to_text(rows, generated)
            outputs |= {
                prompt.row_index: tokens for prompt, tokens in zip(batch, generated, strict=True)
            }
        return Measurement(
            outputs=outputs,
            seconds=time.perf_counter() - started,
            version=f"transformers {transformers.__version__}",
            prefill_tokens=prefill_tokens,
        )

    @torch.inference_mode()
    def _generate(self, prompts: list[Prompt]) -> list[list[int]]:
        width = len(prompts[0].token_ids)
        ids = torch.zeros((len(prompts), width), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            start = width - len(prompt.token_ids)
            ids[row, start:] = torch.tensor(prompt.token_ids)
            mask[row, start:] = 1
        device = self._model.device
        output: Any = self._model.generate(
            ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=max(prompt.max_tokens for prompt in prompts),
            do_sample=False,
            pad_token_id=0,
        )
        generated: list[list[int]] = output[:, width:].tolist()
        return [
            tokens[: prompt.max_tokens] for tokens, prompt in zip(generated, prompts, strict=True)
        ]


class Continuous:
    """transformers' continuous batching, with its own prefix sharing.

    On a CPU its pages are counted by hand, as its own guess takes most of the memory.

    Args:
        limit: how many rows to run, spread evenly; None for all.
    """

    def __init__(self, config: Config, limit: int | None) -> None:
        self._limit = limit
        self._model = load_stock(config, stock_dtype(config), "sdpa").model
        self._pages: int | None = None
        layers = geometry_without_weights(model_source(config.model))
        if self._model.device.type == "cpu" and layers is not None:
            budget = default_cpu_pool_bytes(available_host_bytes())
            token_bytes = kv_bytes_per_token(layers, self._model.dtype)
            self._pages = blocks_in(budget, token_bytes, CONTINUOUS_PAGE)

    def run(self, rows: JobRows) -> Measurement:
        """See :class:`Engine`.

        Raises:
            EngineError: its thread ended before all rows were done.
        """
        prompts = spread(prompts_of(rows), self._limit)
        started = time.perf_counter()
        # The order in which it takes rows that are handed over together, to find prefixes.
        prompts.sort(key=lambda prompt: prompt.token_ids, reverse=True)
        outputs = self._generate(prompts)
        _to_text(rows, list(outputs.values()))
        return Measurement(
            outputs=outputs,
            seconds=time.perf_counter() - started,
            version=f"transformers {transformers.__version__}",
        )

    def _generate(self, prompts: list[Prompt]) -> dict[int, list[int]]:
        outputs: dict[int, list[int]] = {}
        no_end = GenerationConfig(do_sample=False, eos_token_id=-1)
        with self._model.continuous_batching_context_manager(
            generation_config=no_end, continuous_batching_config=self._settings(prompts)
        ) as manager:
            for prompt in prompts:
                manager.add_request(
                    prompt.token_ids,
                    request_id=str(prompt.row_index),
                    max_new_tokens=prompt.max_tokens,
                )
            while len(outputs) < len(prompts):
                result = manager.get_result(timeout=1)
                if result is None:
                    if not manager.is_running():
                        raise EngineError("transformers' continuous batching ended too early")
                elif result.is_finished():
                    outputs[int(result.request_id)] = list(result.generated_tokens)
        return outputs

    def _settings(self, prompts: list[Prompt]) -> ContinuousBatchingConfig:
        if self._pages is None:
            return ContinuousBatchingConfig()
        needed = sorted(
            -(-(len(prompt.token_ids) + prompt.max_tokens) // CONTINUOUS_PAGE) + 1
            for prompt in prompts
        )
        return ContinuousBatchingConfig(
            page_size=CONTINUOUS_PAGE,
            num_blocks=min(self._pages, sum(needed[-CONTINUOUS_ROWS:])),
            max_batch_tokens=CONTINUOUS_STEP_TOKENS,
            max_requests_per_batch=CONTINUOUS_ROWS,
            use_cuda_graph=False,
            use_async_batching=False,
        )


STOCK: dict[str, Callable[[Config, int | None], Engine]] = {
    "static": Static,
    "continuous": Continuous,
}
ENGINES = (*OURS, *STOCK)


def load_engine(name: str, arguments: list[str], stock_rows: int | None) -> Engine:
    """Load one of ``ENGINES``.

    Args:
        name: which.
        arguments: the job's, as ``python -m batchgen`` takes them.
        stock_rows: rows that transformers runs, spread evenly; None for all.

    Raises:
        UsageError: the model is refused, or the arguments are.
    """
    config = compose_job([*arguments, *OURS.get(name, ())])
    return Ours(config) if name in OURS else STOCK[name](config, stock_rows)


def prompts_of(rows: JobRows) -> list[Prompt]:
    """Return a job's rows as other engines get them, without those that have errors."""
    store, room = rows.store, rows.inputs.limits.max_model_len
    prompts = []
    for row in store.good_rows.tolist():
        ids = store.ids(row).tolist()
        max_tokens = min(rows.params[row].max_tokens, room - len(ids))
        prompts.append(Prompt(int(store.row_index[row]), ids, max_tokens))
    return prompts


def spread(prompts: list[Prompt], limit: int | None) -> list[Prompt]:
    """Choose some prompts at even distances."""
    if limit is None or limit >= len(prompts):
        return list(prompts)
    return [prompts[index * len(prompts) // limit] for index in range(limit)]


def stock_dtype(config: Config) -> torch.dtype | str:
    """Return the dtype that a job computes in, in transformers' words."""
    on_cpu = resolve_device(config.model.device).type == "cpu"
    return DTYPES.get(config.model.dtype) or (torch.float32 if on_cpu else "auto")


def _to_text(rows: JobRows, outputs: list[list[int]]) -> None:
    """Decode as a job does; the texts are not looked at, but take their time."""
    if rows.inputs.tokenizer is not None:
        rows.inputs.tokenizer.batch_decode(outputs, skip_special_tokens=True)
