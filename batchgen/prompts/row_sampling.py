"""A row's own sampling parameters: column `max_tokens` over column `sampling_params`."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchgen.errors import RowError, RowErrorType, UsageError
from batchgen.prompts.columns import is_text
from batchgen.prompts.order import Rows
from batchgen.sampling import SamplingParams

PARAMS_COLUMN = "sampling_params"
MAX_TOKENS_COLUMN = "max_tokens"


def sampling_columns(schema: pa.Schema) -> tuple[str, ...]:
    """Return those of the two sampling columns that the input has.

    Raises:
        UsageError: one of them has a type that cannot hold sampling parameters.
    """
    checks = {
        PARAMS_COLUMN: (is_text, "a JSON text"),
        MAX_TOKENS_COLUMN: (pa.types.is_integer, "an integer"),
    }
    found = [name for name in checks if name in schema.names]
    for name in found:
        fits, wanted = checks[name]
        kind = schema.field(name).type
        if not fits(kind) and not pa.types.is_null(kind):
            raise UsageError(
                f"column '{name}' sets a row's own sampling parameters and must be {wanted}, "
                f"but is {kind}; cast it, or rename it where it means something else"
            )
    return tuple(found)


class RowSampling:
    """Merges and checks the sampling parameters of rows against the job's."""

    def __init__(
        self,
        sampling: SamplingParams,
        output_problem: Callable[[SamplingParams], RowError | None] = lambda params: None,
    ) -> None:
        """Take the job's parameters, and what says why no output can be as they ask."""
        self._sampling = sampling
        self._output_problem = output_problem
        # Few distinct values stand in many rows; where each row has its own, memory is bounded.
        self._merged = lru_cache(maxsize=4096)(self._merge)

    def overrides(self, table: pa.RecordBatch) -> Iterator[str | RowError | None]:
        """Yield for each row its merged overrides as JSON, or None, or what is wrong."""
        names = table.schema.names
        nulls: list[Any] = [None] * table.num_rows
        params = table.column(PARAMS_COLUMN).to_pylist() if PARAMS_COLUMN in names else nulls
        limits = (
            table.column(MAX_TOKENS_COLUMN).to_pylist() if MAX_TOKENS_COLUMN in names else nulls
        )
        for text, max_tokens in zip(params, limits, strict=True):
            yield self._merged(text, max_tokens)

    def _merge(self, text: str | None, max_tokens: int | None) -> str | RowError | None:
        try:
            values = {} if text is None else _parse(text)
            if max_tokens is not None:
                values["max_tokens"] = max_tokens
            params = self._sampling.override(values)
        except ValueError as error:
            return RowError(RowErrorType.INVALID_SAMPLING_PARAMS, str(error))
        problem = self._output_problem(params)
        if problem is not None:
            return problem
        # Sorted at the top only: the order of a schema's properties has a meaning.
        given = {name: values[name] for name in sorted(values) if values[name] is not None}
        return json.dumps(given) if given else None


def _parse(text: str) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"sampling_params is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"sampling_params must be a JSON object, not {type(values).__name__}")
    return values


def num_samples(params: SamplingParams) -> int:
    """Count the samples that have to be computed: greedy ones are all the same."""
    return 1 if params.is_greedy else params.n


def result_key(params: SamplingParams) -> SamplingParams | None:
    """Return what a request's result depends on besides its ids; None where on noise.

    Greedy decoding looks at neither the seed nor the candidate filters, and all of its
    samples are the same.
    """
    if not params.is_greedy:
        return None
    return replace(params, n=1, seed=0, top_p=1.0, top_k=0, min_p=0.0)


def row_params(column: pa.ChunkedArray, sampling: SamplingParams) -> list[SamplingParams]:
    """Return every row's own parameters from the store's JSON; equal ones are one object."""
    seen: dict[str | None, SamplingParams] = {None: sampling}
    for text in column.unique().to_pylist():
        if text is not None:
            seen[text] = sampling.override_json(text)
    return [seen[text] for text in column.to_pylist()]


@dataclass(frozen=True, slots=True)
class RowNeeds:
    """What the plan asks of the sampling parameters, [store rows] each.

    Attributes:
        samples: requests of the row.
        max_tokens: most tokens of an output, as far as the model's length goes.
        result_keys: a number for what the result depends on besides the prompt's ids; -1
            where it depends on noise of its own.
        logs_prompt: 1 where the logits of the whole prompt are wanted, else 0.
    """

    samples: Rows
    max_tokens: Rows
    result_keys: Rows
    logs_prompt: Rows


def row_needs(
    column: pa.ChunkedArray,
    sampling: SamplingParams,
    max_model_len: int,
    requests_of: Callable[[SamplingParams], int],
) -> RowNeeds:
    """Read the rows' own parameters; only numbers are kept, however many differ.

    Args:
        column: JSON of each row's own parameters, null where it has none.
        sampling: the job's, which these override.
        requests_of: gives the requests of a row with some parameters.
    """
    # Encoded first: joined texts of more than 2 GiB would not fit one array.
    encoded = column.dictionary_encode().combine_chunks()
    numbers: dict[SamplingParams | None, int] = {None: -1}
    # The last one stands for rows without parameters of their own, whose code is -1.
    needs = np.empty((len(encoded.dictionary) + 1, 4), np.int64)
    for at, text in enumerate(chain(encoded.dictionary, [None])):
        params = sampling if text is None else sampling.override_json(text.as_py())
        number = numbers.setdefault(result_key(params), len(numbers) - 1)
        max_tokens = 1 if params.score_choices else params.max_tokens
        logs_prompt = params.prompt_logprobs is not None
        needs[at] = requests_of(params), min(max_tokens, max_model_len), number, logs_prompt
    codes = pc.fill_null(encoded.indices, -1).to_numpy()
    return RowNeeds(*(column[codes] for column in needs.T))
