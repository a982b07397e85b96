"""What the pages say is what the code does: keys, columns, figures, links."""

import re
from pathlib import Path
from typing import Any

import make_docs
import pyarrow as pa
import pytest

from batchgen.data.output.schema import output_schema
from batchgen.errors import ExitCode, RowErrorType
from batchgen.keys import declared_keys
from tests.docs.test_doc_commands import ELSEWHERE
from tests.support.realdata import ROOT

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]


def tables(text: str) -> list[str]:
    """First cells of all tables' rows."""
    return [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| `")]


def names(section: str) -> set[str]:
    """Names in code marks in the first cells of a section's table."""
    return {name for cell in tables(section) for name in re.findall(r"`([\w.]+)`", cell)}


def section(page: str, title: str) -> str:
    text = (DOCS / page).read_text("utf-8")
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    assert found is not None, title
    return found[1]


def test_the_made_pages_are_current() -> None:
    for path, page in make_docs.pages().items():
        assert path.read_text("utf-8") == page, f"run python scripts/make_docs.py: {path.name}"


def test_the_key_reference_has_every_key_and_no_other() -> None:
    assert names((DOCS / "keys.md").read_text("utf-8")) == set(declared_keys())


def test_the_output_reference_has_every_column_in_its_order() -> None:
    text = section("output.md", "Rows")
    columns = text[text.index("<!-- columns") : text.index("<!-- end of columns")]
    assert [cell.strip("`") for cell in tables(columns)] == output_schema(pa.string()).names
    rest = text[text.index("<!-- end of columns") :]
    assert names(rest) == {kind.value for kind in RowErrorType}


def test_every_key_that_a_page_names_is_one() -> None:
    groups = {name.split(".")[0] for name in declared_keys() if "." in name}
    known = {*declared_keys(), *(name.rpartition(".")[0] for name in declared_keys())}
    pattern = re.compile(rf"(?<![\w./$-])((?:{'|'.join(groups)})\.[a-z_]+)\b(?!\()")
    for page in PAGES:
        # `structured.*` is a group; `output.md` and the like are pages.
        for name in set(pattern.findall(page.read_text("utf-8"))):
            if not name.endswith((".md", ".py")):
                assert name in known, f"{page.name} names {name}"


def test_the_exit_codes_are_listed() -> None:
    text = (DOCS / "resume.md").read_text("utf-8")
    codes = re.findall(r"^\| (\d+) \|", text, re.MULTILINE)
    assert [int(code) for code in codes] == sorted(ExitCode)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text("utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target


def test_the_index_leads_to_every_page_of_the_user() -> None:
    index = (DOCS / "index.md").read_text("utf-8")
    for path in DOCS.glob("*.md"):
        is_theirs = path.name in {"index.md", *ELSEWHERE}
        assert is_theirs or f"({path.name})" in index, path.name


def test_the_worked_examples_of_the_pool_are_right() -> None:
    text = (DOCS / "pool.md").read_text("utf-8")
    rows: list[tuple[Any, ...]] = re.findall(
        r"^\| [^|]+ \| (\d+) x (\d+) x (\d+) \| (\w+) \| ([\d,]+) \| ([\d.]+) (\w+) \| ([\d,]+) \|",
        text,
        re.MULTILINE,
    )
    assert len(rows) == 4
    for layers, heads, size, kind, per_token, block, unit, in_gib in rows:
        width = {"float32": 4, "bfloat16": 2}[kind]
        expected = 2 * int(layers) * int(heads) * int(size) * width
        assert int(per_token.replace(",", "")) == expected
        assert float(block) * {"KiB": 1 << 10, "MiB": 1 << 20}[unit] == 16 * expected
        assert int(in_gib.replace(",", "")) == (1 << 30) // expected
    # The sentiment job: 200 of 223 tokens shared, 4 generated, 256 rows.
    own = -(-(223 - 192 + 4) // 16)
    blocks = 12 + 256 * own
    assert f"12 + 256 x {own} = {blocks:,} blocks: {blocks * 720 / 1024:,.0f} MiB" in text
    assert f"256 x {-(-(223 + 4) // 16)} = 3,840 blocks" in text
    # Qwen3-8B: 54 GiB; chats of 900 tokens.
    blocks = 54 * (1 << 30) // (16 * 147_456)
    assert round(blocks, -2) == 24_600
    assert blocks // -(-900 // 16) == 431
