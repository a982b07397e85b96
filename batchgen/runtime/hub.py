"""What is asked, and said, of a model that is no directory and so is looked for at the hub."""

import http.client
import logging
import os
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers.utils.hub import cached_file

from batchgen.errors import UsageError
from batchgen.runtime.model_files import ADAPTER, no_adapters

_HUB_NAME = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*")
_ENDPOINT = "https://huggingface.co"
_TRUE = {"1", "ON", "YES", "TRUE"}
# The hub's own client tries for a good part of a minute, whatever is set.
_TRIES = 3
_ANSWER_S = 3.0
_PAUSE_S = 1.0
# Any one of them says that the name has been downloaded before.
_FILES = ("config.json", "tokenizer_config.json", "tokenizer.json")


def taken_as_hub_name(name: str) -> str:
    """Return what comes before the hub's own complaint: most often a directory was meant."""
    return f"there is no directory {Path(name).absolute()}, and as a name on the hub it has "


def require_answer(key: str, name: str, revision: str | None) -> None:
    """Refuse a name that the hub has to be asked about while nobody answers there.

    Nothing is asked for a path, for what was downloaded before, and offline.

    Args:
        key: the key whose value it is, for the message.
        name: a path, or a name on the hub.
        revision: the one that is wanted.

    Raises:
        UsageError: there is no such path, it is not in the cache, and the hub is silent.
    """
    if Path(name).exists() or not _HUB_NAME.fullmatch(name):
        return
    if _is_offline() or _is_cached(name, revision):
        return
    endpoint = os.environ.get("HF_ENDPOINT") or _ENDPOINT
    for attempt in range(_TRIES):
        time.sleep(_PAUSE_S if attempt else 0)
        failure = _failure(endpoint)
        if failure is None:
            return
    raise UsageError(
        f"{key}={name}: {taken_as_hub_name(name)}no answer: {endpoint} cannot be reached "
        f"({failure}); check the path, or the network (HF_ENDPOINT names another hub)"
    )


def require_no_adapter(name: str, revision: str | None) -> None:
    """Refuse a name on the hub, of a model that was found there, that has an adapter beside it.

    Raises:
        UsageError: there is one, with the line that merges it.
    """
    if Path(name).exists():
        return
    with retries_unsaid():
        has_adapter = _has(name, ADAPTER, revision or "main", is_local=False)
    if has_adapter:
        raise UsageError(f"model.path={name}: {no_adapters(name)}")


def _is_offline() -> bool:
    """Whether the hub's client is told to ask nobody; it says so itself then."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(name, "").upper() in _TRUE for name in names)


def _is_cached(name: str, revision: str | None) -> bool:
    return any(_has(name, file, revision or "main") for file in _FILES)


def _has(name: str, file: str, revision: str, *, is_local: bool = True) -> bool:
    """Whether there is a file, in the cache alone or on the hub too."""
    try:
        return cached_file(name, file, revision=revision, local_files_only=is_local) is not None
    except (OSError, ValueError):
        return False


def _failure(endpoint: str) -> OSError | None:
    """Return why an address cannot be reached; whatever it answers, it can."""
    try:
        request = urllib.request.Request(endpoint, method="HEAD")
        with urllib.request.urlopen(request, timeout=_ANSWER_S):
            return None
    except urllib.error.HTTPError:
        return None
    except OSError as error:
        # Which certificates are trusted is for the hub's client to say.
        reason = getattr(error, "reason", error)
        return None if isinstance(reason, ssl.SSLError) else error
    except (ValueError, http.client.HTTPException):
        return None


@contextmanager
def retries_unsaid() -> Iterator[None]:
    """Keep the hub's client from warning of each attempt; its last error is shown anyhow."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
