"""One run at a time in an output directory."""

import errno
import fcntl
import json
import os
import socket
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from batchgen.data import failpoints
from batchgen.errors import UsageError

_NO_LOCKS_HERE = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
# Somebody who only looks whether a run is alive holds the lock for a moment.
_PATIENCE_S = 0.5


@dataclass(frozen=True, slots=True)
class Owner:
    """Who holds a lock, as written in its file, for people."""

    host: str
    pid: int
    started: str
    command: str

    @classmethod
    def this_process(cls) -> Self:
        """Describe the running process."""
        started = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(socket.gethostname(), os.getpid(), started, " ".join(sys.argv))

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Read a lock file; None where it is not there or not written yet."""
        try:
            content = json.loads(path.read_text(encoding="utf-8", errors="replace"))
            return cls(**{item.name: content[item.name] for item in fields(cls)})
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def is_gone(self) -> bool:
        """Whether it was a process of this machine that is no longer there."""
        if self.host != socket.gethostname():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        return self.pid == os.getpid()

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.started} ({self.command})"


class TakenOverError(OSError):
    """The directory is no longer this run's: its lock or the directory itself is another."""


class DirectoryLock:
    """A lock file with a readable owner, held by ``flock``.

    The kernel lets go of the lock when its process dies, however it dies; a file left behind is
    taken over. The file's text only tells people who holds it. On a file system without locks
    the file itself is the lock: it is linked into place only where there is none, and taken over
    only from a process of this machine that is no longer there.

    Whoever removes the file lets another run in. So the holder looks before every change of the
    directory whether the file is still its own (:meth:`confirm`).

    Attributes:
        directory: what it locks.
        is_ours: whether what its holder began there is still there; :meth:`confirm` asks.
    """

    def __init__(self, path: Path) -> None:
        self.directory = path.parent
        self.is_ours: Callable[[], bool] = lambda: True
        self._path = path
        self._descriptor: int | None = None
        self._found: tuple[int, int] | None = None

    def acquire(self) -> None:
        """Take the lock and write down who holds it.

        Raises:
            UsageError: another live process holds it; the message names that process.
            OSError: the file cannot be made.
        """
        failpoints.reached("lock.begin")
        patient_until = time.monotonic() + _PATIENCE_S
        while self._descriptor is None:
            self._descriptor = self._try_to_take()
            if self._descriptor is None and time.monotonic() > patient_until:
                raise UsageError(self._held_message())
        self._found = self._directory_now()

    def confirm(self) -> None:
        """Check that the directory is still this run's.

        A lock file that is gone is not made again: another run may have come and gone since.

        Raises:
            TakenOverError: it is not; nothing of it may be changed any more.
        """
        if self._descriptor is None:
            return
        where = self._path.parent
        if self._directory_now() != self._found or not self.is_ours():
            raise TakenOverError(
                f"{where} no longer holds the output that this run began: it was removed or "
                "replaced meanwhile, and the rows that were finished there went with it"
            )
        if self._is_current(self._descriptor):
            return
        owner = Owner.read(self._path)
        raise TakenOverError(
            f"{owner or 'another run'} {'has' if owner else 'may have'} taken {where} over, since "
            f"{self._path.name} was removed while this run was at work"
        )

    def release(self) -> None:
        """Remove the lock file, if it is still ours, and let go."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            try:
                # Removed while held, so that nobody takes over a file about to vanish.
                if self._is_current(descriptor):
                    self._path.unlink(missing_ok=True)
            finally:
                os.close(descriptor)

    def _try_to_take(self) -> int | None:
        """Open the lock file and lock it; None if somebody else has it for now."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            if self._lock_and_sign(descriptor):
                taken, descriptor = descriptor, -1
                return taken
        except OSError as error:
            if error.errno not in _NO_LOCKS_HERE:
                raise
            return self._take_without_locks()
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        return None

    def _lock_and_sign(self, descriptor: int) -> bool:
        """Lock an open lock file; False where somebody else has it for now."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_PATIENCE_S / 10)
            return False
        # The owner may have removed the file between our open and our lock.
        if not self._is_current(descriptor):
            return False
        _sign(descriptor)
        return True

    def _take_without_locks(self) -> int | None:
        """Take the lock where the file system has none: by linking a signed file into place.

        Raises:
            UsageError: the file names an owner that may be at work.
        """
        owner = Owner.read(self._path)
        if owner is not None and not owner.is_gone():
            raise UsageError(
                f"output.dir={self._path.parent} is on a file system without locks, and "
                f"{self._path.name} says that {owner} is at work there. If it is not, remove "
                f"{self._path}; otherwise wait for it, or choose another output.dir"
            )
        mine = self._path.with_name(f"{self._path.name}.{uuid.uuid4().hex}")
        # Whoever takes the old file away is the one to try; all others find it gone.
        with suppress(FileNotFoundError):
            self._path.rename(mine)
            if Owner.read(mine) != owner:
                # Somebody has signed it since: it goes back.
                with suppress(FileExistsError):
                    os.link(mine, self._path)
                mine.unlink()
                return None
            mine.unlink()
        descriptor = os.open(mine, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            _sign(descriptor)
            os.link(mine, self._path)
        except FileExistsError:
            os.close(descriptor)
            return None
        finally:
            mine.unlink(missing_ok=True)
        return descriptor

    def _is_current(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self._path.stat(follow_symlinks=False))
        except FileNotFoundError:
            return False

    def _directory_now(self) -> tuple[int, int] | None:
        try:
            found = self._path.parent.stat()
        except FileNotFoundError:
            return None
        return found.st_dev, found.st_ino

    def _held_message(self) -> str:
        who = Owner.read(self._path) or "another process that has not written its name yet"
        return (
            f"output.dir={self._path.parent} is in use by {who}; wait for it, stop it, "
            "or choose another output.dir"
        )


def _sign(descriptor: int) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(asdict(Owner.this_process())).encode(), 0)


def is_held(path: Path) -> bool:
    """Whether a live process holds a lock file; only looks.

    Where the file system has no locks, a file that is there counts as held.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False
