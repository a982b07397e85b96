"""The plan's benchmark runs the command and reads its figures."""

import pyarrow.parquet as pq
import pytest
from bench_plan import Figures, bench, growth, run_plan, write_rows

SENTENCES = ["the camera is good.", "it broke at once.", "i like it.", "never again."]


def test_rows_are_sentences_from_a_fixed_seed_and_are_written_once(tmp_path):
    first, again = tmp_path / "new" / "first.parquet", tmp_path / "again.parquet"
    write_rows(first, 40, SENTENCES)
    write_rows(again, 40, SENTENCES)
    rows = pq.read_table(first).to_pylist()
    assert rows == pq.read_table(again).to_pylist()
    assert [row["id"] for row in rows] == list(range(40))
    assert {sum(row["text"].count(each) for each in SENTENCES) for row in rows} == {2, 3}
    write_rows(again, 40, ["other"])
    assert pq.read_table(again).to_pylist() == rows
    write_rows(again, 39, ["other"])
    assert pq.read_metadata(again).num_rows == 39


def test_the_command_is_measured_over_a_tenth_and_over_all(tmp_path, smollm2_dir, capsys):
    bench(tmp_path, 30, SENTENCES, smollm2_dir, ["pool.block_size=8"])
    few, tokenizing, _, many, *_, last = capsys.readouterr().out.splitlines()
    assert few.startswith("3 rows, ")
    assert many.startswith("30 rows, ")
    assert "tokens/s" in tokenizing
    assert "bytes of anonymous memory" in last
    assert (tmp_path / "plan" / "_plan" / "prompts.arrow").exists()


def test_a_command_that_fails_is_quoted(tmp_path, smollm2_dir):
    rows = tmp_path / "rows.parquet"
    write_rows(rows, 3, SENTENCES)
    with pytest.raises(SystemExit, match="block_sise"):
        run_plan(rows, 3, tmp_path / "out", smollm2_dir, ["pool.block_sise=8"])


def test_growth_is_the_difference_a_row():
    few, many = (
        Figures(rows, 0, 1.0, 1.0, 0.5, 0.25, 1000 + 70 * rows, 500 + 30 * rows, 0)
        for rows in (10, 100)
    )
    assert "30 bytes of anonymous memory, and 70 bytes" in growth(few, many)
