"""What all peers share: the request, the answers, and the memory they took.

A peer is started once and runs its rows whenever it is asked, with nothing left in its cache:
what it compiles and loads, it compiles and loads before it says that it is ready.

Nothing but the standard library: the interpreter is that of the peer's environment.
"""

import json
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Request:
    """What to run.

    Attributes:
        model: a directory or a hub name.
        dtype: "float32", say, or "auto".
        device: "cpu" or "cuda".
        threads: how many the other engines use.
        variant: how to run it; empty is the peer's default.
        prompts: token ids of each row.
        max_tokens: tokens to make for each row, ends of sequence included.
    """

    model: str
    dtype: str
    device: str
    threads: int
    variant: str
    prompts: list[list[int]]
    max_tokens: list[int]

    @property
    def longest(self) -> int:
        """The most tokens that a row comes to."""
        return max(
            len(prompt) + output
            for prompt, output in zip(self.prompts, self.max_tokens, strict=True)
        )


@dataclass(frozen=True)
class Answer:
    """What came out.

    Attributes:
        outputs: tokens made for each row.
        seconds: from ids to text, without loading.
        version: of the peer.
    """

    outputs: list[list[int]]
    seconds: float
    version: str


Run = Callable[[], Answer]


def serve(prepare: Callable[[Request], Run], variants: tuple[str, ...]) -> None:
    """Prepare for the request, say so, and run it for every line on standard input.

    The command line names the request and the file that appears once the peer is ready; each
    line names the file for one answer.
    """
    asked, ready = map(Path, sys.argv[1:])
    request = Request(**json.loads(asked.read_text(encoding="utf-8")))
    if request.variant not in ("", *variants):
        known = ", ".join(variants) or "none"
        sys.exit(f"there is no variant {request.variant!r}; there is: {known}")
    run = prepare(request)
    _write(ready, {})
    for line in sys.stdin:
        answer = run()
        written = {
            "outputs": answer.outputs,
            "seconds": answer.seconds,
            "version": answer.version,
            "peak_memory_bytes": peak_memory_bytes(),
        }
        _write(Path(line.rstrip("\n")), written)


def _write(path: Path, content: dict[str, Any]) -> None:
    """Write a file that is whole as soon as it is there."""
    unfinished = path.with_name(f".{path.name}")
    unfinished.write_text(json.dumps(content), encoding="utf-8")
    unfinished.rename(path)


def peak_memory_bytes() -> int | None:
    """Return the most memory that this process and its children held; None outside Linux."""
    processes = {int(path.name): path for path in Path("/proc").glob("[0-9]*")}
    parents, peaks = {}, {}
    for process, path in processes.items():
        with suppress(OSError):
            status = (path / "status").read_text(encoding="utf-8", errors="replace")
            parents[process] = int(_field(status, "PPid") or 0)
            peaks[process] = 1024 * int(_field(status, "VmHWM") or 0)
    own = int(Path("/proc/self").resolve().name) if parents else 0
    return sum(peaks[each] for each in peaks if _descends(each, own, parents)) or None


def _field(status: str, name: str) -> str | None:
    found = re.search(rf"^{name}:\s*(\d+)", status, re.MULTILINE)
    return found and found[1]


def _descends(process: int, ancestor: int, parents: dict[int, int]) -> bool:
    while process and process != ancestor:
        process = parents.get(process, 0)
    return process == ancestor != 0
