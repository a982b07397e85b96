import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from batchgen.cli import app
from batchgen.config import Mode
from batchgen.errors import EngineError, ExitCode, JobInterruptedError, UsageError
from batchgen.keys import declared_keys


def raising(error):
    def outcome(number):
        raise error

    return outcome


def test_run_gets_the_checked_config_and_the_same_as_yaml(command, recorder, caller):
    assert command("sampling.max_tokens=5", "schedule.order=input") == 0
    (config,) = recorder.configs
    assert (config.sampling.max_tokens, config.schedule.order) == (5, "input")
    assert config.input.path == str(caller / "in.parquet")
    assert config.output.dir == str(caller / "out")
    assert config.model.path == "org/model"
    assert recorder.resolved["output"]["dir"] == str(caller / "out")
    assert recorder.resolved["sampling"]["max_tokens"] == 5
    assert recorder.resolved["schedule"]["order"] == "input"
    assert recorder.resolved["prompt"]["separator"] == "\n\n"
    assert list(recorder.resolved)[:4] == ["mode", "job", "model", "input"]


def test_what_differs_from_the_defaults_is_printed(command, capsys):
    command("sampling.max_tokens=5")
    said = capsys.readouterr().err
    assert "sampling.max_tokens=5" in said
    assert "sampling.top_p" not in said


@pytest.mark.parametrize("code", list(ExitCode))
def test_the_code_of_the_job_is_the_code_of_the_command(command, recorder, composed, code):
    composed({})
    recorder.outcome = lambda number: code
    assert command() == code


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("input.path holds nothing"), 2),
        (EngineError("the device is gone"), 4),
        (JobInterruptedError("stopped"), 75),
        (KeyboardInterrupt(), 75),
    ],
)
def test_expected_failures_give_their_code_and_a_message_only(
    command, recorder, composed, capsys, error, code
):
    composed({})
    recorder.outcome = raising(error)
    assert command() == code
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert str(error) in said


def test_a_path_that_cannot_even_be_asked_about_is_refused_by_its_key(
    command, recorder, caller, capsys, monkeypatch
):
    too_long = caller / ("n" * 300)
    assert command(f"output.dir={too_long}") == 2
    assert f"output.dir={too_long}: " in capsys.readouterr().err
    real = os.stat

    def stat(path, **options):
        if str(path).startswith(str(caller / "closed")):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", stat)
        assert command("output.dir=closed/out") == 2
    said = capsys.readouterr().err
    assert f"output.dir=closed/out: {caller / 'closed' / 'out'}: Permission denied" in said
    assert "Traceback" not in said
    assert not recorder.configs


def test_a_current_directory_that_is_gone_is_said(command, recorder, capsys, monkeypatch):
    def getcwd():
        raise FileNotFoundError(2, "No such file or directory")

    with monkeypatch.context() as patch:
        patch.setattr(os, "getcwd", getcwd)
        assert command() == 2
    said = capsys.readouterr().err
    assert "the current directory has been removed" in said
    assert "Traceback" not in said
    assert not recorder.configs


def test_an_unexpected_failure_gives_1_and_a_traceback(command, recorder, composed, capsys):
    composed({})
    recorder.outcome = raising(RuntimeError("boom"))
    assert command() == 1
    assert "Traceback" in capsys.readouterr().err


def test_help_lists_every_key_with_its_default_and_meaning(capsys):
    assert app.main(["--help"]) == 0
    text = capsys.readouterr().out
    for name, key in declared_keys().items():
        (line,) = [line for line in text.splitlines() if line.strip().startswith(f"{name} ")]
        assert key.meaning in line
    assert re.search(r"sampling\.max_tokens +256 ", text)
    assert max(map(len, text.splitlines())) < 160


def test_hydras_flags_still_work(command, caller, capsys):
    assert app.main(["--cfg", "job", "pool=small", "sampling.seed=9"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert (shown["pool"]["num_blocks"], shown["sampling"]["seed"]) == (512, 9)
    assert app.main(["--no-such-flag"]) == 2
    (caller / "mine" / "pool").mkdir(parents=True)
    (caller / "mine" / "pool" / "huge.yaml").write_text("num_blocks: 7\n")
    assert app.main(["pool=huge", "--cfg", "job", "-cd", "mine"]) == 0
    assert "num_blocks: 7" in capsys.readouterr().out


def test_preview_needs_no_output_and_jobs_needs_nothing(recorder, caller, jobs, capsys):
    assert app.main(["mode=preview", "model.path=org/model", "input.path=in.parquet"]) == 0
    assert recorder.configs[0].mode is Mode.preview
    assert recorder.configs[0].output.dir == ""
    assert app.main(["mode=jobs"]) == 0
    assert len(recorder.configs) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["letters", "reviews  Labels reviews of films."]


def test_a_status_needs_a_directory_and_takes_a_whole_command_or_none(recorder, caller, capsys):
    assert app.main(["mode=status", "output.dir=out"]) == 0
    (config,) = recorder.configs
    assert config.mode is Mode.status
    assert config.output.dir == str(caller / "out")
    assert (config.model.path, config.input.path) == ("???", "???")
    named = ["mode=status", "output.dir=out", "model.path=org/model"]
    assert app.main([*named, "input.path=in.parquet"]) == 0
    assert recorder.configs[1].input.path == str(caller / "in.parquet")
    capsys.readouterr()
    assert app.main(named) == 2
    assert "input.path" in capsys.readouterr().err
    assert app.main(["mode=status"]) == 2
    assert "output.dir" in capsys.readouterr().err
    assert app.main(["mode=status", "output.dir=gs://bucket/out"]) == 2
    assert len(recorder.configs) == 2


def batchgen(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "batchgen", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_g04_no_arguments_exit_2_naming_all_missing_keys_and_leave_nothing_behind(tmp_path):
    done = batchgen(tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    for name in ("model.path", "input.path", "output.dir"):
        assert name in done.stderr
    assert "Traceback" not in done.stderr
    assert "HYDRA_FULL_ERROR" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_from_an_empty_directory_leaves_nothing_behind(tmp_path):
    done = batchgen(tmp_path, "-m", "mode=jobs", "pool.block_size=8,16")
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == []


def test_a_syntax_error_in_a_subprocess_exits_2_without_noise(tmp_path):
    done = batchgen(tmp_path, "sampling.stop=[<|end|>]")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "HYDRA_FULL_ERROR" not in done.stderr
