import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.errors import UsageError
from batchgen.prompts.shots import load_shots, render_shots
from batchgen.prompts.template import RowTemplate

ROWS = [
    {"q": "2+2", "answer": "4"},
    {"q": "caf\u00e9\u2028", "answer": "yes"},
    {"q": "", "answer": "-"},
]


def test_shots_keep_their_order_in_jsonl_and_parquet(tmp_path):
    lines = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS) + "\n"
    (tmp_path / "shots.jsonl").write_text(lines, encoding="utf-8")
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "shots.parquet")
    assert load_shots(tmp_path / "shots.jsonl") == ROWS
    assert load_shots(tmp_path / "shots.parquet") == ROWS


@pytest.mark.parametrize(
    ("text", "words"),
    [('{"q": 1}\n{"q"', "line 2"), ("[1]", "line 1"), ("\n", "no rows"), (None, "cannot be read")],
)
def test_a_broken_shots_file_is_named_with_its_line(tmp_path, text, words):
    path = tmp_path / "shots.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=words) as caught:
        load_shots(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"answer": "x"}, "row 2 lacks q"),
        ({"q": "x"}, "row 2 lacks answer"),
        ({"q": "x", "answer": None}, "row 2: answer=None"),
        ({"q": None, "answer": "x"}, "row 2: .*null"),
    ],
)
def test_an_incomplete_shot_is_named_with_its_row(row, words):
    with pytest.raises(UsageError, match=words):
        render_shots([ROWS[0], row], RowTemplate("Q {{ q }}", ["q"]), "answer")
