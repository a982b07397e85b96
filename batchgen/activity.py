"""What the process works at, noted for a watchdog that looks from another thread.

The note lies in memory that C code can read: a watchdog must be able to print it while the
interpreter is stuck in a single call.
"""

SIZE = 1024

# What C code prints must be a format without directives.
_PREFIX = b"batchgen: engine.stall_s is over in one call of C code while "
text = bytearray(_PREFIX.ljust(SIZE, b"\0"))
count = 0


def note(what: str) -> None:
    """Note what is done now; every note counts as progress."""
    global count  # noqa: PLW0603
    content = what.replace("%", "").encode("ascii", "replace")[: SIZE - len(_PREFIX) - 1] + b"\0"
    text[len(_PREFIX) : len(_PREFIX) + len(content)] = content
    count += 1


def current() -> str:
    """Return the last note."""
    return text[len(_PREFIX) :].partition(b"\0")[0].decode("ascii")
