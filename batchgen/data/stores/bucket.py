"""One bucket on S3-compatible storage, through pyarrow's file system."""

import io
import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar
from urllib.parse import urlsplit

import pyarrow.fs as pafs

from batchgen.data.stores.faults import GREW, StoreError, repeated
from batchgen.s3_uri import PREFIX, S3Uri

_T = TypeVar("_T")

# Of pyarrow's client, for one request; they wait for up to a second or two each.
CLIENT_ATTEMPTS = 3
_CONNECT_TIMEOUT_S = 10.0
_READS = 10
_MOST_KEPT_BYTES = 1 << 20
_MARK_BYTES = 16

Stamp = tuple[int, bytes]
"""An object's size and ETag, which change with its content."""


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
        self.files = pafs.S3FileSystem(
            # A small object is one request, and not an upload in pieces.
            allow_delayed_open=True,
            retry_strategy=pafs.AwsStandardS3RetryStrategy(max_attempts=CLIENT_ATTEMPTS),
            connect_timeout=_CONNECT_TIMEOUT_S,
            **given,
        )

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

        def look() -> list[pafs.FileInfo]:
            # curl takes an answer that was cut in its head for a whole one without a body.
            infos: list[pafs.FileInfo] = self.files.get_file_info(selector)
            return infos or list(self.files.get_file_info(selector))

        found = self.do("listing", key, look)
        return [(info.path.removeprefix(f"{self.name}/"), info) for info in found]

    def read(self, key: str) -> bytes:
        """Read a whole object.

        Raises:
            FileNotFoundError: there is none.
            StoreError: it cannot be read.
        """
        return self.read_stamped(key)[0]

    def read_stamped(self, key: str) -> tuple[bytes, Stamp]:
        """Read a whole object, and what tells this content from any other.

        Raises:
            FileNotFoundError: there is none.
            StoreError: it cannot be read, or never stays the same for the time of a reading.
        """
        # pyarrow asks for the length and then for as many bytes: of an object that is replaced
        # in between they may be a piece. So its stamp must be the same before and after.
        for _ in range(_READS):
            with ObjectFile(self, key) as file:
                stamp = file.stamp
                try:
                    content = file.read()
                except StoreError:
                    if self.stamp(key) == stamp:
                        raise
                    continue
            if self.stamp(key) == stamp:
                return content, stamp
        raise StoreError(f"{PREFIX}{self.path(key)} keeps changing while it is read")

    def open(self, key: str) -> "ObjectFile":
        """Open an object whose length two answers agree about; one may have been cut.

        Raises:
            FileNotFoundError: there is none.
            StoreError: it cannot be opened, or never stays the same.
        """
        for _ in range(_READS):
            file = ObjectFile(self, key)
            if self.stamp(key) == file.stamp:
                return file
            file.close()
        raise StoreError(f"{PREFIX}{self.path(key)} keeps changing while it is opened")

    def stamp(self, key: str) -> Stamp:
        """Give an object's size and ETag.

        Raises:
            FileNotFoundError: there is none.
            StoreError: the storage does not answer.
        """
        with ObjectFile(self, key) as file:
            return file.stamp

    def write(self, key: str, content: bytes | mmap.mmap) -> None:
        """Write an object, which is there whole from then on, or not at all.

        The whole of it goes to pyarrow at once: a small one is one request, which the storage
        obeys only where all of its bytes came; a large one is an upload in pieces that nobody
        sees before it is completed, and it is completed only where every piece came through.

        Raises:
            StoreError: it could not be written; what was there before is there still.
        """
        self.do("writing", key, lambda: self._send(key, content))

    def write_measured(self, key: str, content: bytes | mmap.mmap) -> None:
        """Write an object that nobody else writes, and measure what stands there then.

        Raises:
            StoreError: it could not be written, or is not as long as it should be.
        """

        def send() -> None:
            self._send(key, content)
            size = self.files.get_file_info(self.path(key)).size
            if size > len(content):
                raise OSError(f"{GREW} ({size} and {len(content)})")
            if size < len(content):
                raise OSError(f"{size} bytes arrived of {len(content)}")

        self.do("writing", key, send)

    def check_stored(self, key: str, sent: bytes) -> None:
        """Compare an object that others may write too with what this run wrote.

        Raises:
            FileNotFoundError: there is no such object.
            StoreError: the storage put something of its own around the content.
        """

        def compare() -> None:
            stored = self.read(key)
            if sent in stored and stored != sent:
                raise OSError(f"{GREW} ({len(stored)} and {len(sent)})")

        self.do("writing", key, compare)

    def _send(self, key: str, content: bytes | mmap.mmap) -> None:
        with self.files.open_output_stream(self.path(key), compression=None) as stream:
            stream.write(content)

    def copy(self, source: str, target: str) -> None:
        """Copy an object within the storage.

        Raises:
            FileNotFoundError: there is none.
            StoreError: it could not be copied.
        """
        paths = self.path(source), self.path(target)
        self.do("copying", source, lambda: self.files.copy_file(*paths))

    def delete(self, key: str) -> None:
        """Delete an object that may not be there.

        Raises:
            StoreError: it could not be deleted.
        """
        with suppress(FileNotFoundError):
            self.do("deleting", key, lambda: self.files.delete_file(self.path(key)))

    def delete_below(self, key: str) -> None:
        """Delete all objects below a prefix; there may be none.

        Raises:
            StoreError: they could not be deleted.
        """
        with suppress(FileNotFoundError):
            self.do("deleting", key, lambda: self.files.delete_dir(self.path(key)))

    def etag(self, key: str) -> str:
        """Give what the storage has instead of a digest of an object's content."""
        return self.stamp(key)[1].decode().strip('"')


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
        self.stamp: Stamp = (self._size, self._file.metadata().get("ETag", b""))
        self._position = 0
        # What was read last: a footer is asked for with much of what stands before it.
        self._block = b""
        self._block_start = 0

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
        within = self._position - self._block_start
        if 0 <= within <= len(self._block) - count:
            content = self._block[within : within + count]
        else:
            content = self._bucket.do("reading", self._key, lambda: self._read_all(count))
            if len(content) <= _MOST_KEPT_BYTES:
                self._block, self._block_start = content, self._position
        self._position += len(content)
        return content

    def _read_all(self, count: int) -> bytes:
        # Of an answer that was cut in its head curl says that it is whole, and pyarrow gives as
        # many bytes as were asked for, whatever came. So the end must not be what it was before.
        content, mark = bytearray(count), os.urandom(min(count, _MARK_BYTES))
        content[-len(mark) :] = mark
        self._file.seek(self._position)
        if self._file.readinto(content) < count or content.endswith(mark):
            raise OSError(f"fewer bytes came than {count}")
        return bytes(content)

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
