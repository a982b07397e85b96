"""Where the files that ship with the package lie."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


def conf_dir() -> Path:
    """Hydra's configuration: the defaults list and the presets."""
    return _shipped("conf")


def jobs_dir() -> Path:
    """The job folders."""
    return _shipped("jobs")


def _shipped(name: str) -> Path:
    """Find a folder inside an installed package, or beside the package in a checkout."""
    inside = _PACKAGE / name
    return inside if inside.is_dir() else _PACKAGE.parent / name
