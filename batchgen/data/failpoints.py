"""A seam for tests: named points at which a run can be made to die or to fail.

Nothing happens unless ``BATCHGEN_FAILPOINT`` is set, to ``NAME:FAULT`` or to
``NAME:FAULT:N`` for the N-th time that the point is reached; ``*`` is any point. A file that
is written durably has five points, ``begin``, ``written``, ``synced``, ``renamed`` and
``durable``, behind the name of what it is, as in ``part.renamed``; an object has four,
``begin``, ``written``, ``uploaded`` and ``durable``.

The faults, each of which happens once:

- ``kill``: the process dies at once, as by ``kill -9``;
- ``term``: it gets SIGTERM;
- ``stop``: it stands still until it gets SIGCONT;
- ``enospc``, ``eio``: the operating system reports a full disk or a broken one;
- ``say``: nothing, but each point that is reached is named on standard error.
"""

import errno
import os
import signal
import threading

VARIABLE = "BATCHGEN_FAILPOINT"
ANY = "*"

_SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}
_ERRORS = {"enospc": errno.ENOSPC, "eio": errno.EIO}
# The writer's thread and the main one may reach points at the same time.
_LOCK = threading.Lock()


def reached(name: str) -> None:
    """Fail here, if this is the point and the time that the environment names.

    Raises:
        OSError: the fault is an error of the operating system.
    """
    if VARIABLE in os.environ:
        fault = _due(name)
        if fault is not None:
            _fail(name, fault)


def _due(name: str) -> str | None:
    """Give the fault that is due; what is left to wait for is kept in the environment."""
    with _LOCK:
        wanted, fault, *rest = os.environ.get(VARIABLE, ":").split(":")
        if wanted not in (ANY, name):
            return None
        if fault == "say":
            return fault
        times = int(rest[0]) if rest else 1
        if times > 1:
            os.environ[VARIABLE] = f"{wanted}:{fault}:{times - 1}"
            return None
        del os.environ[VARIABLE]
        return fault


def _fail(name: str, fault: str) -> None:
    os.write(2, f"failpoint {name}: {fault}\n".encode())
    if fault in _SIGNALS:
        os.kill(os.getpid(), _SIGNALS[fault])
    elif fault in _ERRORS:
        code = _ERRORS[fault]
        raise OSError(code, os.strerror(code), name)
