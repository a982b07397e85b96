"""Changing columns of all parts, or of none."""

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from batchgen.data.output.files import OutputError
from batchgen.data.output.parts import list_parts, read_part, write_part
from batchgen.data.output.rewrite import rewrite_parts
from batchgen.data.stores.names import part_name


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    for number in (0, 7, 123_456):
        table = pa.table({"id": [number, number + 1], "label": ["a", None]})
        write_part(tmp_path / part_name(number), table)
    return tmp_path


def _rows(directory: Path) -> list[list[dict]]:
    return [read_part(path).to_pylist() for path in list_parts(directory)]


def test_every_part_is_changed_and_keeps_its_number_and_rows(parts: Path) -> None:
    numbers = [path.name.split("-")[1] for path in list_parts(parts)]
    before = _rows(parts)
    rewrite_parts(parts, lambda table: table.set_column(1, "label", pc.fill_null(table[1], "b")))
    assert [path.name.split("-")[1] for path in list_parts(parts)] == numbers
    assert _rows(parts) == [[each | {"label": each["label"] or "b"} for each in part]
                            for part in before]  # fmt: skip
    assert sorted(path.name for path in parts.iterdir() if path.name[0] == "_") == []


def test_no_part_is_changed_where_one_cannot_be(parts: Path) -> None:
    before, names = _rows(parts), [path.name for path in list_parts(parts)]

    def change(table: pa.Table) -> pa.Table:
        if table["id"][0].as_py() == 7:
            raise OutputError("the disk is full")
        return table

    with pytest.raises(OutputError):
        rewrite_parts(parts, change)
    assert [path.name for path in list_parts(parts)] == names
    assert _rows(parts) == before
