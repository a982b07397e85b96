"""Which part objects count: a list beside them, itself one object that is replaced whole.

An object that is complete is there for everybody, also one that a run wrote whose directory
another run had taken over meanwhile. So a part counts when the list names it. The list is
written after the part; a part that a run did not live to enter is set aside by the next run,
which makes its rows again.

Each run writes a list of its own, numbered above all that it found, and the highest number
counts. So a run that has lost the directory without knowing it enters its parts where nobody
reads (a fencing token, as Kleppmann calls it).
"""

import json
import re
import threading
import uuid
from collections.abc import Iterable, Sequence

from batchgen.data.stores.bucket import Bucket
from batchgen.data.stores.faults import StoreError
from batchgen.data.stores.names import part_number

_LIST = re.compile(r"_parts-(\d{5,})-[0-9a-f]{8}\.json")
_READS = 10


class PartLedger:
    """The lists of the parts that count in one output directory.

    Without a list all parts count, as in a directory that was copied into the storage.

    Args:
        bucket: where it lies.
        root: key of the directory.
    """

    def __init__(self, bucket: Bucket, root: str) -> None:
        self._bucket = bucket
        self._root = root
        self._own: str | None = None
        self._names: frozenset[str] | None = None
        # The writer's thread and the main one may both be the first to change something.
        self._mutex = threading.Lock()

    def counted(self, parts: Sequence[str], there: Sequence[str]) -> set[str]:
        """Give those of some parts that count.

        Args:
            parts: names of parts.
            there: all names in the directory, those of the lists among them.

        Raises:
            StoreError: the list cannot be read.
        """
        self._refuse_newer(there)
        known = self._read(there) if self._names is None else self._names
        return {name for name in parts if known is None or name in known}

    def keep(self) -> None:
        """Read the list for the last time: what others enter from now on does not count here.

        Raises:
            StoreError: the list cannot be read.
        """
        there = self._listed()
        known = self._read(there)
        parts = [name for name in there if part_number(name) is not None]
        self._names = frozenset(parts) if known is None else known

    def begin(self) -> None:
        """Begin a list of this run's own, unless it has one; other lists do not count any more.

        Raises:
            StoreError: the storage does not take it.
        """
        with self._mutex:
            if not self._own:
                self._begin()

    def enter(self, name: str) -> None:
        """Let a part count that is complete.

        Raises:
            StoreError: the list could not be written; the part does not count.
        """
        assert self._own and self._names is not None, "begun before anything is written"
        names = self._names | {name}
        self._write(self._own, names)
        self._names = names

    def forget(self, name: str) -> None:
        """Leave a part out that is gone, from the next writing of the list on."""
        if self._names is not None:
            self._names -= {name}

    def _begin(self) -> None:
        assert self._names is not None, "kept before anything is changed"
        old = _by_number(self._listed())
        number = _number(old[-1]) + 1 if old else 0
        own = f"_parts-{number:05d}-{uuid.uuid4().hex[:8]}.json"
        self._write(own, self._names)
        self._own = own
        for name in old:
            self._bucket.delete(self._key(name))

    def _refuse_newer(self, there: Sequence[str]) -> None:
        lists = _by_number(there)
        if self._own and lists and lists[-1] != self._own:
            raise StoreError(
                f"s3://{self._bucket.path(self._root)} was taken over by another run, which began "
                f"{lists[-1]}; this run stops here"
            )

    def _write(self, own: str, names: Iterable[str]) -> None:
        self._bucket.write(self._key(own), json.dumps({"parts": sorted(names)}).encode())

    def _read(self, there: Sequence[str]) -> frozenset[str] | None:
        """Read the list that counts; None where there is none."""
        for _ in range(_READS):
            lists = _by_number(there)
            if not lists:
                return None
            try:
                return _names_in(self._bucket.read(self._key(lists[-1])))
            except FileNotFoundError:
                # A run that began a new list has removed this one since the directory was listed.
                there = self._listed()
            except (ValueError, TypeError, KeyError) as error:
                where = self._bucket.path(self._key(lists[-1]))
                raise StoreError(
                    f"s3://{where} is no list of parts ({error}); remove it to let every whole "
                    "part count that is there"
                ) from error
        raise StoreError(
            f"the lists of parts in s3://{self._bucket.path(self._root)} keep changing"
        )

    def _listed(self) -> list[str]:
        return [key.rpartition("/")[2] for key, _ in self._bucket.entries(self._root)]

    def _key(self, name: str) -> str:
        return f"{self._root}/{name}"


def _names_in(content: bytes) -> frozenset[str]:
    names = json.loads(content)["parts"]
    if any(part_number(name) is None for name in names):
        raise ValueError("it names what is no part")
    return frozenset(names)


def _by_number(names: Iterable[str]) -> list[str]:
    return sorted((name for name in names if _LIST.fullmatch(name)), key=lambda n: (_number(n), n))


def _number(name: str) -> int:
    found = _LIST.fullmatch(name)
    assert found is not None
    return int(found[1])
