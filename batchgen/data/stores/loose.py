"""Single files outside of any run's care: read and written as they are, wherever they lie."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from batchgen.s3_uri import S3Uri, is_s3

if TYPE_CHECKING:
    from batchgen.data.stores.bucket import Bucket


@dataclass(frozen=True, slots=True)
class LooseFile:
    """A file on a disk or in a bucket.

    Attributes:
        store: the address of its bucket; None for a disk.
        path: its path, or its key in the bucket.
    """

    store: S3Uri | None
    path: str

    @classmethod
    def of(cls, path: str) -> Self:
        """Give the file that a path or an address names.

        Raises:
            UsageError: the address makes no sense.
        """
        if not is_s3(path):
            return cls(None, path)
        uri = S3Uri.parse("output.dir", path)
        return cls(replace(uri, key=""), uri.key)

    @classmethod
    def below(cls, folder: str, name: str) -> Self:
        """Give a file in a folder.

        Raises:
            UsageError: the folder is an address that makes no sense.
        """
        return cls.of(folder).with_end(f"/{name}")

    def with_end(self, end: str) -> Self:
        """Give the file whose name goes on like this."""
        return replace(self, path=self.path + end)

    def read(self) -> str:
        """Read it.

        Raises:
            OSError: it cannot be read.
        """
        if self.store is None:
            return Path(self.path).read_text(encoding="utf-8")
        return _bucket(self.store).read(self.path).decode()

    def write(self, text: str) -> None:
        """Write it, and the folders above it.

        Raises:
            OSError: it cannot be written.
        """
        if self.store is None:
            path = Path(self.path)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        else:
            _bucket(self.store).write(self.path, text.encode())

    def __str__(self) -> str:
        return self.path if self.store is None else str(replace(self.store, key=self.path))


def _bucket(uri: S3Uri) -> "Bucket":
    # Imported late: it brings pyarrow, which a command that fails early does not wait for.
    from batchgen.data.stores.bucket import Bucket

    return Bucket(uri)
