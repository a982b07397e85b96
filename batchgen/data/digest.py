"""Telling one file's content from another's: every byte counts, and is read only once."""

import hashlib
import json
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TypeAlias

from batchgen.user_cache import cache_folder

_Stamp: TypeAlias = tuple[int, ...]

_DIGEST_CHARACTERS = 32
# Reading a smaller file takes no longer than looking it up.
_REMEMBERED_BYTES = 8 << 20
# A file written to again within one tick of its file system's clock keeps its times.
_SETTLED_NS = 2_000_000_000
_FILE = "digests.jsonl"
_KEPT_LINES = 10_000


def file_digest(path: Path) -> str:
    """Return a digest of all of a file's content.

    What a large file's was is remembered in the user's cache by its path, size, times and
    inode number, so that weights are read once and not before every run.

    Raises:
        OSError: it cannot be read.
    """
    path = path.resolve()
    stamp = _stamp(path)
    if stamp[0] < _REMEMBERED_BYTES:
        return _hash(path)
    book = DigestBook.of_user()
    known = book.get(path, stamp)
    if known is not None:
        return known
    began = time.time_ns()
    digest = _hash(path)
    if _stamp(path) == stamp and max(stamp[1:3]) < began - _SETTLED_NS:
        book.add(path, stamp, digest)
    return digest


def _stamp(path: Path) -> _Stamp:
    """Return size, times of change of content and inode, inode and device numbers."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:_DIGEST_CHARACTERS]


class DigestBook:
    """Remembered digests, a JSON line each; one that cannot be read or written is empty."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, tuple[_Stamp, str]] = {}
        lines = self._lines()
        for line in lines:
            self._note(line)
        if len(lines) > 2 * _KEPT_LINES:
            self._shorten(lines[-_KEPT_LINES:])

    @classmethod
    @cache
    def of_user(cls) -> "DigestBook":
        """Return the book in the user's cache, read once."""
        return cls(cache_folder() / _FILE)

    def get(self, path: Path, stamp: _Stamp) -> str | None:
        """Return the digest of a file that has not been written to since; else None."""
        known = self._known.get(str(path))
        return known[1] if known is not None and known[0] == stamp else None

    def add(self, path: Path, stamp: _Stamp, digest: str) -> None:
        """Remember a digest, for this process and the next."""
        line = json.dumps({"path": str(path), "stamp": stamp, "sha256": digest})
        self._note(line)
        try:
            # One write at the end, so that runs at the same time do not tear each other's lines;
            # on a line of its own, whatever a full disk left of the one before.
            with self._path.open("a", encoding="utf-8") as file:
                file.write("\n" + line)
        except OSError:
            return

    def _lines(self) -> list[str]:
        try:
            return self._path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return []

    def _note(self, line: str) -> None:
        try:
            entry: Mapping[str, object] = json.loads(line)
            path, stamp, digest = entry["path"], entry["stamp"], entry["sha256"]
        except (ValueError, KeyError, TypeError):
            return
        if isinstance(path, str) and isinstance(stamp, list) and isinstance(digest, str):
            self._known[path] = tuple(stamp), digest

    def _shorten(self, lines: list[str]) -> None:
        shorter = self._path.with_suffix(".new")
        try:
            shorter.write_text("\n".join(lines), encoding="utf-8")
            shorter.replace(self._path)
        except OSError:
            return
