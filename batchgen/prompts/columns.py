"""What the input's columns are called and can hold."""

import difflib
from collections.abc import Callable, Sequence

import pyarrow as pa


def close_matches(name: str, candidates: Sequence[str]) -> str:
    """Return `` (did you mean ...?)`` for a misspelt name, or nothing."""
    matches = difflib.get_close_matches(name, candidates)
    return f" (did you mean {' or '.join(matches)}?)" if matches else ""


def is_text(kind: pa.DataType) -> bool:
    """Whether a column of this type holds text, in any of Arrow's encodings."""
    if pa.types.is_dictionary(kind):
        return is_text(kind.value_type)
    checks = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return any(check(kind) for check in checks)


def is_list_of(kind: pa.DataType, is_item: Callable[[pa.DataType], bool]) -> bool:
    """Whether a column of this type holds lists, in any of Arrow's forms, of such items."""
    lists = (
        pa.types.is_list,
        pa.types.is_large_list,
        pa.types.is_fixed_size_list,
        pa.types.is_list_view,
        pa.types.is_large_list_view,
    )
    if not any(check(kind) for check in lists):
        return False
    return pa.types.is_null(kind.value_type) or bool(is_item(kind.value_type))
