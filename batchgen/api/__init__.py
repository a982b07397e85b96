"""The engine from Python: ``from batchgen import Engine``, for notebooks and tests.

It is the engine of the command, with the same prompts, plan, scheduler, pool and account of
every row; only input and output are Python objects instead of Parquet. What is to be kept, to
resume or to be larger than memory is a job for the command.
"""

from batchgen.api.answers import FailedPromptsError, Output, Outputs, Row
from batchgen.api.engine import Engine

__all__ = ["Engine", "FailedPromptsError", "Output", "Outputs", "Row"]
