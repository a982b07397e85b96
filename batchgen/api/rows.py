"""From a call's arguments to the rows of an input that has nothing else."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from operator import index
from typing import Any

import pyarrow as pa

from batchgen.data.input.reader import RowBatch
from batchgen.errors import UsageError
from batchgen.prompts.row_sampling import PARAMS_COLUMN
from batchgen.prompts.source import (
    DEFAULT_COLUMN,
    DEFAULT_MESSAGES_COLUMN,
    DEFAULT_TOKEN_IDS_COLUMN,
    DEFAULT_TOOLS_COLUMN,
)
from batchgen.sampling import SamplingParams

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]] | None
"""A text, token ids, or the messages of a chat; None fails as a null in a column does."""

Sampling = SamplingParams | Mapping[str, Any] | None
"""Parameters by name, or an object; None is the defaults."""


def input_rows(
    prompts: Sequence[Prompt],
    sampling: Sequence[Sampling] | None,
    ids: Sequence[str | int] | None,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> RowBatch:
    """Make the rows of some prompts.

    Args:
        prompts: all of one kind.
        sampling: of each prompt, where they differ.
        ids: of each prompt; None numbers them from 0.
        tools: of all prompts.

    Raises:
        UsageError: the prompts are of several kinds or hold what is none, another argument does
            not fit them, or ids are not unique.
    """
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Sequence):
        raise UsageError(f"prompts must be a list of prompts, not {type(prompts).__name__}")
    columns = dict([_prompt_column(prompts)])
    if sampling is not None:
        _check_length("sampling", sampling, prompts)
        columns[PARAMS_COLUMN] = _column("sampling", sampling, _params_text, pa.string())
    if tools is not None:
        columns[DEFAULT_TOOLS_COLUMN] = _column(
            "tools", [tools] * len(prompts), _messages_text, pa.string()
        )
    return RowBatch(0, _id_array(ids, prompts), pa.RecordBatch.from_pydict(columns))


def _prompt_column(prompts: Sequence[Prompt]) -> tuple[str, pa.Array]:
    given = [prompt for prompt in prompts if prompt is not None]
    if all(isinstance(prompt, str) for prompt in given):
        return DEFAULT_COLUMN, _column("prompts", prompts, _same, pa.large_string())
    lists = [prompt for prompt in given if not isinstance(prompt, str | bytes | Mapping | int)]
    items = [item for each in lists for item in each]
    if len(lists) == len(given) and all(isinstance(item, Mapping) for item in items):
        return DEFAULT_MESSAGES_COLUMN, _column("prompts", prompts, _messages_text, pa.string())
    if len(lists) == len(given) and not any(isinstance(item, Mapping | str) for item in items):
        kind = pa.list_(pa.int64())
        return DEFAULT_TOKEN_IDS_COLUMN, _column("prompts", prompts, _token_ids, kind)
    raise UsageError(
        "prompts must all be texts, all lists of messages (objects with role and content), or "
        "all lists of token ids"
    )


def _column(
    name: str, values: Sequence[Any], make: Callable[[Any], Any], kind: pa.DataType
) -> pa.Array:
    """Put values into an array one by one, so that a message can name the one that does not fit."""
    arrays = [pa.array([], kind)]
    for number, value in enumerate(values):
        try:
            arrays.append(pa.array([None if value is None else make(value)], kind))
        except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
            raise UsageError(f"{name}[{number}] cannot be used: {error}") from error
    return pa.concat_arrays(arrays)


def _same(value: Any) -> Any:
    return value


def _token_ids(prompt: Any) -> list[int]:
    return [index(token) for token in prompt]


def _messages_text(messages: Any) -> str:
    return json.dumps(list(messages))


def _params_text(params: Any) -> str:
    if isinstance(params, SamplingParams):
        params = {**asdict(params), "logit_bias": dict(params.logit_bias)}
    if not isinstance(params, Mapping):
        raise TypeError(f"{params!r} is neither a mapping nor a SamplingParams")
    return json.dumps(dict(params))


def _id_array(ids: Sequence[str | int] | None, prompts: Sequence[Prompt]) -> pa.Array:
    if ids is None:
        return pa.array(range(len(prompts)), pa.int64())
    _check_length("ids", ids, prompts)
    if len(set(ids)) < len(ids):
        repeated = next(each for at, each in enumerate(ids) if each in ids[:at])
        raise UsageError(f"ids must be unique, but {repeated!r} is there twice")
    is_text = bool(ids) and isinstance(ids[0], str)
    if is_text:
        return _column("ids", ids, _same, pa.string())
    return _column("ids", ids, index, pa.int64())


def _check_length(name: str, values: Sequence[Any], prompts: Sequence[Prompt]) -> None:
    if isinstance(values, str) or len(values) != len(prompts):
        raise UsageError(f"{name} must be as many as the prompts: {len(values)} for {len(prompts)}")
