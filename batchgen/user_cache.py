"""The user's cache directory: what is kept there saves time, and nothing depends on it."""

import os
import tempfile
from functools import cache
from pathlib import Path


@cache
def cache_folder() -> Path:
    """Return a directory of the user's own, ``~/.cache/batchgen`` where there is a home.

    A container may run under a number that has no home, or one that cannot be written: then it
    is a directory under the system's temporary one. Never one that another user could have
    filled, since compiled code is loaded from it.
    """
    beside = Path(tempfile.gettempdir()) / f"batchgen-cache-{os.getuid()}"
    for folder in (*_in_home(), beside):
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if folder.stat().st_uid == os.getuid() and os.access(folder, os.W_OK):
                return folder
        except OSError:
            continue
    return Path(tempfile.mkdtemp(prefix="batchgen-"))


def _in_home() -> list[Path]:
    given = os.environ.get("XDG_CACHE_HOME")
    try:
        return [Path(given or Path.home() / ".cache") / "batchgen"]
    except RuntimeError:
        # HOME is not set, and the system knows no such user.
        return []
