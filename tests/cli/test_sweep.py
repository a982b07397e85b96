"""A sweep ends with its jobs side by side; its outputs are kept apart."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from batchgen.cli import app
from batchgen.errors import ExitCode
from tests.cli.conftest import Recorder
from tests.support.s3_loopback import S3

SUMMARY: dict[str, Any] = {
    "rows": 1234, "errors": {"null_prompt": 3}, "phases": {"generate_s": 2.5},
    "generated_tokens_per_s": 99.0, "prefill_tokens_computed": 5000, "preemptions": 0,
    "prefill_tokens_floor_block": 4800, "pool_bytes": 2**24, "peak_memory_bytes": 2**30,
}  # fmt: skip


@pytest.fixture
def finishing(recorder: Recorder, caller: Path) -> Recorder:
    """Jobs that leave a summary, the third one fails."""

    def finish(number: int) -> ExitCode:
        out = Path(recorder.configs[number].output.dir)
        out.mkdir(parents=True, exist_ok=True)
        summary = SUMMARY | {"phases": {"generate_s": 2.5 + number}}
        (out / "_summary.json").write_text(json.dumps(summary))
        return ExitCode.ENGINE_FAILED if number == 2 else ExitCode.DONE

    recorder.outcome = finish
    return recorder


def jobs_of(*sizes: int) -> list[dict[str, Any]]:
    return [{"pool.block_size": size, "output.dir": f"out/block-{size}"} for size in sizes]


def test_the_table_has_the_swept_keys_and_each_jobs_figures(
    composed: Callable[..., None],
    finishing: Recorder,
    caller: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    composed(*jobs_of(8, 16, 32))
    assert app.main(["-m"]) == ExitCode.ENGINE_FAILED
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0][:5] == ["job", "pool.block_size", "exit", "rows", "failed"]
    assert lines[1][:6] == ["0", "8", "0", "1,234", "3", "2.5"]
    # 16 is the default, so the key is not among what was changed.
    assert lines[2][:6] == ["1", "16", "0", "1,234", "3", "3.5"]
    assert lines[3][:5] == ["2", "32", "4", "-", "-"]
    kept = json.loads((caller / "out" / "block-sweep.json").read_text())
    assert [each["generate_s"] for each in kept] == [2.5, 3.5, None]
    assert kept[0]["keys"] == {"pool.block_size": "8"}


def test_defaults_stand_in_the_table_as_they_would_be_typed(
    composed: Callable[..., None], finishing: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    composed(
        {"pool.prefix_caching": False, "pool.num_blocks": 64, "output.dir": "out/a"},
        {"output.dir": "out/b"},
    )
    assert app.main(["-m"]) == ExitCode.DONE
    lines = [line.split()[:4] for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["job", "pool.num_blocks", "pool.prefix_caching", "exit"]
    assert lines[1] == ["0", "64", "false", "0"]
    assert lines[2] == ["1", "null", "true", "0"]


def test_the_picture_shows_what_differs_and_says_what_does_not(
    composed: Callable[..., None], finishing: Recorder, caller: Path
) -> None:
    composed(*jobs_of(8, 32))
    app.main(["-m"])
    root = ElementTree.parse(caller / "out" / "block-sweep.svg").getroot()
    texts = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "Time to generate, s" in texts
    assert {"2.5", "3.5", "pool.block_size=8"} <= set(texts)
    assert "Preemptions: 0 in every job" in texts


def test_an_interrupted_sweep_shows_what_was_not_started(
    composed: Callable[..., None],
    finishing: Recorder,
    capsys: pytest.CaptureFixture[str],
) -> None:
    finishing.outcome = lambda number: ExitCode.INTERRUPTED
    composed(*jobs_of(8, 32))
    assert app.main(["-m"]) == ExitCode.INTERRUPTED
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[2] for line in lines[1:3]] == ["75", "-"]


def test_a_single_job_is_not_compared(
    composed: Callable[..., None], finishing: Recorder, capsys: pytest.CaptureFixture[str]
) -> None:
    composed(*jobs_of(8))
    assert app.main([]) == ExitCode.DONE
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("second", ["out/./a", "out/a/b", "link", "out/a/../a"])
def test_g06_two_names_of_one_place_and_one_place_inside_another_are_refused(
    composed: Callable[..., None], recorder: Recorder, caller: Path, second: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (caller / "out" / "a").mkdir(parents=True)
    (caller / "link").symlink_to(caller / "out" / "a")
    composed({"output.dir": "out/a"}, {"output.dir": second})
    assert app.main(["-m"]) == ExitCode.USAGE
    assert "jobs 0, 1" in capsys.readouterr().err
    assert recorder.configs == []


def test_jobs_in_a_bucket_are_compared_beside_them(
    composed: Callable[..., None],
    recorder: Recorder,
    caller: Path,
    s3: S3,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def finish(number: int) -> ExitCode:
        s3.put(f"o/block-{number}/_summary.json", json.dumps(SUMMARY).encode())
        return ExitCode.DONE

    recorder.outcome = finish
    swept = enumerate((8, 32))
    composed(*({"pool.block_size": k, "output.dir": s3.uri(f"o/block-{n}")} for n, k in swept))
    assert app.main(["-m"]) == 0
    address = s3.uri("o/block-sweep.json").replace("/?", "?")
    assert f"comparison kept in {address}" in capsys.readouterr().out
    assert [each["rows"] for each in json.loads(s3.get("o/block-sweep.json"))] == [1234, 1234]
    assert s3.get("o/block-sweep.svg").startswith(b"<svg")


def test_jobs_of_one_place_in_a_bucket_are_refused(
    composed: Callable[..., None],
    recorder: Recorder,
    caller: Path,
    s3: S3,
    capsys: pytest.CaptureFixture[str],
) -> None:
    composed({"output.dir": s3.uri("o")}, {"output.dir": s3.uri("o/below")})
    assert app.main(["-m"]) == ExitCode.USAGE
    assert "would write to the same output.dir" in capsys.readouterr().err
    assert recorder.configs == []
