"""What an ``s3://`` address says; the command's edge and the data's stores read it alike.

Like ``errors.py`` and ``sampling.py`` it belongs to the slab that every module may import.
"""

import re
from dataclasses import dataclass
from typing import Self
from urllib.parse import parse_qsl, urlencode

from batchgen.errors import UsageError

PREFIX = "s3://"

# A question mark begins a query only where assignments follow it; in a glob it is a letter.
_QUERY = re.compile(r"\?(?P<query>[\w.-]+=[^?*]*)$")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,62}")
_ENDPOINT = re.compile(r"(https?://)?([A-Za-z0-9._-]+|\[[0-9a-fA-F:]+\])(:\d+)?/?")
_OPTIONS = ("endpoint_override", "scheme", "region")
_CREDENTIALS = (
    "Credentials come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, from AWS_PROFILE, or "
    "from the machine's role, never from an address, which is printed and stored"
)


def is_s3(path: str) -> bool:
    """Whether a path is an ``s3://`` address."""
    return path.startswith(PREFIX)


@dataclass(frozen=True, slots=True)
class S3Uri:
    """An address on S3-compatible storage, which holds no secret.

    Attributes:
        bucket: the bucket.
        key: object, prefix or glob in it, without slashes at its ends; empty for all of it.
        options: of ``endpoint_override``, ``scheme`` and ``region`` those that are given.
    """

    bucket: str
    key: str
    options: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, setting: str, text: str) -> Self:
        """Read an address.

        Args:
            setting: the key whose value it is, for messages.
            text: ``s3://bucket/key`` and, where wanted, a query of options.

        Raises:
            UsageError: it makes no sense, or holds what may be a secret, which the message
                does not repeat.
        """
        given = text.removeprefix(PREFIX)
        found = _QUERY.search(given)
        place, query = (given[: found.start()], found["query"]) if found else (given, "")
        bucket, _, key = place.partition("/")
        if "@" in bucket or ":" in bucket:
            raise UsageError(
                f"{setting}: the address names a user before its bucket. {_CREDENTIALS}."
            )
        if not _BUCKET.fullmatch(bucket):
            raise UsageError(
                f"{setting}: {bucket!r} is no bucket's name. Write s3://BUCKET/PREFIX."
            )
        key = key.removesuffix("/")
        if any(part in ("", ".", "..") for part in key.split("/")) and key:
            raise UsageError(
                f"{setting}: {PREFIX}{bucket}/{key} has an empty, '.' or '..' step, which "
                "storage takes for a name. Leave it out."
            )
        return cls(bucket, key, _options(setting, query))

    def option(self, name: str) -> str | None:
        """Give an option's value; None where it is not given."""
        return dict(self.options).get(name)

    def __str__(self) -> str:
        """Give the address as it can be given again."""
        query = f"?{urlencode(self.options, safe=':/')}" if self.options else ""
        return f"{PREFIX}{self.bucket}/{self.key}".rstrip("/") + query


def _options(setting: str, query: str) -> tuple[tuple[str, str], ...]:
    options = dict(parse_qsl(query, keep_blank_values=True))
    unknown = [name for name in options if name not in _OPTIONS]
    if unknown:
        # A value may be a secret, so only names are repeated.
        raise UsageError(
            f"{setting}: the address has the option {', '.join(unknown)}; only "
            f"{', '.join(_OPTIONS)} are known. {_CREDENTIALS}."
        )
    endpoint = options.get("endpoint_override")
    if endpoint is not None and not _ENDPOINT.fullmatch(endpoint):
        raise UsageError(
            f"{setting}: endpoint_override must be HOST or HOST:PORT, without a user. "
            f"{_CREDENTIALS}."
        )
    scheme = options.get("scheme", "https")
    if scheme not in ("http", "https"):
        raise UsageError(f"{setting}: scheme={scheme} must be http or https.")
    return tuple(sorted(options.items()))
