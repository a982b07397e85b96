"""What a run was made of, stored beside its output, and held against the next run."""

import json
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import takewhile
from typing import Any

from batchgen.data.output.files import write_json_durably
from batchgen.data.stores.store import Place, store_of
from batchgen.errors import UsageError

SCHEMA_VERSION = 2
_KNOWN_VERSIONS = (1, SCHEMA_VERSION)
ABSENT = "(absent)"
OUTPUT_ID = "output_id"

_SHOWN_DIFFERENCES = 10
_SHOWN_CHARACTERS = 80
# Of two long texts, what stands before their first difference.
_SHOWN_BEFORE = 20
_DIGEST = re.compile("[0-9a-f]{32}")
# The beginnings of keys that are not called as the user sets them.
_SET_AS = {"sampling.structured.": "structured.", "prompt.shots": "prompt.shots_file"}
_GROWN_INPUT = ("input.files", "input.ids")
_GROWN_INPUT_ADVICE = (
    "Only the input has changed, and an output stays with the rows it began with. Where rows "
    "came in addition, put them into a file of their own, and give it an output.dir of its own "
    "with input.path naming that file; the outputs read together as one table."
)

Fingerprint = Mapping[str, Any]
"""Nested mapping of everything that can change the text of a result: names to JSON values."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A fingerprint entry that is not what it was.

    Attributes:
        key: its dotted name.
        old: the value stored with the output, or ``ABSENT``.
        new: the value of this run, or ``ABSENT``.
    """

    key: str
    old: Any
    new: Any


def compare(old: Fingerprint, new: Fingerprint) -> list[Difference]:
    """List what differs between two fingerprints, in order of the keys.

    Values count as JSON sees them: a tuple equals a list, an enum its value. What is absent
    is null.
    """
    flat_old, flat_new = dict(_flatten(_as_json(old))), dict(_flatten(_as_json(new)))
    keys = list(dict.fromkeys([*flat_old, *flat_new]))
    pairs = ((key, flat_old.get(key, ABSENT), flat_new.get(key, ABSENT)) for key in keys)
    return [Difference(key, old, new) for key, old, new in pairs if _or_null(old) != _or_null(new)]


def compare_manifest(
    manifest: Mapping[str, Any],
    fingerprint: Fingerprint,
    version_1: Callable[[], Fingerprint] | None = None,
) -> list[Difference]:
    """List what differs between an output's manifest and a run.

    Args:
        manifest: of the output, see :func:`read_manifest`.
        fingerprint: of the run.
        version_1: makes it in the form of version 1, for an output that was begun with that.
    """
    if manifest["schema_version"] == 1 and version_1 is not None:
        fingerprint = version_1()
    return compare(manifest["fingerprint"], fingerprint)


def _or_null(value: Any) -> Any:
    return None if value == ABSENT else value


def refuse_mismatch(directory: Place, differences: Sequence[Difference]) -> None:
    """Refuse to add to an output that was made of something else.

    Raises:
        UsageError: where anything differs, with each key, both values and what to do.
    """
    if not differences:
        return
    raise UsageError(
        f"output.dir={directory} holds results of another run; these differ:",
        *describe(differences),
        "Set them back to resume it, choose another output.dir, or set "
        "output.overwrite=true to throw its results away",
    )


def describe(differences: Sequence[Difference]) -> list[str]:
    """Word differences for people, a line each; long values show where they part.

    Where only the input has changed, a last line says what to do with rows that were added.
    """
    shown = differences[:_SHOWN_DIFFERENCES]
    lines = [f"  {_set_as(item.key)}: {_change(item)}" for item in shown]
    if len(differences) > _SHOWN_DIFFERENCES:
        lines.append(f"  and {len(differences) - _SHOWN_DIFFERENCES} more")
    if all(item.key.startswith(_GROWN_INPUT) for item in differences):
        lines.append(_GROWN_INPUT_ADVICE)
    return lines


def _set_as(key: str) -> str:
    """Give the key by which a user sets an entry, where it has another name."""
    for begin, name in _SET_AS.items():
        if key.startswith(begin):
            return name + key.removeprefix(begin)
    return key


def write_manifest(path: Place, fingerprint: Fingerprint, details: Mapping[str, Any]) -> str:
    """Write the manifest of a new output, under a number that no other output has.

    Args:
        path: ``_manifest.json``.
        fingerprint: what must be the same for a resume.
        details: what may differ, for people: versions, resolved config.

    Returns:
        the number, which stands in every part as well.

    Raises:
        OutputError: it could not be written.
    """
    output_id = uuid.uuid4().hex
    write_json_durably(
        path,
        {
            "schema_version": SCHEMA_VERSION,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            OUTPUT_ID: output_id,
            "fingerprint": _as_json(fingerprint),
            **_as_json(details),
        },
    )
    return output_id


def read_manifest(path: Place) -> Mapping[str, Any] | None:
    """Give a manifest's content, or None where there is no manifest.

    Raises:
        UsageError: the manifest is damaged, or of a version this program does not know.
    """
    try:
        content = dict(json.loads(store_of(path).read(path)))
        version, _ = content["schema_version"], dict(content["fingerprint"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"output.dir: {path} cannot be read ({error!r}); choose another output.dir, or set "
            "output.overwrite=true to begin anew"
        ) from error
    if version not in _KNOWN_VERSIONS:
        raise UsageError(
            f"output.dir: {path} has schema version {version}, this program knows "
            f"{SCHEMA_VERSION}; go on with the batchgen that began it, choose another output.dir, "
            "or set output.overwrite=true to begin anew"
        )
    return content


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


def _flatten(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted names and leaves; lists are leaves unless they hold mappings."""
    if isinstance(value, dict) and (value or not key):
        for name, item in value.items():
            yield from _flatten(item, f"{key}.{name}" if key else name)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for index, item in enumerate(value):
            yield from _flatten(item, f"{key}[{index}]")
    else:
        yield key, value


def _change(item: Difference) -> str:
    old, new = item.old, item.new
    if _is_digest(old) and _is_digest(new):
        return "its content has changed"
    start = 0
    if isinstance(old, str) and isinstance(new, str) and ABSENT not in (old, new):
        shared = sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(old, new, strict=False))
        )
        start = max(0, shared - _SHOWN_BEFORE)
    return f"{_shown(old, start)} then, {_shown(new, start)} now"


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def _shown(value: Any, start: int) -> str:
    """Show a value, a text from where it is worth it."""
    if value == ABSENT:
        return ABSENT
    before = "..." if start else ""
    text = json.dumps(value[start:] if start else value, ensure_ascii=False)
    return before + (text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}...")
