"""The labelling comparison's figures, on small outputs made here."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from check_json_outputs import invalid
from compare_labelling import Figures, complaints, figures_of, table

from batchgen.data.output.schema import RowResult, output_schema, to_table

PEOPLE = {"r0": "positive", "r1": "negative", "r2": "negative", "r3": "positive"}


def _write(tmp_path, **columns):
    results = [
        RowResult(id=id_, row_index=at, sample_index=0, status="ok",
                  **{name: values[at] for name, values in columns.items()})
        for at, id_ in enumerate(PEOPLE)
    ]  # fmt: skip
    out, reviews = tmp_path / "out", tmp_path / "reviews.parquet"
    out.mkdir()
    pq.write_table(to_table(results, output_schema(pa.string())), out / "part-0.parquet")
    summary = {"expected_prefill_tokens": 98, "prefill_tokens_computed": 100,
               "phases": {"generate_s": 0.5}}  # fmt: skip
    (out / "_summary.json").write_text(json.dumps(summary))
    # In another order, and more than were labelled.
    ids = ["x", *reversed(PEOPLE)]
    labels = [PEOPLE.get(id_, "positive") for id_ in ids]
    pq.write_table(pa.table({"id": ids, "label": labels}), reviews)
    return out, reviews


def test_texts_are_held_against_the_peoples_labels_by_id(tmp_path):
    out, reviews = _write(tmp_path, generated_text=[" positive", " positive", " well", None])
    (found,) = figures_of("free text", out, reviews)
    assert (found.rows, found.legal, found.agreed, found.rows_per_s) == (4, 0.5, 0.25, 8.0)
    assert found.prefill_error == pytest.approx(0.02)


def test_scores_are_read_both_ways(tmp_path):
    logprobs = [((" positive", -1.0), (" negative", -2.0))] * 4
    out, reviews = _write(tmp_path, label_logprobs=logprobs, label=[" negative"] * 4)
    plain, calibrated = figures_of("scores", out, reviews)
    assert (plain.agreed, calibrated.agreed) == (0.5, 0.5)
    assert (plain.way, calibrated.way) == ("scores", "scores, calibrated")
    assert plain.legal == calibrated.legal == 1


def test_illegal_labels_and_wrong_predictions_are_complained_of_but_free_text_is_free():
    free = Figures("free text", 10, 0.5, 0.4, 3.0, 1000, 1000)
    choice = Figures("choice", 10, 0.9, 0.4, 3.0, 1000, 1005)
    scores = Figures("scores", 10, 1.0, 0.4, 3.0, 1000, 1020)
    said = complaints([free, choice, scores])
    assert len(said) == 2
    assert said[0].startswith("choice: 10.0%")
    assert said[1].startswith("scores: the predicted")
    assert "1,000, 1,020 (1.96% off)" in table([free, choice, scores])


def test_a_text_that_is_cut_or_of_another_schema_is_not_valid():
    good = {"sentiment": "mixed", "confidence": 3, "about": "", "words": []}
    bad = {**good, "confidence": 101}
    texts = [json.dumps(good), json.dumps(bad), json.dumps(good)[:-1], "[]"]
    assert invalid(texts) == texts[1:]
