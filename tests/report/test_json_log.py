"""All that is printed under `log.format=json` is JSON, one object a line."""

import io
import json
import logging
import math
import sys
from datetime import datetime
from typing import Any

from batchgen.report.json_log import JsonDisplay, JsonLines, json_on_stderr, stderr_lines
from batchgen.report.progress import Progress
from tests.support.snapshot import SNAPSHOT


def events(stream: io.StringIO) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in stream.getvalue().splitlines()]
    for event in found:
        assert list(event)[:4] == ["time", "level", "event", "message"]
        assert datetime.fromisoformat(event["time"]).tzinfo is not None
        assert event["level"] in ("info", "warning", "error")
    return found


def test_a_job_is_told_in_events_with_its_figures() -> None:
    stream, now = io.StringIO(), [0.0]
    display = JsonDisplay(10.0, JsonLines(stream))
    progress = Progress([display], clock=lambda: now[0])
    with progress.phase("generate"):
        progress.update(lambda: SNAPSHOT)
        now[0] = 5.0
        progress.update(lambda: SNAPSHOT)
        progress.say("one\ntwo", event="summary", figures={"rows": 9, "rate": math.nan})
    begun, shown, said, ended = events(stream)
    assert (begun["event"], begun["phase"]) == ("phase_started", "generate")
    assert shown["event"] == "progress"
    assert (shown["rows"], shown["total_rows"], shown["eta_s"]) == (3, 9, None)
    assert (said["message"], said["figures"]) == ("one\ntwo", {"rows": 9, "rate": None})
    assert (ended["event"], ended["seconds"]) == ("phase_ended", 5.0)


def test_what_others_write_to_standard_error_becomes_events_too(monkeypatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with json_on_stderr():
        print("a library\nprints", file=sys.stderr)
        sys.stderr.write("half ")
        sys.stderr.write('a "line"\n')
        sys.stderr.write("\r10%\r50%\rloaded\n")
        logging.getLogger("batchgen.data.output.writer").error("no %s", "room")
        logging.getLogger("x").info("not told")
        stderr_lines().write("message", "ours")
        sys.stderr.write("no end")
    assert sys.stderr is stream
    found = events(stream)
    assert [each["message"] for each in found[:4]] == [
        "a library\nprints",
        'half a "line"',
        "loaded",
        "no room",
    ]
    assert (found[3]["event"], found[3]["logger"]) == ("log", "batchgen.data.output.writer")
    assert [each["message"] for each in found[-2:]] == ["ours", "no end"]


def test_text_that_is_no_unicode_is_told_all_the_same() -> None:
    stream = io.StringIO()
    JsonLines(stream).write("message", "path \udc80", where={"a": [math.inf]})
    (event,) = events(stream)
    assert event["message"] == "path \udc80"
    assert event["where"] == {"a": [None]}
