"""Numbers that fit no column of the engine or of the output, through the whole command."""

import json
import sys

import numpy as np
import pyarrow as pa
import pytest

from batchgen.sampling.params import NO_LIMIT, SamplingParams
from tests.job.harness import Job

MODEL_LEN = 512


def _statuses(job: Job) -> dict[str, str]:
    return {row["id"]: row["status"] for row in job.rows()}


@pytest.mark.parametrize("kind", [pa.int64(), pa.uint64()])
def test_t6_no_limit_in_the_column_max_tokens_runs_to_the_models_length(
    job: Job, kind: pa.DataType
) -> None:
    largest = 2**63 - 1 if kind == pa.int64() else 2**64 - 1
    refused = -5 if kind == pa.int64() else 0
    limits = pa.array([largest, refused, 0, None], kind)
    prompts = ["The quick fox", "b", "c", "The end"]
    job.write(pa.table({"id": list("abcd"), "prompt": prompts, "max_tokens": limits}))
    assert job("sampling.max_tokens=4", "sampling.ignore_eos=true") == 0
    rows = job.rows()
    assert [row["error_type"] for row in rows] == [
        None,
        "invalid_sampling_params",
        "invalid_sampling_params",
        None,
    ]
    assert rows[0]["prompt_tokens"] + rows[0]["completion_tokens"] == MODEL_LEN
    assert rows[0]["finish_reason"] == "length"
    assert rows[3]["completion_tokens"] == 4


@pytest.mark.parametrize("number", [2**31, sys.maxsize, 2**63, 10**30, 1e30, 1e300])
def test_t25_counts_that_mean_no_limit_come_down_to_one_that_fits(number: float) -> None:
    names = ("max_tokens", "min_tokens", "top_k", "stop_on_repetition")
    params = SamplingParams().override_json(json.dumps(dict.fromkeys(names, number)))
    assert params == SamplingParams(**dict.fromkeys(names, int(number)))
    assert {getattr(params, name) for name in names} == {NO_LIMIT}
    assert np.int32(NO_LIMIT) == NO_LIMIT


def test_t25_numbers_in_sampling_params_run_or_are_the_rows_own_error(job: Job) -> None:
    good = [
        {"max_tokens": 10**30},
        {"top_k": 2**63, "temperature": 1},
        {"stop_on_repetition": 2**63},
        {"seed": 10**400, "temperature": 1},
    ]
    bad = [
        {"min_tokens": 2**63},
        {"n": 2**63},
        {"logprobs": 2**63},
        {"prompt_logprobs": 10**30},
        {"logit_bias": {"9" * 30: 1}},
        {"stop_token_ids": [10**29]},
        {"stop_token_ids": [3, 5000]},
        {"temperature": 10**400},
    ]
    job.write(
        [
            {"id": f"{number:02}", "prompt": f"fox {number}", "sampling_params": json.dumps(own)}
            for number, own in enumerate([*good, *bad])
        ]
    )
    assert job() == 0
    rows = job.rows()
    assert [row["status"] for row in rows] == ["ok"] * len(good) + ["error"] * len(bad)
    for own, row in zip(bad, rows[len(good) :], strict=True):
        assert row["error_type"] == "invalid_sampling_params"
        assert next(iter(own)) in row["error_message"]


@pytest.mark.parametrize(
    ("kind", "values"),
    [(pa.uint64(), [2**64 - 1, None, 2**63]), (pa.int64(), [2**63 - 1, None, -(2**63)])],
    ids=str,
)
def test_t25_priorities_may_be_as_large_as_their_column(
    job: Job, kind: pa.DataType, values: list[int | None]
) -> None:
    column = pa.array(values, kind)
    job.write(pa.table({"id": list("abc"), "prompt": ["x", "y", "z"], "p": column}))
    assert job("input.priority_column=p") == 0
    assert _statuses(job) == dict.fromkeys("abc", "ok")


@pytest.mark.parametrize(
    "argument",
    [
        "sampling.max_tokens=2147483648",
        "sampling.max_tokens=9223372036854775807",
        "sampling.top_k=9223372036854775807",
        "sampling.stop_on_repetition=9223372036854775807",
        "input.limit=9223372036854775807",
        "schedule.window_rows=9223372036854775807",
        "output.rows_per_part=9223372036854775807",
        "engine.max_num_batched_tokens=9223372036854775807",
    ],
)
def test_t25_a_key_may_say_no_limit_by_a_large_number(job: Job, argument: str) -> None:
    job.write([{"id": "a", "prompt": "The fox"}])
    assert job("sampling.temperature=1", argument) == 0
    assert _statuses(job) == {"a": "ok"}


@pytest.mark.parametrize(
    "argument",
    [
        "sampling.max_tokens=1000000000000000000000000000000",
        "sampling.min_tokens=9223372036854775807",
        "sampling.n=9223372036854775807",
        "sampling.logprobs=2147483648",
        "sampling.stop_token_ids=[100000000000000000000000000000]",
        "pool.num_blocks=9223372036854775807",
        "engine.max_num_seqs=2147483648",
        "engine.max_num_seqs=9223372036854775807",
        "engine.threads=9223372036854775807",
        "model.max_model_len=9223372036854775807",
    ],
)
def test_t25_a_key_whose_number_cannot_be_is_refused_by_name(
    job: Job, argument: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write([{"id": "a", "prompt": "The fox"}])
    assert job(argument) == 2
    assert argument.split("=", maxsplit=1)[0].rpartition(".")[2] in capsys.readouterr().err
