"""Inputs led by coverage: atheris goes on from those that reached code no other had reached.

atheris (https://github.com/google/atheris) is no dependency of the project; `pip install
atheris` where it is wanted. It draws bytes, of which hypothesis makes an input as it makes one
of random numbers.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any, NoReturn

PACKAGE = "batchgen"
# hypothesis takes no more bytes than this for one input.
_MOST_BYTES = 8192


def play(attempt: Callable[[bytes], Any], seconds: float, hang_s: int, corpus: Path) -> NoReturn:
    """Try inputs until the time is over, then end this process.

    Args:
        attempt: tries the input that some bytes stand for; raises nothing.
        hang_s: an input that takes longer ends the process.
        corpus: keeps what reached new code for the next process.
    """
    import atheris

    corpus.mkdir(exist_ok=True)
    for function in _functions():
        atheris.instrument_func(function)
    limits = [f"-max_total_time={max(1, round(seconds))}", f"-timeout={hang_s}"]
    atheris.Setup(
        [sys.argv[0], str(corpus), *limits, f"-max_len={_MOST_BYTES}", "-verbosity=0"], attempt
    )
    atheris.Fuzz()
    raise AssertionError("atheris ends the process")


def _functions() -> Iterator[FunctionType]:
    """Give the package's functions and methods, as far as its modules are loaded."""
    for name, module in sorted(sys.modules.items()):
        if name == PACKAGE or name.startswith(f"{PACKAGE}."):
            for value in list(vars(module).values()):
                held = list(vars(value).values()) if inspect.isclass(value) else [value]
                yield from (
                    each
                    for each in map(inspect.unwrap, filter(callable, held))
                    if isinstance(each, FunctionType) and each.__module__ == name
                )
