"""Finding the Parquet files that ``input.path`` stands for."""

import errno
import fnmatch
import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from batchgen.data.stores.objects import ObjectPath
from batchgen.data.stores.store import Place
from batchgen.errors import UsageError
from batchgen.s3_uri import S3Uri, is_s3


def find_files(path: str) -> list[tuple[Place, str]]:
    """Give the files that a path stands for, each with its name relative to the path.

    Names beginning with ``_`` or ``.`` are skipped below the given path.

    Args:
        path: a file, a directory or a glob, local or as ``s3://bucket/...``.

    Raises:
        UsageError: there is no file, or a directory or the storage cannot be read.
    """
    try:
        found = list(_find_objects(path) if is_s3(path) else _find_local(path))
    except OSError as error:
        raise UsageError(f"input.path={path} cannot be read: {error}") from error
    if not found:
        raise UsageError(
            f"input.path={path} {_what_is_missing(path)}; give a Parquet file, a directory of "
            "them, or a glob"
        )
    return found


def _find_local(path: str) -> Iterator[tuple[Place, str]]:
    root = Path(path)
    if root.is_file():
        yield root, root.name
    elif root.is_dir():
        yield from _walk(root)
    elif glob.has_magic(path):
        base = _glob_base(path)
        # Path.glob takes no absolute pattern.
        for match in glob.iglob(path, recursive=True):  # noqa: PTH207
            name = Path(os.path.relpath(match, base)).as_posix()
            if _is_data_name(name) and _is_file(Path(match)):
                yield Path(match), name


def _find_objects(path: str) -> Iterator[tuple[Place, str]]:
    root = ObjectPath.of(S3Uri.parse("input.path", path))
    if root.key and root.store.is_file(root):
        yield root, root.name
    elif glob.has_magic(root.key):
        base = _glob_base(root.key).removeprefix(".")
        steps = root.key.split("/")
        for place in root.store.walk(ObjectPath(root.store, base)):
            name = _below(place.key, base)
            if _matches(place.key.split("/"), steps) and _is_data_name(name):
                yield place, name
    else:
        for place in root.store.walk(root):
            name = _below(place.key, root.key)
            if _is_data_name(name):
                yield place, name


def _below(key: str, base: str) -> str:
    return key.removeprefix(f"{base}/") if base else key


def _matches(names: Sequence[str], steps: Sequence[str]) -> bool:
    """Whether the steps of a name are what the steps of a glob ask for."""
    if not steps:
        return not names
    if steps[0] == "**":
        return any(_matches(names[skipped:], steps[1:]) for skipped in range(len(names) + 1))
    if not names or not fnmatch.fnmatchcase(names[0], steps[0]):
        return False
    return _matches(names[1:], steps[1:])


def _walk(root: Path) -> Iterator[tuple[Path, str]]:
    # Data sets are often assembled from links to directories; a link to a directory above
    # itself would never end, so each real directory is entered once.
    seen: set[str] = set()
    for directory, subdirectories, names in os.walk(root, onerror=_raise, followlinks=True):
        real = os.path.realpath(directory)
        if real in seen:
            subdirectories.clear()
            continue
        seen.add(real)
        subdirectories[:] = [name for name in subdirectories if not name.startswith(("_", "."))]
        for name in names:
            file_path = Path(directory, name)
            if _is_data_name(name) and _is_file(file_path):
                yield file_path, file_path.relative_to(root).as_posix()


def _is_file(path: Path) -> bool:
    """Whether a name is that of a file; a link that leads nowhere is not left out unsaid."""
    if path.is_symlink() and not path.exists():
        raise FileNotFoundError(errno.ENOENT, "this link leads to no file", str(path))
    return path.is_file()


def _raise(error: OSError) -> None:
    # A directory that cannot be read must not look like an empty one.
    raise error


def _glob_base(pattern: str) -> str:
    """Give the leading directories of a glob that hold no wildcard."""
    parts = PurePosixPath(pattern).parts
    fixed = next(index for index, part in enumerate(parts) if glob.has_magic(part))
    return str(PurePosixPath(*parts[:fixed])) if fixed else "."


def _is_data_name(name: str) -> bool:
    parts = name.split("/")
    return name.endswith(".parquet") and not any(
        part.startswith(("_", ".")) for part in parts if part != ".."
    )


def _what_is_missing(path: str) -> str:
    if is_s3(path):
        is_glob, is_directory = glob.has_magic(S3Uri.parse("input.path", path).key), False
    else:
        is_glob, is_directory = glob.has_magic(path), Path(path).is_dir()
    if is_glob and not is_directory:
        return "matches no *.parquet file (names beginning with _ or . are skipped)"
    if is_directory or is_s3(path):
        return "has no *.parquet file below it (names beginning with _ or . are skipped)"
    return "does not exist"
