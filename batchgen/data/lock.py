"""One run at a time in an output directory."""

import errno
import fcntl
import json
import logging
import os
import socket
import sys
from datetime import UTC, datetime
from pathlib import Path

from batchgen.errors import UsageError

logger = logging.getLogger(__name__)

_NO_LOCKS_HERE = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


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
        """
        while True:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            if not self._try_lock(descriptor):
                os.close(descriptor)
                raise UsageError(self._held_message())
            if self._is_current(descriptor):
                break
            # The owner removed the file between our open and our lock.
            os.close(descriptor)
        self._descriptor = descriptor
        os.ftruncate(descriptor, 0)
        os.write(descriptor, json.dumps(_this_process()).encode())

    def release(self) -> None:
        """Remove the lock file and let go."""
        if self._descriptor is not None:
            # Removed while held, so that nobody takes over a file about to vanish.
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None

    def _try_lock(self, descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCKS_HERE:
                logger.warning(
                    "the file system of %s has no locks; make sure that no other run writes there",
                    self._path.parent,
                )
                return True
            return False
        return True

    def _is_current(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self._path.stat())
        except FileNotFoundError:
            return False

    def _held_message(self) -> str:
        try:
            owner = json.loads(self._path.read_text())
            who = (
                f"process {owner['pid']} on {owner['host']} since {owner['started']} "
                f"({owner['command']})"
            )
        except (OSError, ValueError, KeyError, TypeError):
            who = "another process that has not written its name yet"
        return (
            f"output.dir={self._path.parent} is in use by {who}; wait for it, stop it, "
            "or choose another output.dir"
        )


def _this_process() -> dict[str, str | int]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
    }
