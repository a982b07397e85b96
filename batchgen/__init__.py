"""Offline batch generation for language models: Parquet in, Parquet out."""

# Known to type checkers; importing `typing` would delay the command's signal handlers.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from batchgen.api import Engine, FailedPromptsError, Output, Outputs
    from batchgen.sampling import SamplingParams

__version__ = "0.1.0"
__all__ = ["Engine", "FailedPromptsError", "Output", "Outputs", "SamplingParams"]


def __getattr__(name: str) -> "Any":
    """Import the API when it is first asked for: importing the package starts nothing."""
    if name == "SamplingParams":
        from batchgen.sampling import SamplingParams

        return SamplingParams
    if name in __all__:
        from batchgen import api

        return getattr(api, name)
    raise AttributeError(f"module 'batchgen' has no attribute {name!r}")
