"""One bucket on S3-compatible storage, through pyarrow's file system."""

import io
import os
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import urlsplit

import pyarrow.fs as pafs

from batchgen.data.stores.faults import repeated
from batchgen.s3_uri import PREFIX, S3Uri

_T = TypeVar("_T")

_CONNECT_TIMEOUT_S = 10.0


class Bucket:
    """Requests to one bucket, each repeated a bounded number of times.

    Credentials and region come from the standard AWS chain: the environment, the files below
    ``~/.aws``, the machine's role. The endpoint comes from the address, else from
    ``AWS_ENDPOINT_URL``, else it is Amazon's.

    Args:
        uri: any address in the bucket.
    """

    def __init__(self, uri: S3Uri) -> None:
        self.name = uri.bucket
        host, scheme = _endpoint(uri)
        self.endpoint = host or "of Amazon S3"
        options = {"endpoint_override": host, "scheme": scheme, "region": uri.option("region")}
        given = {name: value for name, value in options.items() if value is not None}
        self.files = pafs.S3FileSystem(connect_timeout=_CONNECT_TIMEOUT_S, **given)

    def path(self, key: str) -> str:
        """Give the name that pyarrow knows an object by."""
        return f"{self.name}/{key}" if key else self.name

    def do(self, action: str, key: str, work: Callable[[], _T]) -> _T:
        """Make a request.

        Args:
            action: names it for messages, as in ``reading``.
            key: what it is about.
            work: makes it; making it twice must be as good as once.

        Raises:
            FileNotFoundError: there is no such object.
            StoreError: it failed, naming object and endpoint.
        """
        what = f"{action} {PREFIX}{self.path(key)} at the endpoint {self.endpoint}"
        return repeated(work, what)

    def info(self, key: str) -> pafs.FileInfo:
        """Look at a name: an object, a prefix of objects, or neither."""
        return self.do("looking at", key, lambda: self.files.get_file_info(self.path(key)))

    def entries(self, key: str, *, recursive: bool = False) -> list[tuple[str, pafs.FileInfo]]:
        """List what is below a key, objects and prefixes; there may be nothing."""
        selector = pafs.FileSelector(self.path(key), allow_not_found=True, recursive=recursive)
        found = self.do("listing", key, lambda: self.files.get_file_info(selector))
        return [(info.path.removeprefix(f"{self.name}/"), info) for info in found]

    def etag(self, key: str) -> str:
        """Give what the storage has instead of a digest of an object's content."""

        def look() -> str:
            with self.files.open_input_file(self.path(key)) as file:
                tag: bytes = file.metadata().get("ETag", b"")
                return tag.decode().strip('"')

        return self.do("looking at", key, look)


class ObjectFile(io.RawIOBase):
    """Random access to one object; a read that fails is repeated a bounded number of times.

    Raises:
        FileNotFoundError: there is no such object.
        StoreError: it cannot be opened.
    """

    def __init__(self, bucket: Bucket, key: str) -> None:
        super().__init__()
        self._bucket = bucket
        self._key = key
        path = bucket.path(key)
        self._file = bucket.do("opening", key, lambda: bucket.files.open_input_file(path))
        self._size: int = self._file.size()
        self._position = 0

    def readable(self) -> bool:
        """Whether it can be read: always."""
        return True

    def seekable(self) -> bool:
        """Whether it can be read anywhere: always."""
        return True

    def size(self) -> int:
        """Give the object's size in bytes."""
        return self._size

    def tell(self) -> int:
        """Give the position of the next read."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move the position of the next read."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = start + offset
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        """Read some bytes, or all that are left.

        Raises:
            StoreError: they could not be read.
        """
        left = max(0, self._size - self._position)
        count = left if size is None or size < 0 else min(size, left)
        if not count:
            return b""
        content: bytes = self._bucket.do(
            "reading", self._key, lambda: self._file.read_at(count, self._position)
        )
        self._position += len(content)
        return content

    def close(self) -> None:
        """Let go of it."""
        if not self.closed:
            self._file.close()
        super().close()


def _endpoint(uri: S3Uri) -> tuple[str | None, str | None]:
    """Give host (with its port) and scheme; None for Amazon's, and for the usual scheme.

    pyarrow itself looks at these variables only where it reads an address.
    """
    address = uri.option("endpoint_override")
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        address = address or os.environ.get(name)
    if not address:
        return None, uri.option("scheme")
    parts = urlsplit(address if "://" in address else f"//{address}")
    # A user in it would be no credential of S3, and would be seen in messages.
    return parts.netloc.rpartition("@")[2], parts.scheme or uri.option("scheme")
