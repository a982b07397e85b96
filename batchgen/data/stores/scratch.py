"""A directory on this machine for what only its own runs read of an output elsewhere."""

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from batchgen.data.stores.faults import StoreError


def scratch_directory(address: str) -> Path:
    """Name the directory that belongs to an output: the same one for each run here.

    It lies in ``TMPDIR``, in a folder of the user's own.
    """
    digest = hashlib.blake2b(address.encode(), digest_size=8).hexdigest()
    return Path(tempfile.gettempdir()) / f"batchgen-{os.getuid()}" / digest


def make_scratch(directory: Path) -> None:
    """Make such a directory, which nobody else may look into.

    Raises:
        StoreError: somebody else has made it.
    """
    directory.parent.mkdir(mode=0o700, exist_ok=True)
    if directory.parent.stat().st_uid != os.getuid() or directory.parent.is_symlink():
        raise StoreError(
            f"{directory.parent} belongs to somebody else; set TMPDIR to another place"
        )
    directory.mkdir(mode=0o700, exist_ok=True)


def drop_scratch(directory: Path) -> None:
    """Remove what may lie under a name there."""
    if directory.is_dir():
        shutil.rmtree(directory, ignore_errors=True)
    else:
        directory.unlink(missing_ok=True)
