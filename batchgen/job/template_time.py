"""The time that a job's chat template prints, as Llama's and others print today's date."""

from datetime import datetime

from batchgen.config import Config
from batchgen.data.output.directory import MANIFEST
from batchgen.data.output.manifest import read_manifest
from batchgen.data.output.parts import list_parts
from batchgen.data.stores.store import place_of, store_of
from batchgen.errors import UsageError

FINGERPRINT_KEY = "chat_template_time"


def template_time(config: Config) -> datetime:
    """Give the time that the output began with, or now where it has no results.

    All rows of an output have the same, also where a run is resumed on another day or on a
    machine in another time zone: it is stored with its offset from UTC.

    Raises:
        UsageError: the output's directory or its manifest cannot be read.
    """
    now = datetime.now().astimezone()
    if not config.output.dir or config.output.overwrite:
        return now
    output = place_of("output.dir", config.output.dir)
    try:
        has_results = store_of(output).exists(output / MANIFEST) and list_parts(output)
    except OSError as error:
        raise UsageError(f"output.dir={output} cannot be used: {error}") from error
    begun = (read_manifest(output / MANIFEST) if has_results else None) or {"fingerprint": {}}
    stored = begun["fingerprint"].get("prompt", {}).get(FINGERPRINT_KEY)
    return datetime.fromisoformat(stored) if stored else now
