"""The seam at which tests let a run fail: silent unless armed, once, at the time it names."""

import errno

import pytest

from batchgen.data import failpoints
from batchgen.data.failpoints import VARIABLE, reached


def failing(*names: str) -> list[str]:
    """The points at which reaching these, one after the other, fails."""
    failed = []
    for name in names:
        try:
            reached(name)
        except OSError:
            failed.append(name)
    return failed


def test_nothing_happens_unless_it_is_armed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(failpoints, "_due", lambda name: pytest.fail("it is looked up"))
    assert failing("part.begin") == []


@pytest.mark.parametrize(
    ("armed", "expected"),
    [
        ("b:eio", [1]),
        ("b:eio:2", [3]),
        ("b:eio:3", []),
        ("*:eio", [0]),
        ("*:eio:3", [2]),
        ("c:enospc", [2]),
        ("other:eio", []),
        ("*:say", []),
    ],
)
def test_it_fails_once_at_the_named_point_and_time(
    monkeypatch: pytest.MonkeyPatch, armed: str, expected: list[int]
) -> None:
    monkeypatch.setenv(VARIABLE, armed)
    names = ["a", "b", "c", "b", "c"]
    assert [n for n, name in enumerate(names) if failing(name)] == expected


@pytest.mark.parametrize(("fault", "code"), [("enospc", errno.ENOSPC), ("eio", errno.EIO)])
def test_an_error_is_the_operating_systems_and_names_the_point(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], fault: str, code: int
) -> None:
    monkeypatch.setenv(VARIABLE, f"part.begin:{fault}")
    with pytest.raises(OSError, match=r"part\.begin") as caught:
        reached("part.begin")
    assert caught.value.errno == code
    assert capfd.readouterr().err == f"failpoint part.begin: {fault}\n"


def test_say_names_every_point_and_stays_armed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, "*:say")
    assert failing("a", "b", "a") == []
    assert capfd.readouterr().err.split("\n") == [
        "failpoint a: say", "failpoint b: say", "failpoint a: say", "",
    ]  # fmt: skip
