"""Fuzzing the reader: tables of odd types, and Parquet with bytes that do not belong there."""

import datetime
import decimal
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import assume
from hypothesis import strategies as st

from batchgen.data.input.reader import check_ids, id_type, read_original_rows, read_rows
from batchgen.data.input.source import InputSource, discover
from batchgen.errors import UsageError
from batchgen.prompts.limits import Limits
from batchgen.prompts.render import Renderer
from batchgen.prompts.source import PromptSpec
from batchgen.prompts.tokenize import tokenize_batches
from batchgen.prompts.tokenizer import load_tokenizer
from batchgen.sampling import SamplingParams
from tests.stress.fuzzing.bytes import Edit, apply, edits
from tests.support.killed_job import make_model

NAMES = (
    *("id", "prompt", "messages", "prompt_token_ids", "sampling_params", "max_tokens"),
    *("text", "a.b", "", "\u00e9", "id "),
)
SPECS = (
    PromptSpec(),
    PromptSpec(template="{{ prompt }} {{ text }} {{ id }}", format="plain"),
    PromptSpec(column="text"),
)
_BATCH_ROWS = 3


@dataclass(frozen=True)
class Input:
    """A table, how it is written, and what happens to the file.

    Attributes:
        table: the rows.
        options: of ``pyarrow.parquet.write_table``.
        edits: none leaves the file whole.
    """

    table: pa.Table
    options: dict[str, Any]
    edits: tuple[Edit, ...]


def _texts() -> st.SearchStrategy[str]:
    special = ["", "<s>", "</s>", "{{ x }}", "../../etc/passwd", "\x00", "\u202e", "a" * 300]
    return st.one_of(st.text(max_size=12), st.sampled_from(special))


def _messages() -> st.SearchStrategy[list[dict[str, Any]]]:
    roles = st.sampled_from(["user", "assistant", "system", "", None, "tool"])
    message = st.fixed_dictionaries({"role": roles, "content": st.none() | _texts()})
    return st.lists(message, max_size=3)


def _jsons() -> st.SearchStrategy[str]:
    broken = ["{", "[]", "null", '{"n": 2}', '{"temperature": 1e999}', '{"max_tokens": -1}', "NaN"]
    keys = st.sampled_from(["n", "temperature", "max_tokens", "stop", "seed", "top_p", "x"])
    values = st.one_of(st.integers(), st.floats(), st.text(max_size=4), st.none(), st.booleans())
    made = st.dictionaries(keys, values, max_size=3).map(json.dumps)
    return st.one_of(st.sampled_from(broken), made, _messages().map(json.dumps))


_MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])
_NAIVE = st.datetimes(datetime.datetime(1900, 1, 1), datetime.datetime(2200, 1, 1))
_SMALL = st.integers(-3, 300)
_ANY_TIME = st.integers(-(2**63) + 1, 2**63 - 1)

# Arrow types with what their values are.
KINDS: tuple[tuple[pa.DataType, st.SearchStrategy[Any]], ...] = (
    (pa.string(), _texts()),
    (pa.string(), _jsons()),
    (pa.large_string(), _texts()),
    (pa.string_view(), _texts()),
    (pa.binary(), st.binary(max_size=8)),
    (pa.binary(3), st.binary(min_size=3, max_size=3)),
    (pa.dictionary(pa.int32(), pa.string()), _texts()),
    (pa.int8(), st.integers(-128, 127)),
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.uint64(), st.integers(0, 2**64 - 1)),
    (pa.float64(), st.floats()),
    (pa.bool_(), st.booleans()),
    (pa.decimal128(9, 2), st.integers(-(10**6), 10**6).map(lambda n: decimal.Decimal(n) / 100)),
    (pa.date32(), _NAIVE.map(lambda each: each.date())),
    (pa.timestamp("us", "Europe/Paris"), _NAIVE),
    (pa.timestamp("ns"), _NAIVE),
    # Times that Python has no name for, and a zone that nobody knows.
    (pa.timestamp("ns"), _ANY_TIME),
    (pa.timestamp("s"), _ANY_TIME),
    (pa.timestamp("us", "Nowhere/Atall"), _ANY_TIME),
    (pa.date32(), st.integers(-(2**31), 2**31 - 1)),
    (pa.time64("ns"), st.integers(0, 86_399_999_999_999)),
    (pa.duration("ns"), _ANY_TIME),
    (pa.duration("ms"), st.timedeltas(datetime.timedelta(0), datetime.timedelta(9))),
    (pa.null(), st.none()),
    (pa.list_(pa.int32()), st.lists(_SMALL, max_size=4)),
    (pa.list_(pa.uint64()), st.lists(st.integers(0, 2**64 - 1), max_size=4)),
    (pa.large_list(pa.int64()), st.lists(st.none() | _SMALL, max_size=4)),
    (pa.list_(pa.int32(), 2), st.lists(_SMALL, min_size=2, max_size=2)),
    (pa.list_(_MESSAGE), _messages()),
    (_MESSAGE, st.fixed_dictionaries({"role": _texts(), "content": _texts()})),
    (pa.map_(pa.string(), pa.int32()), st.lists(st.tuples(_texts(), _SMALL), max_size=2)),
    (pa.list_(pa.list_(pa.string())), st.lists(st.lists(_texts(), max_size=2), max_size=2)),
)


@st.composite
def _inputs(draw: st.DrawFn) -> Input:
    num_rows = draw(st.integers(0, 8))
    names = draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True))
    columns = []
    for name in names:
        kind, values = draw(st.sampled_from(KINDS))
        if name == "id" and draw(st.booleans()):
            columns.append(pa.array(range(num_rows), pa.int64()))
            continue
        cells = st.lists(st.none() | values, min_size=num_rows, max_size=num_rows)
        columns.append(pa.array(draw(cells), kind))
    options = {
        "compression": draw(st.sampled_from(["none", "snappy", "zstd"])),
        "row_group_size": draw(st.sampled_from([1, 3, 100])),
        "data_page_version": draw(st.sampled_from(["1.0", "2.0"])),
        "use_dictionary": draw(st.booleans()),
        "store_schema": draw(st.booleans()),
        "write_page_checksum": draw(st.booleans()),
    }
    return Input(pa.table(columns, names=names), options, draw(edits()))


INPUTS = _inputs()


@contextmanager
def opened(folder: Path) -> Iterator[Callable[[Input], None]]:
    """Give what checks an input, with its files in a folder."""
    tokenizer = load_tokenizer(str(make_model(folder / "model")))
    limits = Limits(max_model_len=256, vocab_size=len(tokenizer))
    path = folder / "rows.parquet"

    def check(given: Input) -> None:
        try:
            pq.write_table(given.table, path, **given.options)
        except (pa.ArrowException, ValueError):
            # Parquet has no such type.
            assume(False)
        path.write_bytes(apply(given.edits, path.read_bytes()))
        try:
            _check_rows(discover(str(path)), tokenizer, limits, given)
        except UsageError as error:
            assert str(path) in str(error) or "column" in str(error), error

    yield check


def _check_rows(source: InputSource, tokenizer: Any, limits: Limits, given: Input) -> None:
    """Read and tokenise every row: as many come out as the footer says, in their order."""
    id_type(source, None)
    for spec in SPECS:
        try:
            renderer = Renderer(spec, source.schema, tokenizer)
        except UsageError:
            continue
        rows = read_rows(
            source, renderer.columns, id_column=None, limit=None, batch_rows=_BATCH_ROWS
        )
        batches = tokenize_batches(rows, renderer, tokenizer, limits, SamplingParams())
        assert sum(batch.num_rows for batch in batches) == source.num_rows
    check_ids(source, id_column=None, limit=None)
    indices = np.arange(source.num_rows)
    again = [batch for _, batch in read_original_rows(source, indices)]
    assert sum(batch.num_rows for batch in again) == source.num_rows
    if not given.edits:
        assert source.num_rows == len(given.table)
        whole = pq.read_table(source.files[0].path)
        if again:
            read = pa.Table.from_batches(again)
            assert all(map(_are_same, read.columns, whole.columns))


def _are_same(left: pa.ChunkedArray, right: pa.ChunkedArray) -> bool:
    # As printed where they are not equal: NaN is no equal of itself.
    return left.equals(right) or str(left.to_pylist()) == str(right.to_pylist())
