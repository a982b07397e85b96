"""The engine of the command with Python objects in and out."""

import gc
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from batchgen.api.answers import FailedPromptsError, Output, Outputs, Row
from batchgen.api.options import make_config
from batchgen.api.rows import Prompt, Sampling, input_rows
from batchgen.data.input.reader import RowBatch
from batchgen.data.output.schema import RowResult, output_schema, to_table
from batchgen.errors import UsageError
from batchgen.job.accounts.summary import engine_figures
from batchgen.job.front import ModelFront
from batchgen.job.load import LoadedEngine, build_engine, load_job_model
from batchgen.job.stream import RequestStream
from batchgen.prompts.chat_template import TemplateVariables
from batchgen.prompts.plan import closed_answers
from batchgen.prompts.planner import make_plan
from batchgen.prompts.render import Renderer
from batchgen.prompts.source import DEFAULT_TOOLS_COLUMN, PromptSpec
from batchgen.prompts.store import PromptStore
from batchgen.report.percentiles import Percentiles
from batchgen.sampling import SamplingParams


class Engine:
    """A loaded model and its pool, ready for prompts.

    What one call of :meth:`generate` leaves in the cache the next one finds. After a call that
    was broken off by an error or an interrupt the cache is empty, and the next call works.

    Args:
        model: a directory, a hub name or a ``.gguf`` file, as ``model.path``.
        options: keys of the groups ``model``, ``pool`` and ``engine`` by their own names, as
            in ``num_blocks=512``; docs/keys.md has them all.

    Raises:
        UsageError: an option is none or makes no sense, or the model cannot be used.
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        self._config = make_config(str(model), options)
        self._front = ModelFront.load(self._config.model)
        self._loaded: LoadedEngine | None = build_engine(
            self._config,
            load_job_model(self._config),
            eos_token_ids=self._front.eos_token_ids,
        )
        self._ttft_ms = Percentiles()
        self._generate_s = 0.0

    def __enter__(self) -> Self:
        """Give the engine, which is closed at the end of the block."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the engine."""
        self.close()

    def close(self) -> None:
        """Let go of the model and the pool; a closed engine answers nothing more."""
        if self._loaded is None:
            return
        device, self._loaded = self._loaded.device, None
        # Models hold themselves in cycles.
        gc.collect()
        if device.type == "cuda":
            import torch

            torch.cuda.empty_cache()

    @property
    def stats(self) -> dict[str, Any]:
        """What all calls so far came to, under the names of ``_summary.json``.

        Raises:
            UsageError: the engine is closed.
        """
        return engine_figures(self._open, self._ttft_ms, self._generate_s)

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] = None,
        *,
        ids: Sequence[str | int] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        raise_errors: bool = False,
    ) -> Outputs:
        """Answer some prompts, each once however many are alike.

        Args:
            prompts: all of one kind: texts, lists of messages, or lists of token ids. None
                fails as a null in the command's input.
            sampling: parameters by name, as in ``{"max_tokens": 32}``, or an object; or a list
                of one for each prompt, where one that makes no sense fails that prompt.
            ids: of each prompt, by default its place in the list. A random sample is decided
                by seed, id, sample and position, as in the command.
            tools: of all prompts that are messages; what the assistant may call.
            chat_template_kwargs: variables of the chat template, as in
                ``{"enable_thinking": False}``.
            continue_final_message: continue a last message of the assistant's.
            raise_errors: raise where a prompt has no answer; else its output says why.

        Returns:
            An output for each prompt, in their order.

        Raises:
            UsageError: the arguments cannot be used, or the engine is closed.
            FailedPromptsError: some have no answer, and ``raise_errors`` is set.
            EngineError: the engine cannot go on.
        """
        loaded = self._open
        if isinstance(sampling, list | tuple):
            rows, params = input_rows(prompts, sampling, ids, tools), SamplingParams()
        else:
            rows, params = input_rows(prompts, None, ids, tools), self._params(sampling)
        spec = PromptSpec(
            variables=TemplateVariables(chat_template_kwargs or {}),
            tools_column=None if tools is None else DEFAULT_TOOLS_COLUMN,
            continue_final_message=continue_final_message,
        )
        renderer = Renderer(spec, rows.table.schema, self._front.tokenizer)
        with tempfile.TemporaryDirectory(prefix="batchgen-") as folder:
            batches = self._front.tokenize([rows], renderer, params)
            path = Path(folder) / "prompts.arrow"
            with PromptStore.write(path, rows.ids.type, batches) as store:
                results = self._run(loaded, store, params)
        if renderer.rows_ending_with_assistant:
            warnings.warn(closed_answers(renderer.rows_ending_with_assistant), stacklevel=2)
        outputs = _outputs(results, rows)
        if raise_errors:
            _raise_errors(outputs)
        return outputs

    @property
    def _open(self) -> LoadedEngine:
        if self._loaded is None:
            raise UsageError("this engine is closed; make another one")
        return self._loaded

    def _params(self, sampling: Any) -> SamplingParams:
        if isinstance(sampling, SamplingParams):
            params = sampling
        elif isinstance(sampling, Mapping) or sampling is None:
            try:
                params = SamplingParams().override(sampling or {})
            except ValueError as error:
                raise UsageError(f"sampling: {error}") from error
        else:
            raise UsageError(
                "sampling must be a mapping, a SamplingParams or a list of them, not "
                f"{type(sampling).__name__}"
            )
        problem = params.problem()
        if problem is not None:
            raise UsageError(f"sampling: {problem}")
        self._front.check(params)
        return params

    def _run(
        self, loaded: LoadedEngine, store: PromptStore, params: SamplingParams
    ) -> list[RowResult]:
        pool, front = self._config.pool, self._front
        max_model_len = front.limits.max_model_len
        plan = make_plan(
            store,
            params,
            max_model_len=max_model_len,
            block_size=pool.block_size,
            prefix_caching=pool.prefix_caching,
            order="prefix",
            requests_of=front.requests_of,
        )
        stream = RequestStream(
            store,
            plan,
            params,
            front.tokenizer,
            max_model_len,
            pool.block_size,
            front.grammars,
            front.bad_words,
        )
        results = [stream.error_result(number, error) for number, error in store.errors()]
        started = time.perf_counter()
        try:
            for finished in loaded.engine.run(stream.requests()):
                for request in finished:
                    results += stream.results(request, started)
        except BaseException:
            loaded.engine.reset()
            raise
        finally:
            self._generate_s += time.perf_counter() - started
        for row in results:
            if row.time_to_first_token_ms is not None:
                self._ttft_ms.add(row.time_to_first_token_ms)
        return results


def _outputs(results: list[RowResult], rows: RowBatch) -> Outputs:
    """Put the results into the shapes of the command's output, prompt by prompt."""
    results.sort(key=lambda row: (row.row_index, row.sample_index))
    table = to_table(results, output_schema(rows.ids.type))
    samples: list[list[Row]] = [[] for _ in range(len(rows.ids))]
    for row in table.to_pylist(maps_as_pydicts="strict"):
        samples[row["row_index"]].append(Row(row))
    return Outputs(Output(tuple(each)) for each in samples)


def _raise_errors(outputs: Outputs) -> None:
    failed = [(number, output.error) for number, output in enumerate(outputs)]
    errors = [(number, error) for number, error in failed if error is not None]
    if errors:
        number, error = errors[0]
        raise FailedPromptsError(
            f"{len(errors)} of {len(outputs)} prompts have no answer, first number {number}: "
            f"{error.type.value}: {error.message}",
            outputs,
        )
