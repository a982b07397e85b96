"""Runs a part in processes of its own that inherit the imports, and takes their records."""

import gc
import multiprocessing
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from gpu_check_parts.outcome import Check, PartOutcome, Record

Emit = Callable[[Record], None]

# A part that overruns its time by this factor is stopped.
_PATIENCE = 1.5
_ENDED = "the part came to its end"


@dataclass(frozen=True, slots=True)
class Part:
    """What is run in processes of its own.

    Attributes:
        run: takes where records go, the seconds it has, and which of the lanes it is.
        lanes: processes that do a share of the part each, side by side.
    """

    name: str
    run: Callable[[Emit, float, int], None]
    lanes: int = 1


def run_part(part: Part, seconds: float, on_record: Emit) -> PartOutcome:
    """Fork, run, and collect.

    A process that ends early or overruns its time leaves what it has reported so far, and a
    failed check that says so.
    """
    outcome = PartOutcome(part.name)
    started = time.monotonic()
    running = dict(_start(part, lane, seconds) for lane in range(part.lanes))

    def take(record: Record) -> None:
        outcome.add(record)
        on_record(record)

    while running:
        left = started + _PATIENCE * seconds - time.monotonic()
        ready = wait(list(running), timeout=max(0.0, left))
        for receiver in ready:
            assert isinstance(receiver, Connection)
            try:
                take(receiver.recv())
            except EOFError:
                process = running.pop(receiver)
                process.join()
                if process.exitcode:
                    take(Check(_ENDED, False, f"its process ended with {process.exitcode}"))
        if not ready and left <= 0:
            for process in running.values():
                process.kill()
                process.join()
            overrun = f"stopped after {time.monotonic() - started:.0f} s, given {seconds:.0f}"
            take(Check(_ENDED, False, overrun))
            break
    outcome.seconds = time.monotonic() - started
    return outcome


def _start(part: Part, lane: int, seconds: float) -> tuple[Connection, BaseProcess]:
    # Not spawn: importing torch and transformers again would take much of a part's time. The
    # parent has touched no GPU, so that its children may.
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(part, sender, seconds, lane), daemon=True)
    process.start()
    sender.close()
    return receiver, process


def _serve(part: Part, sender: Connection, seconds: float, lane: int) -> None:
    # Imported modules are hundreds of thousands of objects that no collection need look at.
    gc.freeze()
    # What libraries print would stand between the report's lines.
    sys.stdout = sys.stderr
    try:
        part.run(sender.send, seconds, lane)
    except Exception as error:
        sender.send(Check(_ENDED, False, f"{type(error).__name__}: {error}"))
    finally:
        sender.close()
