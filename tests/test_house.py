"""The floors of the house: which package may import which."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "batchgen"

# The slab that every room stands on.
SLAB = {"activity", "early_signals", "errors", "sampling", "s3_uri", "text", "user_cache"}
ALLOWED = {
    "activity": set(),
    "early_signals": set(),
    "text": set(),
    "errors": {"text"},
    "sampling": {"text"},
    "s3_uri": {"errors"},
    "user_cache": set(),
    "config": SLAB,
    "keys": SLAB | {"config"},
    "checks": SLAB | {"config"},
    "data": SLAB,
    "prompts": SLAB,
    "report": SLAB,
    "kernels": SLAB,
    "engine": SLAB,
    "structured": SLAB,
    "runtime": SLAB | {"kernels", "engine.step"},
    "job": SLAB | {"config", "data", "prompts", "report", "engine", "runtime", "structured"},
    "run": SLAB | {"config", "data", "prompts", "report", "runtime", "job"},
    "cli": SLAB | {"checks", "config", "keys", "data.stores.loose", "report", "run"},
    "api": SLAB | {"checks", "config", "keys", "data", "prompts", "report", "engine", "job"},
    "__main__": {"cli", "early_signals", "report"},
}
# Floors within a room, from the ground up; the room's name stands for its own files.
WITHIN = {
    "data": ["data", "data.stores", "data.input", "data.output"],
    "job": ["job.stops", "job", "job.dry_run", "job.accounts"],
}


def _room(file: Path) -> str:
    return file.relative_to(PACKAGE).with_suffix("").parts[0]


def _imports(file: Path) -> set[str]:
    """Modules of ours that a file imports, without the leading package name."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name.removeprefix("batchgen.") for name in names if name.startswith("batchgen.")}


_FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")


@pytest.mark.parametrize("file", _FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_arrow_runs_up_or_across(file: Path) -> None:
    room = _room(file)
    allowed = ALLOWED[room] | {room}
    for name in _imports(file):
        assert any(name == each or name.startswith(f"{each}.") for each in allowed), (
            f"{file.name} imports {name}"
        )


def _floor(module: str, floors: list[str]) -> int:
    """Give the floor of a module of a room that has some."""
    folder = ".".join(module.split(".")[:2])
    return floors.index(folder if folder in floors else folder.split(".")[0])


@pytest.mark.parametrize(
    "file",
    [file for file in _FILES if _room(file) in WITHIN],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_no_arrow_runs_up_within_a_room(file: Path) -> None:
    room = _room(file)
    floors = WITHIN[room]
    mine = _floor(".".join(file.relative_to(PACKAGE).with_suffix("").parts), floors)
    for name in _imports(file):
        if name.split(".")[0] == room:
            assert _floor(name, floors) <= mine, f"{file.name} imports {name}"


def test_no_two_files_import_each_other() -> None:
    arrows = {
        str(file.relative_to(PACKAGE).with_suffix("")).replace("/", "."): _imports(file)
        for file in _FILES
    }
    mutual = [(a, b) for a, names in arrows.items() for b in names if a in arrows.get(b, ())]
    assert not mutual
