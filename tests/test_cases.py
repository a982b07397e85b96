"""CASES.md names every test that stands for a public report, and only tests that exist."""

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent
NAMED = re.compile(r"`([\w/]+\.py)::(test_\w+)`")
NUMBERED = re.compile(r"^def (test_([a-su-z]\d\d)_\w+)", re.MULTILINE)


def test_the_list_of_cases_and_the_tests_agree() -> None:
    listed: set[tuple[str, str]] = set()
    for line in (TESTS / "CASES.md").read_text().splitlines():
        for file, name in NAMED.findall(line):
            listed.add((file, name))
            case = line.split("|")[1].strip()
            assert name.startswith(f"test_{case.lower()}_"), line
    there = {
        (path.relative_to(TESTS).as_posix(), name)
        for path in TESTS.rglob("test_*.py")
        for name, _ in NUMBERED.findall(path.read_text())
    }
    assert listed == there


def test_a_case_has_tests_or_a_reason_why_not_and_never_both() -> None:
    tested, _, excused = (TESTS / "CASES.md").read_text().partition("## Out of scope")
    with_tests = re.findall(r"^\| ([A-Z]\d\d) \|.*`\w+/test_", tested, re.MULTILINE)
    named = re.findall(r"^\| ([A-Z]\d\d) \|", tested, re.MULTILINE)
    reasons = dict(re.findall(r"^\| ([A-Z]\d\d) \|.*\| ([^|]+) \|$", excused, re.MULTILINE))
    assert with_tests == named == sorted(set(named))
    assert not reasons.keys() & set(named)
    assert all(reason.endswith(".") for reason in reasons.values())
