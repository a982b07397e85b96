"""Write what of docs/ is made from the code: docs/keys.md, and the columns in docs/output.md.

python scripts/make_docs.py            # write them
python scripts/make_docs.py --check    # say whether they are current, and change nothing
"""

import argparse
import functools
import inspect
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchgen.config import Config
from batchgen.data.output.schema import RowResult, output_schema
from batchgen.keys import Key, declared_keys, sections

DOCS = Path(__file__).resolve().parent.parent / "docs"
_COLUMNS = re.compile(r"(<!-- columns:[^\n]*-->\n).*?(<!-- end of columns -->)", re.DOTALL)

_HEAD = """\
# Keys

Made from `batchgen/config.py` by `scripts/make_docs.py`; `python -m batchgen --help` prints the \
same list. Any key goes on the command line as `key=value`, or into a job folder's `job.yaml`; \
the command line wins. An unknown key is refused, with close ones named.

A relative path means the directory in which the command is run. Only what a `job.yaml` says under \
a key that ends in `_file` is found beside that `job.yaml`; `model.path`, `input.path` and \
`output.dir` are not.

`-m` runs a sweep over lists of values, each job into an output directory of its own:

```bash
python -m batchgen -m job=sentiment input.limit=16 pool.block_size=8,16 \\
    'output.dir=out/sizes/${pool.block_size}'
```
"""


def keys_page() -> str:
    """Return docs/keys.md."""
    top = [key for key in declared_keys().values() if "." not in key.name]
    parts = [_HEAD, "\n".join(_table(top))]
    for section in sections():
        keys = [key for key in declared_keys().values() if key.name.rpartition(".")[0] == section]
        title = f"## {section}\n\n{_meaning(section)}\n"
        parts.append(f"{title}\n" + "\n".join(_table(keys)))
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def _meaning(section: str) -> str:
    """Return the first line of a group's own description."""
    made = functools.reduce(getattr, section.split("."), Config())
    return str(type(made).__doc__).splitlines()[0]


def _table(keys: list[Key]) -> Iterator[str]:
    yield "| key | default | what it sets |"
    yield "|---|---|---|"
    for key in keys:
        choices = (
            f" Values: {', '.join(f'`{each}`' for each in key.choices)}." if key.choices else ""
        )
        meaning = key.meaning[0].upper() + key.meaning[1:]
        yield f"| `{key.name}` | {_default(key)} | {_cell(meaning)}.{choices} |"


def _default(key: Key) -> str:
    if key.is_mandatory:
        return "mandatory"
    value: Any = key.default
    if value is None:
        return "none"
    text = str(value) if isinstance(value, str) and value.isidentifier() else json.dumps(value)
    return f"`{_cell(text)}`"


def columns_table() -> str:
    """Return the table of the output's columns: name, Arrow type, meaning."""
    meanings = _attributes(RowResult)
    lines = ["| column | type | what it says |", "|---|---|---|"]
    for field in output_schema(pa.string()):
        kind = "of the input" if field.name == "id" else f"`{field.type}`"
        lines.append(f"| `{field.name}` | {kind} | {_cell(meanings[field.name])} |")
    return "\n".join(lines) + "\n"


def _attributes(described: type) -> Mapping[str, str]:
    """Read what a class's docstring says of its attributes."""
    text = inspect.getdoc(described) or ""
    section = text.partition("Attributes:\n")[2]
    joined = re.sub(r"\n {8}\s*", " ", section)
    found = re.findall(r"^ {4}(\w+): (.*)$", joined, re.MULTILINE)
    return {name: meaning.replace("``", "`") for name, meaning in found}


def pages() -> dict[Path, str]:
    """Return each page that is made, or partly made, as it should be."""
    output = DOCS / "output.md"
    made = _COLUMNS.sub(
        lambda found: found[1] + columns_table() + found[2], output.read_text("utf-8")
    )
    return {DOCS / "keys.md": keys_page(), output: made}


def _cell(text: str) -> str:
    return text.replace("|", "\\|").rstrip(".")


def main() -> None:
    """Read the command line; write or compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing")
    options = parser.parse_args()
    for path, page in pages().items():
        if not options.check:
            path.write_text(page, encoding="utf-8")
            print(path)
        elif not path.is_file() or path.read_text("utf-8") != page:
            sys.exit(f"{path} is not current; run python scripts/make_docs.py")


if __name__ == "__main__":
    main()
