"""Tokenizers and batches for the tests of prompts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest

from tests.support.tiny_tokenizers import make


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., Any]:
    return make


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return make()


@pytest.fixture(scope="session")
def bos_tokenizer() -> Any:
    return make(adds_bos=True)


@pytest.fixture(scope="session")
def base_tokenizer() -> Any:
    return make(chat=False)


@dataclass(frozen=True)
class Batch:
    """What the reader hands over."""

    first_row_index: int
    ids: pa.Array
    table: pa.RecordBatch


@pytest.fixture(scope="session")
def batch_of() -> Callable[..., Batch]:
    def build(rows: list[dict[str, Any]], schema: pa.Schema | None = None, first: int = 0) -> Batch:
        table = pa.RecordBatch.from_pylist(rows, schema=schema)
        ids = pa.array([f"r{first + at}" for at in range(len(rows))], pa.string())
        return Batch(first, ids, table)

    return build
