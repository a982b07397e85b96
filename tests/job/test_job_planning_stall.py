"""Planning or loading that hangs ends by itself, and says at which row."""

import time
from typing import Any

import pytest

import batchgen.run
from batchgen.job.stops.watchdog import Watchdog
from batchgen.prompts.render import Renderer
from batchgen.prompts.template import RowTemplate
from tests.job.harness import Job


@pytest.fixture
def templated(job: Job) -> Job:
    job.write([{"id": n, "text": f"fox {n}"} for n in range(12)])
    job.given |= {"prompt.template": "'{{ text }}'", "prompt.format": "plain"}
    job.given |= {"engine.stall_s": "1"}
    return job


def hang_at_row_3(hang: Any) -> None:
    real = RowTemplate.render

    def render(self: RowTemplate, row: Any, *given: Any) -> str:
        if row.get("text") == "fox 3":
            hang()
        return real(self, row, *given)

    RowTemplate.render = render  # type: ignore[method-assign]
    batchgen.run.Watchdog = lambda *given, **named: Watchdog(  # type: ignore[misc, assignment]
        *given, **named, grace_s=0.5
    )


def _sleep_and_catch_everything() -> None:
    """Hang as a template does whose errors are the row's."""
    try:
        while True:
            time.sleep(0.01)
    except Exception as error:
        raise ValueError("the row's own error") from error


def in_python() -> None:
    """Hang in code that other threads can break into."""
    hang_at_row_3(_sleep_and_catch_everything)


def in_c() -> None:
    """Hang in one call that lets no other thread run."""
    hang_at_row_3(lambda: 9 ** (9**9))


@pytest.mark.parametrize("mode", ["run", "plan", "preview"])
def test_t8_a_template_that_does_not_end_ends_the_job_with_4_and_names_the_row(
    templated: Job, mode: str
) -> None:
    child = templated.start(f"mode={mode}", "input.limit=5", before=in_python)
    assert child.wait() == 4, child.said
    assert "planning made no progress for engine.stall_s=1 s" in child.said
    assert "at work: rendering prompt.template for row 3" in child.said
    assert "Traceback" not in child.said
    assert templated() == 0


def test_t8_so_does_one_that_is_stuck_in_a_single_call_of_c_code(templated: Job) -> None:
    child = templated.start(before=in_c)
    assert child.wait() == 4, child.said
    assert "while rendering prompt.template for row 3" in child.said
    assert templated() == 0


def test_loading_that_hangs_ends_the_job_too(
    templated: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(batchgen.run, "load_job_model", lambda config: time.sleep(60))
        assert templated() == 4
    assert "loading made no progress for engine.stall_s=1 s" in capsys.readouterr().err
    assert templated() == 0


def test_planning_that_is_slow_but_goes_on_is_left_alone(
    templated: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Renderer._render_template

    def render(self: Renderer, *given: Any) -> Any:
        time.sleep(0.2)
        return real(self, *given)

    monkeypatch.setattr(Renderer, "_render_template", render)
    assert templated("engine.stall_s=1.5") == 0
