"""`errors.max_rate` ends a hopeless run early, and only such a one; what is done is kept."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.engine.core import FinishedOutput
from batchgen.engine.step import NO_TOKEN
from batchgen.job.stops.breaker import MIN_FAILED, Breaker
from batchgen.runtime.executor import ModelExecutor
from tests.job.harness import Job


@pytest.fixture
def break_rows(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let a share of the rows end in logits that are no numbers."""

    def arm(share: float) -> None:
        real = ModelExecutor.execute

        def execute(self: ModelExecutor, plan: Any) -> Any:
            output = real(self, plan).result()
            bad = plan.samples.noise_keys % np.uint64(1000) < 1000 * share
            tokens = np.where(bad, NO_TOKEN, output.token_ids)
            return FinishedOutput(replace(output, token_ids=tokens))

        monkeypatch.setattr(ModelExecutor, "execute", execute)

    return arm


def rows(count: int, nulls: int) -> list[dict[str, Any]]:
    return [{"id": n, "prompt": None if n < nulls else f"fox {n}"} for n in range(count)]


def test_a_run_whose_prompts_fail_stops_before_the_model_is_loaded(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write(rows(250, 120))
    job.given |= {"sampling.max_tokens": "2"}
    with monkeypatch.context() as patch:
        patch.setattr("batchgen.run.load_job_model", lambda config: pytest.fail("it is loaded"))
        for _ in range(2):
            assert job("errors.max_rate=0.4") == 3
            said = capsys.readouterr().err
            assert "120 of 250 rows have failed (120 null_prompt), so the run stops" in said
            assert "130 of 250 rows are left" in said
            assert "Raise errors.max_rate to go on" in said
            assert len(job.rows()) == 120
            assert pq.read_table(job.out / "_errors")["id"].to_pylist() == list(range(120))
            assert not (job.out / "_SUCCESS").exists()
    assert job("errors.max_rate=0.5") == 0
    assert [row["id"] for row in job.rows()] == list(range(250))
    assert job("errors.max_rate=0.4") == 3


def test_a_run_whose_rows_fail_in_the_engine_stops_once_a_hundred_have_failed(
    job: Job, break_rows: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    job.write(rows(400, 0))
    job.given |= {"sampling.max_tokens": "2", "errors.max_rate": "0.3"}
    break_rows(0.7)
    assert job() == 3
    kept = job.rows()
    num_failed = sum(row["status"] == "error" for row in kept)
    # Up to a step's rows more.
    assert MIN_FAILED <= num_failed < len(kept) < 400
    assert {row["error_type"] for row in kept} == {None, "engine_error"}
    assert not (job.out / "_SUCCESS").exists()
    monkeypatch.undo()
    assert job("output.retry_errors=true") == 0
    assert [(row["id"], row["status"]) for row in job.rows()] == [(n, "ok") for n in range(400)]
    assert job.summary["resumed_rows"] == sum(row["status"] == "ok" for row in kept)


def test_a_run_within_the_limit_or_of_few_rows_goes_to_its_end(
    job: Job, break_rows: Callable[[float], None]
) -> None:
    job.given |= {"sampling.max_tokens": "2"}
    job.write(rows(99, 98))
    assert job("errors.max_rate=0.1") == 3
    assert len(job.rows()) == 99
    assert not (job.out / "_SUCCESS").exists()
    job.write(rows(250, 0))
    break_rows(0.3)
    assert job("output.overwrite=true", "errors.max_rate=0.4") == 0
    assert len(job.rows()) == 250


def test_rows_that_failed_in_earlier_runs_count() -> None:
    breaker = Breaker(0.1, 1000, num_failed=100)
    assert not breaker.is_tripped
    breaker.add(failed=False)
    assert not breaker.is_tripped
    breaker.add(failed=True)
    assert breaker.is_tripped


@given(st.floats(0, 1), st.lists(st.booleans(), max_size=MIN_FAILED - 1))
def test_it_never_trips_on_few_rows(max_rate: float, failures: list[bool]) -> None:
    breaker = Breaker(max_rate, 10_000, num_failed=0)
    for failed in failures:
        breaker.add(failed=failed)
        assert not breaker.is_tripped


@pytest.mark.parametrize("max_rate", [0.03, 0.1, 0.4])
@pytest.mark.parametrize("seed", range(5))
def test_it_does_not_trip_by_chance_and_does_where_twice_as_many_fail(
    max_rate: float, seed: int
) -> None:
    draws = np.random.default_rng(seed).random(8000)
    for factor, trips in ((0.9, False), (2, True)):
        breaker = Breaker(max_rate, 10**9, num_failed=0)
        tripped = False
        for failed in draws < max_rate * factor:
            breaker.add(failed=bool(failed))
            tripped |= breaker.is_tripped
        assert tripped == trips


@given(st.lists(st.booleans(), min_size=1, max_size=400))
def test_without_a_limit_it_never_trips(failures: list[bool]) -> None:
    breaker = Breaker(None, len(failures), num_failed=0)
    for failed in failures:
        breaker.add(failed=failed)
    assert not breaker.is_tripped
