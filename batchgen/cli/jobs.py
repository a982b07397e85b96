"""Job folders: ``jobs/<name>/job.yaml`` with its template, shots and README beside it."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from hydra.core.config_store import ConfigStore

from batchgen.cli.paths import expand
from batchgen.errors import UsageError
from batchgen.keys import Key, declared_keys, did_you_mean, misfit, sections, unknown_key

JOB_FILE = "job.yaml"


def available_jobs(folders: Iterable[Path]) -> dict[str, Path]:
    """Find the job folders by name; of two with one name that of the later folder counts.

    Args:
        folders: folders of job folders; one that is not there holds none.
    """
    found = {job.parent.name: job.parent for each in folders for job in each.glob(f"*/{JOB_FILE}")}
    return dict(sorted(found.items()))


def list_jobs(folders: Sequence[Path]) -> str:
    """Say in one line for each job what its README says first; own folders say where they are."""
    jobs = available_jobs(folders)
    if not jobs:
        return f"No job folders in {', '.join(map(str, folders))}."
    width = max(map(len, jobs))
    shipped = folders[0]
    lines = []
    for name, place in jobs.items():
        where = "" if place.parent == shipped else f"  ({place})"
        lines.append(f"{name:{width}}  {_first_line(place)}{where}".rstrip())
    return "\n".join(lines)


def store_jobs(folders: Iterable[Path], asked: Iterable[str]) -> None:
    """Make job folders known to Hydra as the options of its group ``job``.

    Args:
        folders: the folders of job folders.
        asked: the jobs of the command line. One with a slash, a dot or a tilde in front is
            the path of a user's own folder.

    Raises:
        UsageError: one of the asked jobs cannot be read.
    """
    store = ConfigStore.instance()
    store.repo.pop("job", None)
    wanted = set(asked)
    for name, place in available_jobs(folders).items():
        try:
            values = read_job(place / JOB_FILE, name)
        except UsageError:
            # Another job's fault must not stop the one that was asked for.
            if name in wanted:
                raise
            continue
        store.store(group="job", name=name, node=values, package="_global_")
    for path in filter(is_path, sorted(wanted)):
        own = expand(path).resolve()
        if not (own / JOB_FILE).is_file():
            raise UsageError(f"job={path}: there is no {own / JOB_FILE}.")
        group, name = _place(path)
        values = read_job(own / JOB_FILE, str(own))
        store.store(group=group, name=name, node=values, package="_global_")


def is_path(job: str) -> bool:
    """Whether a job is given as a folder rather than by name."""
    return "/" in job or job.startswith((".", "~"))


def unknown_job(name: str, folders: Iterable[Path]) -> str:
    """Word the refusal of a job that does not exist."""
    names = available_jobs(folders)
    return (
        f"job={name}: no such job folder.{did_you_mean(name, names)} "
        f"Jobs: {', '.join(names) or 'none'}. A folder of your own is named by its path, as in "
        f"job=./{name}, or lies in the folder jobs of a --config-dir."
    )


def read_job(path: Path, name: str) -> dict[str, Any]:
    """Read a job file: declared keys only, its own files found beside it.

    Args:
        path: the job file.
        name: the value of ``job`` for it.

    Returns:
        Nested mappings, as in the file, with ``job`` set.

    Raises:
        UsageError: the file is no YAML, or has a key that is not declared.
    """
    try:
        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        values = {} if node is None else _Reader(path).mapping(node, "")
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(*f"Cannot read {path}: {error}".split("\n")) from error
    except RecursionError as error:
        raise UsageError(f"Cannot read {path}: it is nested too deeply.") from error
    return {**values, "job": name}


class _FreeValues(yaml.SafeLoader):  # type: ignore[misc]
    """Reads values as Hydra does on the command line, to which a date is text."""


_FreeValues.add_constructor("tag:yaml.org,2002:timestamp", yaml.SafeLoader.construct_yaml_str)


class _Reader:
    """Turns YAML nodes into values, knowing from the keys where text is wanted."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def mapping(self, node: yaml.Node, prefix: str) -> dict[str, Any]:
        if not isinstance(node, yaml.MappingNode):
            raise UsageError(f"{self._at(node)}expected keys with values.")
        values: dict[str, Any] = {}
        for name_node, value_node in node.value:
            if not isinstance(name_node, yaml.ScalarNode):
                raise UsageError(f"{self._at(name_node)}a key must be a word.")
            name = f"{prefix}{name_node.value}"
            if name_node.value in values:
                raise UsageError(f"{self._at(name_node)}{name} is there twice.")
            values[name_node.value] = self._entry(name_node, name, value_node)
        return values

    def _entry(self, name_node: yaml.Node, name: str, node: yaml.Node) -> Any:
        if name in sections():
            return self.mapping(node, f"{name}.")
        key = declared_keys().get(name)
        if key is None:
            raise UsageError(unknown_key(name, self._at(name_node)))
        if name == "job":
            raise UsageError(f"{self._at(name_node)}a job file cannot name another job.")
        try:
            value = self._value(node, key)
        except (ValueError, yaml.YAMLError) as error:
            raise UsageError(f"{self._at(node)}{name}: {' '.join(str(error).split())}.") from error
        problem = misfit(key, value)
        if problem is not None:
            raise UsageError(f"{self._at(node)}{problem}")
        if key.word is not None and value == key.word:
            value = [value]
        return self._beside(value) if name.endswith("_file") else value

    def _value(self, node: yaml.Node, key: Key) -> Any:
        if isinstance(node, yaml.SequenceNode):
            return [self._value(item, key) for item in node.value]
        is_null = node.tag == "tag:yaml.org,2002:null"
        if isinstance(node, yaml.ScalarNode) and (key.is_text or key.choices) and not is_null:
            # The text as written: YAML would make a number of 007 and a boolean of no and off.
            return node.value
        loader = _FreeValues if key.has_free_names else yaml.SafeLoader
        return loader("").construct_object(node, deep=True)

    def _beside(self, value: Any) -> Any:
        """Find a job's own file; one that lies only in the caller's directory stays relative."""
        if not isinstance(value, str) or not value or "${" in value:
            return value
        beside = self.path.parent / expand(value)
        is_callers = not beside.exists() and expand(value).exists()
        return value if is_callers else str(beside.resolve())

    def _at(self, node: yaml.Node) -> str:
        return f"{self.path}, line {node.start_mark.line + 1}: "


def _place(path: str) -> tuple[str, str]:
    """Where Hydra looks for ``job=<path>`` among its groups."""
    parts: Sequence[str] = ["job", *(part for part in path.split("/") if part)]
    return "/".join(parts[:-1]), parts[-1]


def _first_line(folder: Path) -> str:
    readme = folder / "README.md"
    if not readme.is_file():
        return ""
    lines = (line.strip() for line in readme.read_text(encoding="utf-8").splitlines())
    return next((line for line in lines if line and not line.startswith("#")), "")
