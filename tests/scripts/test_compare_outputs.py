"""The comparison finds a planted fault, and calls nothing a fault that is none."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from compare_outputs import NEAR_TIE, Comparison, Judge, first_difference, main, variants
from hypothesis import given
from hypothesis import strategies as st
from job_rows import compose_job, open_rows, with_block_size
from stock import StockModel

from batchgen.data.output.schema import RowResult
from batchgen.engine.request import Request
from batchgen.engine.step import SampleBatch
from batchgen.job.load import load_job_model
from batchgen.runtime.executor import ModelExecutor
from batchgen.runtime.sampler import sample
from batchgen.sampling import SamplingParams
from tests.support.sample_batch import OneSample, sample_batch
from tests.support.tiny_models import save

BLOCK = 4
OWN_PARAMS = [
    {},
    {"temperature": 1.0, "n": 2, "seed": 3},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"min_tokens": 4, "stop_token_ids": list(range(100, 150))},
    {"max_tokens": 3},
]


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> list[str]:
    """A tiny random model and rows of token ids that share 21 tokens, two of them bad or twice."""
    folder = tmp_path_factory.mktemp("job")
    model = save("llama", folder / "model")
    rng = np.random.default_rng(0)
    shared = rng.integers(3, 199, 21).tolist()
    prompts = [shared + rng.integers(3, 199, size).tolist() for size in (1, 2, 3, 5, 8, 13)]
    params = [json.dumps(each) for each in OWN_PARAMS]
    table = pa.table(
        {
            "id": ["a", "b", "c", "d", "e", "f", "again", "empty"],
            "prompt_token_ids": [*prompts, prompts[0], []],
            "sampling_params": [*params, None, None],
        }
    )
    pq.write_table(table, folder / "in.parquet")
    return [
        f"model.path={model}",
        f"input.path={folder / 'in.parquet'}",
        f"pool.block_size={BLOCK}",
        "pool.num_blocks=200",
        "pool.swap_blocks=0",
        "sampling.max_tokens=12",
    ]


def test_a_sound_job_is_equal_in_every_variant_and_to_generate(job, capsys):
    assert main([*job, "--reference"]) == 0
    said = capsys.readouterr().out
    assert said.count("8 equal, 0 near-tie, 0 DIFFERENT") == 3
    assert "b sample 1" in said
    assert "again" in said
    assert "not compared: 1 rows with" in said


def test_every_token_of_a_sound_job_is_the_stock_models_choice_after_those_before(job):
    config = compose_job(job)
    model = load_job_model(config)
    stock = StockModel(config, torch.float32, "eager")
    with open_rows(config, 6) as rows:
        answers = rows.run(config, model).answers
        assert len(answers) == 7
        for answer in answers.values():
            for position, token in enumerate(answer.output_token_ids):
                request = rows.request_before(answer, position)
                logits = stock.next_logits(request)[None]
                assert sample(logits, stock.next_sample(request)).token_ids.tolist() == [token]


def test_the_options_may_stand_anywhere_and_rows_are_the_first_ones(job, capsys):
    assert main(["--rows", "2", *job, "--block-size", "32"]) == 0
    said = capsys.readouterr().out
    assert "blocks of 32: 3 equal" in said


def _spoil_hits(monkeypatch) -> None:
    """Make every row that begins behind cached blocks read a block with other keys."""
    honest = ModelExecutor.execute

    def execute(self, plan):
        starts, ends = plan.query_starts[:-1], plan.query_starts[1:]
        hits = np.flatnonzero((plan.positions[starts] > 0) & (ends - starts > 1))
        for row in hits:
            for keys in self.cache.keys:
                keys[plan.block_tables[row, 1]] = 3.0
        return honest(self, plan)

    monkeypatch.setattr(ModelExecutor, "execute", execute)


def test_a_shared_block_with_wrong_keys_is_found_and_located(job, capsys, monkeypatch):
    _spoil_hits(monkeypatch)
    # Two rows at a time: those after the first pair find their prefix in the cache.
    assert main([*job, "--reference", "engine.max_num_seqs=2"]) == 1
    said = capsys.readouterr().out.splitlines()
    for variant in ("cache off", "generate"):
        found = [line for line in said if f", {variant}, output token " in line]
        assert found
        assert all(line.endswith("apart: DIFFERENT") for line in found)


def test_wrong_logits_in_every_variant_are_found_by_the_reference_alone(job, capsys, monkeypatch):
    honest = ModelExecutor.logits
    monkeypatch.setattr(ModelExecutor, "logits", lambda self, plan: -honest(self, plan))
    assert main(job) == 0
    assert main([*job, "--reference"]) == 1


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["sampling.max_token=5"], "sampling.max_tokens"),
        (["-m", "pool.block_size=4,8"], "exactly one job"),
        (["--block-size", "3"], "pool.block_size=3"),
    ],
)
def test_what_cannot_be_compared_is_refused_as_by_the_command(job, arguments, reason, capsys):
    assert main([*job, *arguments]) == 2
    assert reason in capsys.readouterr().err


def test_the_other_block_size_keeps_the_pools_tokens(job):
    config = compose_job([*job, "pool.num_blocks=11", "pool.swap_blocks=3"])
    pool = with_block_size(config, 16).pool
    assert (pool.num_blocks, pool.swap_blocks) == (3, 1)
    assert list(variants(compose_job([*job, "pool.block_size=256"]), None))[-1] == "blocks of 128"


def test_the_baseline_has_its_cache_on_whatever_the_job_says(job):
    chosen = variants(compose_job([*job, "pool.prefix_caching=false"]), None)
    assert [config.pool.prefix_caching for config in chosen.values()] == [True, False, True]


def _answer(**values) -> RowResult:
    return RowResult(id="r", row_index=0, **{"sample_index": 0, "status": "ok", **values})


FAILED = _answer(status="error", error_type="exceeds_kv_capacity", error_message="too long")


@pytest.mark.parametrize(
    ("other", "position", "words"),
    [
        (_answer(output_token_ids=[7, 8, 9]), None, ""),
        (_answer(output_token_ids=[7], finish_reason="stop"), 1, "ends (stop), baseline goes on"),
        (_answer(output_token_ids=[7, 8, 9, 1]), 3, "goes on, baseline ends (length)"),
        (FAILED, 0, "too long, baseline ok"),
    ],
)
def test_an_output_that_ends_elsewhere_or_failed_differs(other, position, words):
    baseline = {
        (0, sample): _answer(
            sample_index=sample, output_token_ids=[7, 8, 9], finish_reason="length"
        )
        for sample in (0, 1)
    }
    others = {(0, 0): other} if other is FAILED else {(0, 0): other, (0, 1): other}
    found = Comparison(None, None, baseline).findings(others)
    assert {(each.position, each.words) for each in found.values()} == {(position, words)}


def test_rows_that_fail_alike_are_equal():
    (found,) = Comparison(None, None, {(0, 0): FAILED}).findings({(0, 0): FAILED}).values()
    assert found.verdict == "equal"


def _request(params: SamplingParams, output=()) -> Request:
    request = Request.create(0, [5, 6], params, max_model_len=100, noise_key=77)
    request.token_ids.extend(output)
    return request


def _batch(request: Request) -> SampleBatch:
    sample = OneSample(
        request.params,
        key=request.noise_key,
        position=request.num_output_tokens,
        prompt=tuple(request.token_ids[: request.num_prompt_tokens]),
        output=tuple(request.output_token_ids),
    )
    return sample_batch([sample])


def _look(params, logits, tokens, output=()) -> tuple[float, bool]:
    judge = Judge(lambda _: torch.tensor(logits), _batch, NEAR_TIE[torch.float32])
    return judge.look(_request(params, output), tokens)


@pytest.mark.parametrize(
    ("logits", "is_near"),
    [
        ([0.0, 3.0, 3.00005], True),
        ([0.0, 3.00005, 3.0], True),
        ([0.0, 3.0, 3.0], True),
        ([0.0, 3.0, 3.0005], False),
        # Neither would be chosen: that two wrong tokens are alike excuses nothing.
        ([4.0, 3.0, 3.00005], False),
    ],
)
def test_a_greedy_near_tie_is_two_largest_logits_within_the_bound(logits, is_near):
    gap, near = _look(SamplingParams(), logits, (1, 2))
    assert near is is_near
    assert gap == pytest.approx(abs(logits[1] - logits[2]), abs=1e-6)


def test_penalties_count_before_two_logits_are_compared():
    params = SamplingParams(presence_penalty=1.0)
    gap, near = _look(params, [0.0, 4.00002, 3.0], (1, 2), output=(1,))
    assert near
    assert gap < NEAR_TIE[torch.float32]
    assert not _look(params, [0.0, 3.00002, 3.0], (1, 2), output=(1,))[1]


def test_a_random_near_tie_is_noise_at_the_border_between_two_tokens():
    params = SamplingParams(temperature=1.0)

    def chosen(shift: float) -> int | None:
        return sample(torch.tensor([[shift, 0.0]]), _batch(_request(params))).token_ids[0]

    # Token 0 grows with its logit until the noise falls into it: bisect for the border.
    low, high = -30.0, 30.0
    assert (chosen(low), chosen(high)) == (1, 0)
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if chosen(middle) == 0 else (middle, high)
    assert _look(params, [high + 5e-5, 0.0], (0, 1))[1]
    assert _look(params, [high - 5e-5, 0.0], (0, 1))[1]
    assert not _look(params, [high + 1e-3, 0.0], (0, 1))[1]


TOKENS = st.lists(st.integers(0, 2), max_size=6)


@given(TOKENS, TOKENS)
def test_outputs_are_equal_up_to_their_first_difference(ours, theirs):
    position = first_difference(ours, theirs)
    assert (position is None) == (ours == theirs)
    if position is not None:
        assert ours[:position] == theirs[:position]
        assert ours[position : position + 1] != theirs[position : position + 1]
