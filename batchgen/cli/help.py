"""The text of ``--help``, made from the declared keys so that it cannot go stale."""

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batchgen import __version__
from batchgen.cli.jobs import available_jobs
from batchgen.keys import Key, declared_keys

_HEAD = """\
batchgen {version}: offline batch generation, Parquet in, Parquet out.

  python -m batchgen key=value ...                 run a job
  python -m batchgen job=NAME output.dir=DIR       run a job folder; other keys win over it
  python -m batchgen mode=plan ...                 tokenise and plan, load no weights
  python -m batchgen mode=preview input.limit=5 ...   show rendered prompts and token ids
  python -m batchgen mode=status output.dir=DIR    how far a job is, what a resume would do
  python -m batchgen mode=jobs                     list the job folders
  python -m batchgen -m pool.block_size=8,16 'output.dir=out/${{pool.block_size}}' ...   a sweep

Keys, with their defaults
"""

_TAIL = """\

Quoting: text with any of < > | # = , : [ ] {{ }} or a line break goes into double quotes, and
all of it into single quotes for the shell; "\\n" is then a line break, as in YAML.
  'sampling.stop=["</s>","\\n\\n"]'  'input.path="a,b.parquet"'  'prompt.template="{{{{ text }}}}"'
Or it goes into a file: {files}.

Presets: {presets}.   Jobs: {jobs}.
Flags: -m sweep, --cfg job show the composed values, --hydra-help all flags, --version,
--config-dir DIR presets and job folders of your own (DIR/pool/mine.yaml, DIR/jobs/mine/job.yaml).

Exit codes: 0 done, 1 unexpected failure, 2 usage or configuration error (nothing started),
3 more rows failed than errors.max_rate, 4 the engine failed or stood still, 75 interrupted or out
of time (run it again to resume).
"""


def help_text(conf: Path, jobs: Sequence[Path]) -> str:
    """Give the help text.

    Args:
        conf: the folder of presets.
        jobs: the folders of job folders.
    """
    width = max(map(len, declared_keys())) + 1
    keys = "\n".join(f"  {key.name:{width}} {_line(key)}" for key in declared_keys().values())
    presets = (f"{path.parent.name}={path.stem}" for path in sorted(conf.glob("*/*.yaml")))
    files = [name for name in declared_keys() if name.endswith("_file")]
    tail = _TAIL.format(
        files=_wrapped(files),
        presets=", ".join(presets),
        jobs=", ".join(available_jobs(jobs)) or "none",
    )
    return f"{_HEAD.format(version=__version__)}{keys}\n{tail}"


def _wrapped(names: Sequence[str]) -> str:
    return "\n".join(textwrap.wrap(", ".join(names), 92))


def _line(key: Key) -> str:
    default = "mandatory" if key.is_mandatory else _default(key.default)
    choices = f" ({', '.join(key.choices)})" if key.choices else ""
    return f"{default:11} {key.meaning}{choices}"


def _default(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, str):
        plain = str(value)
        return plain if plain.isidentifier() else json.dumps(plain)
    return json.dumps(value)
