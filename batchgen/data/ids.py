"""Row ids as fixed-width keys: compared exactly, kept small, looked up by the million."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchgen.errors import UsageError

KEY_BYTES = 16
_EXAMPLES = 3

Keys = npt.NDArray[Any]


def id_keys(ids: pa.Array) -> Keys:
    """Give one sortable key for each id.

    Integers are their own keys (8 bytes a row). Text becomes a 128-bit digest (16 bytes a
    row): two different ids among 10^9 share one with a probability of about 10^-21.

    Args:
        ids: ``[N]`` integers or text, without nulls.

    Returns:
        ``[N]`` of int64, uint64 or 16-byte strings.
    """
    if pa.types.is_integer(ids.type):
        wide = np.int64 if pa.types.is_signed_integer(ids.type) else np.uint64
        return np.asarray(ids.to_numpy(zero_copy_only=False), dtype=wide)
    digests = b"".join(_digest(text) for text in ids.to_pylist())
    return np.frombuffer(digests, dtype=f"S{KEY_BYTES}")


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=KEY_BYTES).digest()


class IdCheck:
    """Watches the ids of a run go by: finds duplicates and gives a digest over all of them.

    Memory is 8 bytes a row for integer ids and 16 for text, and about three times that
    for the moment in which duplicates are looked for.
    """

    def __init__(self) -> None:
        self._keys: list[Keys] = []
        self._hash = hashlib.blake2b(digest_size=KEY_BYTES)

    def add(self, ids: pa.Array) -> None:
        """Take the ids of the next rows, in input order."""
        keys = id_keys(ids)
        self._keys.append(keys)
        self._hash.update(keys.tobytes())

    def digest(self) -> str:
        """Give a digest of all ids so far and their order, whatever the batches were."""
        return self._hash.hexdigest()

    def raise_on_duplicates(self, describe: Callable[[int], str]) -> None:
        """Refuse ids that stand more than once.

        Args:
            describe: names the row at a row index, for the message.

        Raises:
            UsageError: with up to three examples.
        """
        if not self._keys:
            return
        keys = np.concatenate(self._keys)
        # A stable sort leaves equal ids in input order, so examples name the first row first.
        order = np.argsort(keys, kind="stable")
        repeats = np.flatnonzero(keys[order[1:]] == keys[order[:-1]])
        if len(repeats) == 0:
            return
        pairs = [(int(order[i]), int(order[i + 1])) for i in repeats[:_EXAMPLES]]
        raise UsageError(_duplicates_message(pairs, len(repeats), describe))


def _duplicates_message(
    pairs: Sequence[tuple[int, int]], count: int, describe: Callable[[int], str]
) -> str:
    examples = "; ".join(f"{describe(first)} and {describe(second)}" for first, second in pairs)
    more = f" (and {count - len(pairs)} more)" if count > len(pairs) else ""
    return (
        f"input.id_column: ids must be unique, but the same id stands at {examples}{more}; "
        "name a column of unique ids with input.id_column"
    )
