"""What is said of a model that is no directory and so is asked for at the Hugging Face hub."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def taken_as_hub_name(name: str) -> str:
    """Say what comes before the hub's own complaint: most often a directory was meant."""
    return f"there is no directory {Path(name).absolute()}, and as a name on the hub it has "


@contextmanager
def retries_unsaid() -> Iterator[None]:
    """Keep the hub's client from warning of each attempt; its last error is told anyhow."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
