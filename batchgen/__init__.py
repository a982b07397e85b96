"""Offline batch generation for language models: Parquet in, Parquet out."""

from typing import TYPE_CHECKING, Any

from batchgen.sampling import SamplingParams

if TYPE_CHECKING:
    from batchgen.api import Engine, FailedPromptsError, Output, Outputs

__version__ = "0.1.0"
__all__ = ["Engine", "FailedPromptsError", "Output", "Outputs", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is first asked for: importing the package starts nothing."""
    if name in __all__:
        from batchgen import api

        return getattr(api, name)
    raise AttributeError(f"module 'batchgen' has no attribute {name!r}")
