import numpy as np
import pyarrow as pa
import pytest

from batchgen.errors import RowError, RowErrorType, UsageError
from batchgen.prompts.store import PromptStore, store_schema


def batch(first, rows):
    """rows: token ids, or an error's name."""
    bad = [isinstance(row, str) for row in rows]
    columns = [
        list(range(first, first + len(rows))),
        [2**60 + first + at for at in range(len(rows))],
        [None if is_bad else row for row, is_bad in zip(rows, bad, strict=True)],
        ['{"max_tokens": 3}' if at == 0 else None for at in range(len(rows))],
        [at % 2 for at in range(len(rows))],
        [at % 3 for at in range(len(rows))],
        [row if is_bad else None for row, is_bad in zip(rows, bad, strict=True)],
        ["why" if is_bad else None for is_bad in bad],
    ]
    schema = store_schema(pa.int64())
    arrays = [pa.array(c, field.type) for c, field in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


BATCHES = [
    batch(0, [[1, 2, 3], "null_prompt", [4]]),
    batch(3, ["empty_prompt"]),
    batch(4, [[2**31 - 1], [5, 6]]),
]


def test_a_store_gives_back_what_was_written(tmp_path):
    path = tmp_path / "_plan" / "prompts.arrow"
    with PromptStore.write(path, pa.int64(), iter(BATCHES)) as store:
        assert len(store) == 6
        assert [store.ids(row).tolist() for row in range(6)] == [
            [1, 2, 3], [], [4], [], [2**31 - 1], [5, 6],
        ]  # fmt: skip
        assert store.lengths.tolist() == [3, 0, 1, 0, 1, 2]
        assert store.cut_tokens.tolist() == [0, 1, 2, 0, 0, 1]
        assert store.row_index.tolist() == list(range(6))
        assert store.row_ids.to_pylist() == [2**60 + row for row in range(6)]
        assert store.good_rows.tolist() == [0, 2, 4, 5]
        assert list(store.errors()) == [
            (1, RowError(RowErrorType.NULL_PROMPT, "why")),
            (3, RowError(RowErrorType.EMPTY_PROMPT, "why")),
        ]
        assert store.sampling_params.to_pylist()[4] == '{"max_tokens": 3}'
        with pytest.raises(IndexError):
            store.ids(6)


def test_ids_are_views_into_the_mapped_file(tmp_path):
    path = tmp_path / "prompts.arrow"
    before = pa.total_allocated_bytes()
    store = PromptStore.write(path, pa.int64(), [batch(0, [list(range(100_000))] * 4)])
    assert pa.total_allocated_bytes() - before < 1000
    ids = store.ids(2)
    assert ids.dtype == np.int32
    assert not ids.flags.owndata
    assert not ids.flags.writeable


def test_other_arrow_readers_read_the_file(tmp_path):
    path = tmp_path / "prompts.arrow"
    PromptStore.write(path, pa.int64(), BATCHES).close()
    with pa.ipc.open_file(str(path)) as reader:
        assert reader.read_all().num_rows == 6
        assert reader.schema == store_schema(pa.int64())


def test_a_store_without_rows_keeps_its_schema(tmp_path):
    store = PromptStore.write(tmp_path / "prompts.arrow", pa.string(), [])
    assert len(store) == len(store.good_rows) == len(store.lengths) == 0
    assert store.row_ids.type == pa.string()
    assert list(store.errors()) == []


def test_a_failed_write_leaves_the_old_store_in_place(tmp_path):
    path = tmp_path / "prompts.arrow"
    PromptStore.write(path, pa.int64(), BATCHES).close()

    def breaking():
        yield BATCHES[0]
        raise RuntimeError("reader failed")

    with pytest.raises(RuntimeError):
        PromptStore.write(path, pa.int64(), breaking())
    assert len(PromptStore(path)) == 6


def test_a_broken_or_missing_store_is_named(tmp_path):
    path = tmp_path / "prompts.arrow"
    with pytest.raises(UsageError, match=r"prompts\.arrow"):
        PromptStore(path)
    path.write_bytes(b"ARROW1\x00\x00 not really")
    with pytest.raises(UsageError, match=r"prompts\.arrow"):
        PromptStore(path)
