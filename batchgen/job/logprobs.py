"""From the engine's log-probabilities to the output's columns."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from batchgen.data.output.logprobs import RowLogprobs
from batchgen.data.output.schema import RowResult
from batchgen.engine.logprobs import TokenLogprobs
from batchgen.engine.request import Request


def logprob_columns(request: Request) -> dict[str, Any]:
    """Give what an ended request fills of :class:`~batchgen.data.output.schema.RowResult`."""
    log, params = request.logprobs, request.params
    if log is None:
        return {}
    columns: dict[str, Any] = {}
    prompt_end = request.num_prompt_tokens
    if params.prompt_logprobs is not None and log.first == 1:
        columns["prompt_logprobs"] = _columns_of(log, 1, prompt_end, params.prompt_logprobs)
    if params.logprobs is not None:
        logprobs = _columns_of(log, prompt_end, len(request.token_ids), params.logprobs)
        columns |= {"logprobs": logprobs, "cumulative_logprob": logprobs.cumulative}
    return columns


def _columns_of(log: TokenLogprobs, begin: int, end: int, num_best: int) -> RowLogprobs:
    rows, columns = log.rows(begin, end), slice(0, 1 + num_best)
    return RowLogprobs(
        rows.token_ids[:, columns], rows.logprobs[:, columns], rows.ranks, has_first=begin == 1
    )


def with_prompt_logprobs(results: Sequence[RowResult]) -> list[RowResult]:
    """Give all samples of a row the prompt's log-probabilities, which one of them has."""
    found = next((each for each in results if each.prompt_logprobs is not None), None)
    if found is None:
        return list(results)
    return [replace(each, prompt_logprobs=found.prompt_logprobs) for each in results]
