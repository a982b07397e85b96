"""When outputs end: end of sequence, stop ids, min_tokens, length."""

import pytest

from batchgen.engine.core import EngineCore
from batchgen.engine.request import FinishReason, Request
from batchgen.sampling import SamplingParams
from tests.support.drive import make_requests, make_scheduler, run_all
from tests.support.fake_model import FakeExecutor

EOS, END = 7, 9


class _Obedient(FakeExecutor):
    """Returns what it is told to, or the next best where that is held back."""

    def __init__(self, wanted: list[int]) -> None:
        super().__init__(4)
        self._wanted = wanted

    def _sample(self, history, samples, index) -> int:
        choices = [*self._wanted[samples.positions[index] :], 50]
        banned = {token for e in samples.special if e.index == index for token in e.banned}
        return next(token for token in choices if token not in banned)


def _run(wanted: list[int], params: SamplingParams, max_model_len: int = 1000) -> Request:
    scheduler = make_scheduler(32, 4, eos=(EOS, END))
    engine = EngineCore(scheduler, _Obedient(wanted))
    requests = make_requests([[1] * 10], params, max_model_len)
    return run_all(engine, requests)[0]


def test_c09_min_tokens_holds_back_every_end_and_counts_outputs_only() -> None:
    wanted = [EOS] * 40
    request = _run(wanted, SamplingParams(min_tokens=4, max_tokens=32, stop_token_ids=(END, 60)))
    assert request.output_token_ids == [50, 50, 50, 50, EOS]
    assert request.finish_reason is FinishReason.STOP


def test_c09_with_ignore_eos_min_tokens_holds_back_stop_ids_only() -> None:
    params = SamplingParams(min_tokens=2, max_tokens=5, ignore_eos=True, stop_token_ids=(60,))
    request = _run([EOS, EOS, 60], params)
    assert request.output_token_ids == [EOS, EOS, 60]
    assert request.stop_reason == "60"


@pytest.mark.parametrize("ignore", [False, True])
def test_c10_any_end_of_sequence_id_ends_the_row_unless_ignored(ignore: bool) -> None:
    request = _run([20, END, 21, 22], SamplingParams(max_tokens=4, ignore_eos=ignore))
    if ignore:
        assert request.output_token_ids == [20, END, 21, 22]
        assert request.finish_reason is FinishReason.LENGTH
    else:
        assert request.output_token_ids == [20, END]
        assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, None)


def test_a_stop_id_still_ends_a_row_that_ignores_the_end_of_sequence() -> None:
    params = SamplingParams(max_tokens=9, ignore_eos=True, stop_token_ids=(21,))
    request = _run([EOS, 20, 21, 22], params)
    assert request.output_token_ids == [EOS, 20, 21]
    assert request.stop_reason == "21"


def test_the_models_length_ends_a_row_before_max_tokens() -> None:
    request = _run([20] * 50, SamplingParams(max_tokens=50), max_model_len=13)
    assert request.output_token_ids == [20] * 3
    assert request.finish_reason is FinishReason.LENGTH
