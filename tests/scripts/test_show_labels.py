"""The demo's last step, on a small output made here."""

import pyarrow as pa
import pyarrow.parquet as pq
from show_labels import labelled_rows, report

from batchgen.data.output.schema import RowResult, output_schema, to_table


def _result(row_index: int, answer: str | None) -> RowResult:
    counts = ("prompt_tokens", "cached_tokens", "prompt_blocks", "hit_blocks", "new_blocks")
    return RowResult(
        id=f"r{row_index}",
        row_index=row_index,
        sample_index=0,
        status="error" if answer is None else "ok",
        generated_text=answer,
        freed_blocks=4,
        peak_blocks=5,
        **dict.fromkeys(counts, 3),
    )


def _write(tmp_path):
    results = [_result(2, None), _result(1, " positive"), _result(0, " negative")]
    output, reviews = tmp_path / "output", tmp_path / "reviews.parquet"
    output.mkdir()
    pq.write_table(to_table(results, output_schema(pa.string())), output / "part-0.parquet")
    columns = {
        "id": ["r0", "r1", "r2"],
        "text": ["bad", "worse", "good"],
        "rating": [-2.0, -3.0, 2.0],
        "label": ["negative", "negative", "positive"],
    }
    pq.write_table(pa.table(columns), reviews)
    return output, reviews


def test_labels_stand_beside_the_ratings_in_input_order(tmp_path):
    output, reviews = _write(tmp_path)
    rows = labelled_rows(output, reviews)
    assert [(row["id"], row["answer"], row["rating"]) for row in rows] == [
        ("r0", "negative", -2.0),
        ("r1", "positive", -3.0),
    ]


def test_the_report_counts_agreement_over_all_rows_and_shows_a_few(tmp_path):
    output, reviews = _write(tmp_path)
    text = report(labelled_rows(output, reviews), 1)
    assert "1 of 2 rows (50%)" in text
    assert "bad" in text
    assert "worse" not in text
