"""SIGTERM and SIGINT at every place of a run: exit 75, nothing lost, the same command goes on."""

import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from batchgen.data.output import writer as writer_module
from batchgen.data.output.directory import OutputDir
from batchgen.data.output.writer import PartWriter
from batchgen.prompts.chat_template import ChatTemplate
from batchgen.runtime.executor import ModelExecutor
from tests.job.harness import Job

SIGNALS = [signal.SIGTERM, signal.SIGINT]
ROWS = [
    {"id": n, "messages": [{"role": "user", "content": f"The quick brown fox {n}"}]}
    for n in range(12)
]


@pytest.fixture
def chats(job: Job) -> Job:
    job.write(ROWS)
    job.given |= {"engine.max_num_seqs": "4", "output.rows_per_part": "2"}
    return job


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> list[Any]:
    job = Job(tmp_path_factory.mktemp("undisturbed"), model_dir)
    job.write(ROWS)
    assert job() == 0
    return job.results()


@pytest.fixture
def signal_at(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the process get signals when some function is called for the n-th time."""

    def arm(owner: Any, name: str, *numbers: int, call: int = 1) -> None:
        real, calls = getattr(owner, name), itertools.count(1)

        def wrapped(*args: Any, **options: Any) -> Any:
            if next(calls) == call:
                for number in numbers:
                    assert callable(signal.getsignal(number)), "it would end the tests"
                    os.kill(os.getpid(), number)
            return real(*args, **options)

        monkeypatch.setattr(owner, name, wrapped)

    return arm


PLACES = {
    "tokenizer": (transformers.AutoTokenizer, "from_pretrained", 1),
    "chat template": (ChatTemplate, "render", 3),
    "weights": (transformers.AutoModelForCausalLM, "from_pretrained", 1),
    "first prefill": (ModelExecutor, "execute", 1),
    "decode": (ModelExecutor, "execute", 14),
    "part": (writer_module, "write_part", 2),
    "failed rows": (OutputDir, "write_errors", 1),
    "success": (OutputDir, "mark_success", 1),
}


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("place", PLACES)
def test_h07_a_signal_anywhere_ends_the_run_with_75_and_the_same_command_goes_on(
    chats: Job,
    signal_at: Callable[..., None],
    undisturbed: list[Any],
    capsys: pytest.CaptureFixture[str],
    place: str,
    number: signal.Signals,
) -> None:
    owner, name, call = PLACES[place]
    before = [signal.getsignal(each) for each in SIGNALS]
    signal_at(owner, name, number, call=call)
    assert chats() == 75
    said = capsys.readouterr().err
    assert f"batchgen: stopped by {number.name}" in said
    assert "run the same command again to go on" in said
    assert [signal.getsignal(each) for each in SIGNALS] == before
    assert not (chats.out / "_SUCCESS").exists()
    assert not (chats.out / "_lock").exists()
    kept = [result for result in undisturbed if result[1] in kept_rows(chats)]
    assert chats.parts == [] or chats.results() == kept
    assert chats() == 0
    assert chats.results() == undisturbed


def kept_rows(job: Job) -> set[str]:
    return {str(row["row_index"]) for row in job.rows("row_index")} if job.parts else set()


def test_rows_that_are_finished_when_the_signal_comes_are_all_kept(
    chats: Job, signal_at: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    # Four rows at once of eight tokens each, none waiting for the one it shares a prefix
    # with: eight of them have ended by step 16.
    signal_at(ModelExecutor, "execute", signal.SIGTERM, call=17)
    assert chats("output.rows_per_part=1000", "pool.prefix_caching=false") == 75
    assert len(chats.rows()) == 8
    assert "4 of 12 rows are left" in capsys.readouterr().err
    assert chats() == 0
    assert chats.summary["resumed_rows"] == 8


def test_h08_what_the_writer_has_committed_or_still_holds_is_not_lost(
    chats: Job, signal_at: Callable[..., None]
) -> None:
    signal_at(PartWriter, "close", signal.SIGINT)
    assert chats("output.rows_per_part=1000") == 75
    assert len(chats.rows()) == len(ROWS)
    assert chats() == 0
    assert chats.summary["resumed_rows"] == len(ROWS)
    assert chats.summary["requests"] == 0


def test_a_second_signal_does_not_wait_for_the_step(
    chats: Job, signal_at: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    finished: list[int] = []
    real = ModelExecutor.execute

    def execute(self: ModelExecutor, plan: Any) -> Any:
        tokens = real(self, plan)
        finished.append(plan.step)
        return tokens

    monkeypatch.setattr(ModelExecutor, "execute", execute)
    signal_at(ModelExecutor, "execute", signal.SIGTERM, signal.SIGTERM, call=11)
    assert chats("pool.prefix_caching=false") == 75
    assert len(finished) == 10
    assert len(chats.rows()) == 4
    assert chats() == 0


@pytest.mark.parametrize("number", SIGNALS)
def test_a_process_that_is_signalled_exits_with_75(
    chats: Job, undisturbed: list[Any], number: signal.Signals
) -> None:
    child = chats.start()
    child.wait_until(lambda: bool(chats.parts))
    child.send(number)
    assert child.wait() == 75, child.said
    assert 0 < len(chats.rows()) < len(ROWS)
    assert chats.start().wait() == 0
    assert chats.results() == undisturbed
