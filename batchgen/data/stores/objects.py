"""Files as objects in a bucket: whole or not there at all, and never renamed."""

from dataclasses import dataclass
from typing import Self

import pyarrow.fs as pafs

from batchgen.data.stores.bucket import Bucket, ObjectFile
from batchgen.s3_uri import PREFIX, S3Uri


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
        return cls(ObjectStore(Bucket(uri)), uri.key)

    @property
    def name(self) -> str:
        """The last step of it."""
        return self.key.rpartition("/")[2]

    def __truediv__(self, name: str) -> "ObjectPath":
        return ObjectPath(self.store, f"{self.key}/{name}" if self.key else name)

    def __str__(self) -> str:
        return f"{PREFIX}{self.store.bucket.path(self.key)}"


class ObjectStore:
    """Files in a bucket (see ``Store``)."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket

    def open(self, place: ObjectPath) -> ObjectFile:
        """Open an object for random access."""
        return ObjectFile(self.bucket, place.key)

    def digest(self, place: ObjectPath) -> str:
        """Give the object's ETag: it changes with the content, and costs no reading."""
        return self.bucket.etag(place.key)

    def is_file(self, place: ObjectPath) -> bool:
        """Whether there is an object of this name."""
        return bool(self.bucket.info(place.key).type == pafs.FileType.File)

    def walk(self, place: ObjectPath) -> list[ObjectPath]:
        """Give all objects below a prefix."""
        found = self.bucket.entries(place.key, recursive=True)
        return [ObjectPath(self, key) for key, info in found if info.type == pafs.FileType.File]
