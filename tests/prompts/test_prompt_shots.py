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
    lines, table = (load_shots(tmp_path / f"shots.{kind}") for kind in ("jsonl", "parquet"))
    assert list(lines.rows) == list(table.rows) == ROWS
    where = f"prompt.shots_file={tmp_path}/shots"
    assert list(lines.places) == [f"{where}.jsonl, line {number}" for number in (1, 3, 5)]
    assert list(table.places) == [f"{where}.parquet, row {number}" for number in (0, 1, 2)]


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
    # One number of a line, whatever the parser counts.
    assert str(caught.value).removeprefix(f"prompt.shots_file={path}").count("line ") < 2


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"answer": "x"}, "line 3 lacks q"),
        ({"q": "x"}, "line 3 lacks answer"),
        ({"q": "x", "answer": None}, "line 3: answer=None"),
        ({"q": None, "answer": "x"}, r"line 3: .*null.*\{\{ column or '' \}\}"),
    ],
)
def test_an_incomplete_shot_is_named_with_its_place(tmp_path, row, words):
    path = tmp_path / "shots.jsonl"
    path.write_text(f"{json.dumps(ROWS[0])}\n\n{json.dumps(row)}\n")
    shots = load_shots(path)
    with pytest.raises(UsageError, match=rf"shots_file={path}, {words}"):
        render_shots(shots.rows, RowTemplate("Q {{ q }}", ["q"]), "answer", shots.places)
