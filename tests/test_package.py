"""The package as users get it: installed from a wheel, or on a bare GPU image."""

import ast
import os
import re
import subprocess
import sys
import zipfile
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BARE_PACKAGES = ("engine", "kernels", "runtime")
# transformers itself reads weights through safetensors.
BARE_REQUIREMENTS = ("numpy", "safetensors", "torch", "transformers", "triton")


def test_the_wheel_holds_configuration_and_jobs(built_wheel):
    names = set(zipfile.ZipFile(built_wheel).namelist())
    shipped = [
        path.relative_to(ROOT).as_posix()
        for folder in ("conf", "jobs")
        for path in (ROOT / folder).rglob("*")
        if path.is_file()
    ]
    assert len(shipped) > 5
    assert {f"batchgen/{name}" for name in shipped} <= names
    assert "batchgen/py.typed" in names


def test_an_installed_wheel_works_from_an_empty_directory_and_leaves_it_empty(
    built_wheel, tmp_path
):
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, "--target", str(site), str(built_wheel)], check=True)
    # Before everything else on the path, so before the checkout too.
    environment = {**os.environ, "PYTHONPATH": str(site)}

    def python(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        done = subprocess.run(
            command, cwd=empty, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    place = Path(python("-c", "import batchgen; print(batchgen.__file__)").strip())
    assert place.is_relative_to(site)
    listing = python("-m", "batchgen", "mode=jobs")
    assert re.search(r"^sentiment +Labels sentences", listing, re.MULTILINE)
    assert re.search(r"^bulk +Answers real", listing, re.MULTILINE)
    assert not list(empty.iterdir())


def _with_dependencies(names: tuple[str, ...]) -> set[str]:
    """Names of distributions and all that they need themselves."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found:
            continue
        found.add(name)
        try:
            needed = requires(name) or []
        except PackageNotFoundError:
            continue
        waiting += [re.split(r"[^\w.-]", need)[0] for need in needed if "extra ==" not in need]
    return found


def _absent_modules() -> list[str]:
    present = _with_dependencies(BARE_REQUIREMENTS)
    return [
        module
        for module, owners in packages_distributions().items()
        if module != "batchgen"
        and not any(re.sub(r"[-_.]+", "-", owner).lower() in present for owner in owners)
    ]


IMPORT_ALL = """
import importlib, pkgutil, sys
from importlib.machinery import PathFinder

absent = set(sys.argv[1].split(","))

class WithoutAbsent(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            return None
        return super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutAbsent
package = importlib.import_module("batchgen." + sys.argv[2])
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    importlib.import_module(module.name)
print("imported", sorted(absent & {name.partition(".")[0] for name in sys.modules}))
"""


@pytest.mark.parametrize("package", BARE_PACKAGES)
def test_it_imports_where_only_numpy_torch_transformers_and_triton_are_installed(package):
    absent = _absent_modules()
    assert {"pyarrow", "hydra", "omegaconf", "duckdb", "pynvml"} <= set(absent)
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, ",".join(absent), package],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "imported []"


@pytest.mark.parametrize("package", BARE_PACKAGES)
def test_no_import_inside_a_function_asks_for_more_than_that(package):
    allowed = {*sys.stdlib_module_names, *BARE_REQUIREMENTS, "batchgen"}
    for path in (ROOT / "batchgen" / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            roots = {name.partition(".")[0] for name in names}
            assert roots <= allowed, f"{path}:{getattr(node, 'lineno', 0)}"
