"""Files as objects in a bucket: whole or not there at all, and never renamed."""

import logging
import mmap
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

import pyarrow.fs as pafs

from batchgen.data import failpoints
from batchgen.data.stores.bucket import Bucket, ObjectFile
from batchgen.data.stores.lease import Claim, Lease
from batchgen.data.stores.ledger import PartLedger
from batchgen.data.stores.lock import Owner
from batchgen.data.stores.names import part_number
from batchgen.data.stores.scratch import drop_scratch, make_scratch, scratch_directory
from batchgen.s3_uri import PREFIX, S3Uri

logger = logging.getLogger(__name__)

# Between two uploads of a file that grows.
PUBLISH_S = 60.0


@dataclass(frozen=True, slots=True)
class ObjectPath:
    """An object's address, or that of a prefix of objects, written as a path is.

    Attributes:
        store: where it lies.
        key: its name in the bucket.
    """

    store: "ObjectStore"
    key: str

    @classmethod
    def of(cls, uri: S3Uri) -> Self:
        """Give the place of an address; asks nothing of the storage."""
        return cls(ObjectStore(Bucket(uri), uri.key), uri.key)

    @property
    def name(self) -> str:
        """The last step of it."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> "ObjectPath":
        """What it lies in."""
        return ObjectPath(self.store, self.key.rpartition("/")[0])

    def __truediv__(self, name: str) -> "ObjectPath":
        return ObjectPath(self.store, f"{self.key}/{name}" if self.key else name)

    def __str__(self) -> str:
        return f"{PREFIX}{self.store.bucket.path(self.key)}"


class ObjectStore:
    """Files in a bucket (see ``Store``).

    Args:
        bucket: where they lie.
        root: key of the output directory, whose parts count by a list (see ``ledger``).
    """

    def __init__(self, bucket: Bucket, root: str) -> None:
        self.bucket = bucket
        self._root = root
        self._ledger = PartLedger(bucket, root)
        self._lease: Lease | None = None

    def open(self, place: ObjectPath) -> ObjectFile:
        """Open an object for random access."""
        return self.bucket.open(place.key)

    def digest(self, place: ObjectPath) -> str:
        """Give the object's ETag: it changes with the content, and costs no reading."""
        return self.bucket.etag(place.key)

    def stamp(self, place: ObjectPath) -> str:
        """Give the object's ETag."""
        return self.bucket.etag(place.key)

    def read(self, place: ObjectPath) -> bytes:
        """Read a whole object."""
        return self.bucket.read(place.key)

    def exists(self, place: ObjectPath) -> bool:
        """Whether there is an object of this name, or one below it."""
        return bool(self.bucket.info(place.key).type != pafs.FileType.NotFound)

    def is_file(self, place: ObjectPath) -> bool:
        """Whether there is an object of this name."""
        return bool(self.bucket.info(place.key).type == pafs.FileType.File)

    def is_directory(self, place: ObjectPath) -> bool:
        """Whether there is an object below this name."""
        return bool(self.bucket.info(place.key).type == pafs.FileType.Directory)

    def walk(self, place: ObjectPath) -> list[ObjectPath]:
        """Give all objects below a prefix."""
        found = self.bucket.entries(place.key, recursive=True)
        return [ObjectPath(self, key) for key, info in found if info.type == pafs.FileType.File]

    def entries(self, place: ObjectPath) -> list[ObjectPath]:
        """Give what is below a prefix, of the parts those that count."""
        found = self._listed(place)
        strays = self._strays(found)
        return [each for each in found if each.name not in strays]

    def strays(self, place: ObjectPath) -> list[ObjectPath]:
        """Give the parts that are there and do not count."""
        found = self._listed(place)
        strays = self._strays(found)
        return [each for each in found if each.name in strays]

    @contextmanager
    def put(self, place: ObjectPath, what: str | None) -> Iterator[BinaryIO]:
        """Yield a local file that becomes an object when it is whole."""
        _reached(what, "begin")
        with tempfile.TemporaryFile() as file:
            yield file
            _reached(what, "written")
            file.flush()
            self._claim()
            self._upload(place, file)
        _reached(what, "uploaded")
        self._enter(place)
        _reached(what, "durable")

    def move(self, source: ObjectPath, target: ObjectPath) -> None:
        """Copy objects, then delete what they were copied from."""
        self._claim()
        keys = [each.key for each in self.walk(source)] or [source.key]
        pairs = [(key, target.key + key.removeprefix(source.key)) for key in keys]
        for key, copy in pairs:
            self.bucket.copy(key, copy)
        failpoints.reached("move.copied")
        self._enter(target)
        for key, _ in pairs:
            self.bucket.delete(key)

    def remove(self, place: ObjectPath) -> None:
        """Delete an object, or all below its name; here, what belongs to it."""
        drop_scratch(self.scratch(place))
        kind = self.bucket.info(place.key).type
        if kind == pafs.FileType.NotFound:
            return
        self._claim()
        if kind == pafs.FileType.Directory:
            self.bucket.delete_below(place.key)
        else:
            self.bucket.delete(place.key)
        if self._is_part(place):
            self._ledger.forget(place.name)

    def make_directory(self, place: ObjectPath) -> bool:
        """Make what belongs to the output here: a prefix is there when an object below it is."""
        if place.key == self._root:
            make_scratch(self.scratch(place))
        return False

    def drop_empty(self, place: ObjectPath) -> None:
        """Do nothing: a prefix without objects is not there."""

    def sync(self, place: ObjectPath) -> None:
        """Do nothing: what the storage has confirmed is durable."""

    def make_way(self, place: ObjectPath) -> None:
        """Do nothing: an object may have the name of a prefix."""

    def lock(self, place: ObjectPath) -> Lease:
        """Give the lease that an object stands for."""
        self._lease = Lease(self.bucket, place.key, str(place.parent), self._ledger.keep)
        return self._lease

    def holder(self, place: ObjectPath) -> tuple[bool, Owner | None]:
        """Say whether a live run has the lease, and who."""
        claim = Claim.read(self.bucket, place.key)
        if claim is None:
            return False, None
        return claim.is_live(self.bucket, place.key), claim.owner

    def scratch(self, place: ObjectPath) -> Path:
        """Name a directory of this machine that belongs to the output."""
        below = place.key.removeprefix(self._root).strip("/")
        address = f"{self.bucket.endpoint}/{self.bucket.path(self._root)}"
        return scratch_directory(address) / below

    @contextmanager
    def appended(self, place: ObjectPath) -> Iterator[Path]:
        """Yield a local file that begins with the object's content and replaces it in the end.

        It stays on this machine, so that a run that is killed loses nothing of it here; its
        whole lines also replace the object once a minute, for who looks from elsewhere.
        """
        path = self.scratch(place.parent) / place.name
        with suppress(FileNotFoundError):
            content = self.read(place)
            # A run on another machine may have added to it since the last one here.
            if not path.exists() or path.stat().st_size < len(content):
                path.write_bytes(content)
        with self._published_meanwhile(path, place):
            yield path

    def drop_scratch(self, place: ObjectPath) -> None:
        """Remove from this machine what belongs to the output."""
        drop_scratch(self.scratch(place))

    def _upload(self, place: ObjectPath, file: BinaryIO) -> None:
        if file.seek(0, os.SEEK_END) == 0:
            # An empty file cannot be mapped.
            self.bucket.write_measured(place.key, b"")
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            self.bucket.write_measured(place.key, content)

    @contextmanager
    def _published_meanwhile(self, path: Path, place: ObjectPath) -> Iterator[None]:
        """Publish a growing file now and then, and whole in the end."""
        ended = threading.Event()

        def publish() -> None:
            while not ended.wait(PUBLISH_S):
                # What fails now and then is told only where it fails in the end.
                with suppress(OSError):
                    self._publish(path, place, whole_lines=True)

        thread = threading.Thread(target=publish, name="batchgen-figures", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            try:
                self._publish(path, place)
            except OSError as error:
                # Figures are no results: a run is not lost for them.
                logger.warning("%s stays on this machine, as %s: %s", place.name, path, error)

    def _publish(self, path: Path, place: ObjectPath, *, whole_lines: bool = False) -> None:
        content = path.read_bytes()
        self._claim()
        self.bucket.write(place.key, content[: content.rfind(b"\n") + 1 if whole_lines else None])

    def _is_part(self, place: ObjectPath) -> bool:
        return place.parent.key == self._root and part_number(place.name) is not None

    def _listed(self, place: ObjectPath) -> list[ObjectPath]:
        return [ObjectPath(self, key) for key, _ in self.bucket.entries(place.key)]

    def _strays(self, found: Sequence[ObjectPath]) -> set[str]:
        parts = [each.name for each in found if self._is_part(each)]
        if not parts:
            return set()
        return set(parts) - self._ledger.counted(parts, [each.name for each in found])

    def _enter(self, place: ObjectPath) -> None:
        if self._is_part(place):
            self._ledger.enter(place.name)

    def _claim(self) -> None:
        """Make sure, before anything is changed, that this run alone may do that."""
        assert self._lease is not None, "only a directory that is held is changed"
        self._lease.confirm()
        self._ledger.begin()


def _reached(what: str | None, step: str) -> None:
    if what is not None:
        failpoints.reached(f"{what}.{step}")
