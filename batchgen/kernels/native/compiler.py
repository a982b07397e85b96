"""Compiles C for this very machine and loads it; what was compiled once is kept.

Triton and torch.compile do the same when they are first used. Nothing is linked against
OpenMP: its calls find the library that torch has loaded, so that a kernel runs on torch's own
threads and does not fight with them for the cores.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from batchgen.user_cache import cache_folder

logger = logging.getLogger(__name__)

_FLAGS = (
    "-O3",
    "-march=native",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fPIC",
)
_COMPILERS = ("gcc", "cc", "clang")


class NativeCompileError(RuntimeError):
    """There is no compiler here, or it does not take the source."""


def load_library(
    source: Path, defines: Mapping[str, int], flags: Sequence[str] = ()
) -> ctypes.CDLL:
    """Compile a source file, unless that was done before, and load it.

    Args:
        source: a C file.
        defines: macros that specialise it.
        flags: more flags for the compiler.

    Raises:
        NativeCompileError: no compiler, or it failed; the message is for users.
    """
    compiler = _find_compiler()
    macros = [f"-D{name}={value}" for name, value in defines.items()]
    problems = []
    # Threads first; a compiler whose threads are not torch's compiles for one.
    for threading in (["-fopenmp"], []):
        try:
            library = _compiled(compiler, source, [*_FLAGS, *flags, *threading, *macros])
            loaded = ctypes.CDLL(str(library))
        except OSError as error:
            problems.append(str(error))
        except subprocess.CalledProcessError as error:
            problems.append(error.stderr.strip()[-500:])
        else:
            if problems:
                logger.warning("%s runs on one thread: %s", source.name, problems[0])
            return loaded
    raise NativeCompileError(f"{compiler} cannot compile for this machine: {problems[-1]}")


def _find_compiler() -> str:
    for name in (os.environ.get("CC", ""), *_COMPILERS):
        found = shutil.which(name) if name else None
        if found:
            return found
    raise NativeCompileError(
        "there is no C compiler (gcc or clang); set CC where it has another name"
    )


def _compiled(compiler: str, source: Path, flags: Sequence[str]) -> Path:
    # Headers too: a change to one compiles everything anew.
    text = b"".join(path.read_bytes() for path in (source, *sorted(source.parent.glob("*.h"))))
    identity = "\0".join([compiler, _version(compiler), _processor(), *flags])
    stem = f"{source.stem}-{_digest(text + identity.encode())}"
    folder = cache_folder()
    for kept in folder.glob(f"{stem}-*.so"):
        # A library that was cut, by a power failure say, would kill the process.
        if kept.name == _library_name(stem, kept):
            return kept
        kept.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        built, shared = Path(scratch) / "kernel.o", Path(scratch) / "kernel.so"
        _run([compiler, *flags, "-c", str(source), "-o", str(built)])
        # On its own, without -fopenmp: no second OpenMP library beside torch's.
        _run([compiler, "-shared", str(built), "-o", str(shared), "-lm"])
        return shared.replace(folder / _library_name(stem, shared))


def _library_name(stem: str, library: Path) -> str:
    """Name a library by its content, so that damage shows."""
    return f"{stem}-{_digest(library.read_bytes())}.so"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@cache
def _version(compiler: str) -> str:
    answer = subprocess.run([compiler, "--version"], check=False, capture_output=True, text=True)
    return answer.stdout


@cache
def _processor() -> str:
    """Name what ``-march=native`` stands for: a home directory may be shared by machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    return "".join(sorted({line for line in lines if line.startswith(("flags", "Features"))}))
