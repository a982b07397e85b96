"""One run at a time in an output directory."""

import errno
import fcntl
import json
import logging
import os
import socket
import sys
import time
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from batchgen.data import failpoints
from batchgen.errors import UsageError

logger = logging.getLogger(__name__)

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

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.started} ({self.command})"


class DirectoryLock:
    """A lock file with a readable owner, held by ``flock``.

    The kernel lets go of the lock when its process dies, however it dies; a file left
    behind is taken over. The file's text only tells people who holds it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock and write down who holds it.

        Raises:
            UsageError: another live process holds it; the message names that process.
            OSError: the file cannot be made.
        """
        failpoints.reached("lock.begin")
        patient_until = time.monotonic() + _PATIENCE_S
        while self._descriptor is None:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                if self._take(descriptor):
                    self._descriptor = descriptor
                elif time.monotonic() > patient_until:
                    raise UsageError(self._held_message())
            finally:
                if self._descriptor is None:
                    os.close(descriptor)

    def release(self) -> None:
        """Remove the lock file and let go."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            try:
                # Removed while held, so that nobody takes over a file about to vanish.
                self._path.unlink(missing_ok=True)
            finally:
                os.close(descriptor)

    def _take(self, descriptor: int) -> bool:
        """Lock an open lock file; False where somebody else has it for now."""
        if not self._try_lock(descriptor):
            time.sleep(_PATIENCE_S / 10)
            return False
        # The owner may have removed the file between our open and our lock.
        if not self._is_current(descriptor):
            return False
        os.ftruncate(descriptor, 0)
        os.write(descriptor, json.dumps(asdict(Owner.this_process())).encode())
        return True

    def _try_lock(self, descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS_HERE:
                raise
            logger.warning(
                "the file system of %s has no locks; make sure that no other run writes there",
                self._path.parent,
            )
        return True

    def _is_current(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self._path.stat())
        except FileNotFoundError:
            return False

    def _held_message(self) -> str:
        who = Owner.read(self._path) or "another process that has not written its name yet"
        return (
            f"output.dir={self._path.parent} is in use by {who}; wait for it, stop it, "
            "or choose another output.dir"
        )


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
