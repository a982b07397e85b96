"""What can go wrong, and the exit code each kind of failure ends with.

This file and ``sampling`` are the slab the house stands on: every module may
import them, they import nothing of ours.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum

from batchgen.text import one_line

_MOST_NAMES = 30


def listed(names: Sequence[str]) -> str:
    """Name things for a message: all of a few, the first ones of many."""
    shown = ", ".join(names[:_MOST_NAMES]) or "none"
    more = len(names) - _MOST_NAMES
    return f"{shown} and {more:,} more" if more > 0 else shown


class ExitCode(IntEnum):
    """Exit codes of ``python -m batchgen``."""

    DONE = 0
    UNEXPECTED = 1
    USAGE = 2
    TOO_MANY_ROW_ERRORS = 3
    ENGINE_FAILED = 4
    INTERRUPTED = 75


class BatchgenError(Exception):
    """Base of all errors we raise on purpose; the message is written for the user.

    Args:
        lines: of the message. Each may quote data, which cannot add a line of its own.
    """

    exit_code = ExitCode.UNEXPECTED

    def __init__(self, *lines: str) -> None:
        super().__init__(*lines)

    def __str__(self) -> str:
        return "\n".join(one_line(str(line)) for line in self.args)


class UsageError(BatchgenError):
    """The configuration, the input files or the output directory cannot be used.

    Raised before anything is loaded or written. The message names the key (or the
    file), its value, and what to do.
    """

    exit_code = ExitCode.USAGE


class EngineError(BatchgenError):
    """The engine cannot go on. Finished rows are kept; the same command resumes."""

    exit_code = ExitCode.ENGINE_FAILED


class OutOfDeviceMemoryError(EngineError):
    """A forward pass found no memory on the device; the step's block copies are done."""


class JobInterruptedError(BatchgenError):
    """A signal or the end of its time stopped the run. Finished rows are kept; it resumes."""

    exit_code = ExitCode.INTERRUPTED


class RowErrorType(StrEnum):
    """The closed set of reasons for which a single row can fail."""

    EMPTY_PROMPT = "empty_prompt"
    NULL_PROMPT = "null_prompt"
    INVALID_MESSAGES = "invalid_messages"
    INVALID_TOKEN_IDS = "invalid_token_ids"
    TEMPLATE_ERROR = "template_error"
    PROMPT_TOO_LONG = "prompt_too_long"
    EXCEEDS_KV_CAPACITY = "exceeds_kv_capacity"
    INVALID_SAMPLING_PARAMS = "invalid_sampling_params"
    UNSATISFIABLE_CONSTRAINT = "unsatisfiable_constraint"
    ENGINE_ERROR = "engine_error"


@dataclass(frozen=True, slots=True)
class RowError:
    """Why one row has no result; never ends the job.

    Attributes:
        type: the kind, one of the closed set.
        message: what was wrong with this row, for the user.
    """

    type: RowErrorType
    message: str
