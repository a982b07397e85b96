"""The table of docs/models.md is what the engine does, for every family of the last three years."""

import re
from pathlib import Path

import pytest
from model_table import BEGIN, END, PAGE, families, judge, year

# As of transformers' release in 2026.
RECENT = [family for family in families() if year(family) >= 2024]
_LINE = re.compile(r"\| `([^`]+)` \| (equal|refused)(?:: (.+))? \|")


def _written() -> dict[str, tuple[str, str]]:
    """The table's verdicts by family."""
    table = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    lines = [line for line in table.splitlines() if line.startswith("| `")]
    found = [_LINE.fullmatch(line) for line in lines]
    return {match[1]: (match[2], match[3] or "") for match in found if match}


def test_every_family_has_a_verdict_and_none_is_wrong_or_unknown() -> None:
    assert list(_written()) == families()


@pytest.mark.parametrize("family", RECENT)
def test_t1_a_family_equals_generate_or_is_refused_with_its_reason(
    family: str, tmp_path: Path
) -> None:
    verdict = judge(family, tmp_path)
    assert (verdict.kind, verdict.detail) == _written()[family]
