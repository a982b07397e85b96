"""What the names of files in an output directory say."""

import os
import re
import uuid

_TEMPORARY = re.compile(r"_tmp-\d+-[0-9a-f]{8}-.+\.tmp")
_PART = re.compile(r"part-(\d{5,})-[0-9a-f]{8}\.parquet")


def part_name(number: int, width: int = 5) -> str:
    """Make a new name for a part; the random end keeps two processes from one name."""
    return f"part-{number:0{width}d}-{uuid.uuid4().hex[:8]}.parquet"


def part_number(name: str) -> int | None:
    """Give a part's number, or None where the name is not a part's."""
    match = _PART.fullmatch(name)
    return int(match[1]) if match else None


def temporary_name(name: str) -> str:
    """Give a name that no other process uses and that readers skip.

    Arrow and Spark skip it for its first letter, DuckDB's ``*.parquet`` for its end.
    """
    return f"_tmp-{os.getpid()}-{uuid.uuid4().hex[:8]}-{name}.tmp"


def is_temporary(name: str) -> bool:
    """Whether :func:`temporary_name` made this name."""
    return _TEMPORARY.fullmatch(name) is not None
