"""What goes wrong on object storage: what passes by itself, and what the user is told."""

import errno
import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from batchgen.errors import BatchgenError

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

# Seconds to wait before each repetition of what pyarrow's own client has tried three times.
PAUSES_S = (0.2, 0.5, 1.0, 2.0)

_CREDENTIALS = (
    "check the credentials (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or the "
    "machine's role) and what they may do with this bucket"
)
_BUCKET = "check the bucket's name and its endpoint"
_REGION = "name the bucket's region with AWS_REGION, or with ?region=NAME in the address"
_CHECKSUMS = (
    "the storage keeps the checksums that the S3 client appends to an upload as content; set "
    "AWS_REQUEST_CHECKSUM_CALCULATION=when_required in the environment"
)
_NETWORK = (
    "check the network and the endpoint (AWS_ENDPOINT_URL, or "
    "?endpoint_override=HOST:PORT&scheme=http in the address)"
)
GREW = "more bytes are stored than were sent"
_LATER = "the storage is failing or overloaded; try again later"
# Beginnings that stand in pyarrow's messages, and what to do; those that no repetition mends.
_FINAL = (
    (("ACCESS_DENIED", "INVALID_ACCESS_KEY", "INVALID_CLIENT_TOKEN", "SIGNATURE"), _CREDENTIALS),
    (("EXPIRED_TOKEN", "MISSING_AUTHENTICATION", "HTTP status 403"), _CREDENTIALS),
    (("NO_SUCH_BUCKET", "Bucket does not exist", "Bucket '"), _BUCKET),
    (("PermanentRedirect", "HTTP status 301", "AuthorizationHeaderMalformed"), _REGION),
    ((GREW,), _CHECKSUMS),
)
_PASSING = (
    (("NETWORK_CONNECTION", "curlCode", "REQUEST_TIMEOUT"), _NETWORK),
    (("SLOW_DOWN", "THROTTLING", "INTERNAL_FAILURE", "SERVICE_UNAVAILABLE"), _LATER),
)


class StoreError(BatchgenError, OSError):
    """Object storage did not do what it was asked for, however often.

    It has an ``errno`` like an error of a disk, so that it is not taken for damaged content.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.errno = errno.EIO


def repeated(work: Callable[[], _T], what: str, pauses_s: Sequence[float] | None = None) -> _T:
    """Do something until it succeeds, a bounded number of times.

    Args:
        work: what to do; doing it twice must be as good as once.
        what: names it for messages: the action, the object and the endpoint.
        pauses_s: seconds to wait before each repetition; None for ``PAUSES_S``.

    Raises:
        FileNotFoundError: there is no such object.
        StoreError: it failed each time, or in a way that no repetition mends.
    """
    pauses = list(PAUSES_S if pauses_s is None else pauses_s)
    while True:
        try:
            return work()
        except FileNotFoundError as error:
            if _advice(error, _FINAL):
                raise _explained(error, what) from error
            raise
        except OSError as error:
            if not pauses or isinstance(error, StoreError) or _advice(error, _FINAL):
                raise _explained(error, what) from error
            logger.warning("%s failed and is tried again: %s", what, error)
            time.sleep(pauses.pop(0))


def _explained(error: OSError, what: str) -> StoreError:
    advice = _advice(error, (*_FINAL, *_PASSING))
    return StoreError(f"{what} failed: {error}" + (f"; {advice}" if advice else ""))


def _advice(error: OSError, known: Sequence[tuple[Sequence[str], str]]) -> str | None:
    text = str(error)
    return next((advice for signs, advice in known if any(sign in text for sign in signs)), None)
