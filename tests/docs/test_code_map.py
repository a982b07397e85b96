"""The code map names files that exist, and nothing else."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_map_names_fifteen_files_that_exist_and_nothing_else() -> None:
    lines = (ROOT / "docs" / "code-map.md").read_text().splitlines()
    items = [re.fullmatch(r"(\d+)\. `(batchgen/[\w/]+\.py)`: [^.]+\.", line) for line in lines[4:]]
    assert all(items), lines[4:]
    assert [int(item[1]) for item in items if item] == list(range(1, 16))
    missing = [item[2] for item in items if item and not (ROOT / item[2]).is_file()]
    assert not missing


def test_the_glossary_names_places_that_exist() -> None:
    rows = [
        line.split("|") for line in (ROOT / "docs" / "glossary.md").read_text().splitlines()
        if line.startswith("| ") and not line.startswith(("| term", "|---"))
    ]  # fmt: skip
    places = [place for row in rows for place in re.findall(r"`([\w/.]+)`", row[-2])]
    assert len(places) > 40
    assert [place for place in places if not (ROOT / "batchgen" / place).exists()] == []
