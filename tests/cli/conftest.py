import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from batchgen.cli import app
from batchgen.config import Config
from batchgen.errors import ExitCode
from batchgen.keys import declared_keys

MANDATORY = {"model.path": "org/model", "input.path": "in.parquet", "output.dir": "out"}


@dataclass
class Recorder:
    """Stands in for the job itself: keeps what it was called with."""

    configs: list[Config] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    outcome: Callable[[int], ExitCode] = lambda number: ExitCode.DONE

    def run(self, config: Config, resolved_yaml: str) -> ExitCode:
        self.configs.append(config)
        self.texts.append(resolved_yaml)
        return self.outcome(len(self.configs) - 1)

    @property
    def resolved(self) -> dict:
        return yaml.safe_load(self.texts[-1])


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    module = ModuleType("batchgen.run")
    module.run = recorder.run
    monkeypatch.setitem(sys.modules, "batchgen.run", module)
    return recorder


@pytest.fixture
def caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The caller's directory, with one input file in it and nothing else."""
    folder = tmp_path / "caller"
    folder.mkdir()
    (folder / "in.parquet").touch()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def command(recorder: Recorder, caller: Path) -> Callable[..., int]:
    """The command with the mandatory values named; later arguments win."""
    given = [f"{name}={value}" for name, value in MANDATORY.items()]
    return lambda *arguments: app.main([*given, *arguments])


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of job folders in place of the shipped one."""
    folder = tmp_path / "jobs"
    reviews = folder / "reviews"
    reviews.mkdir(parents=True)
    (reviews / "README.md").write_text("# Reviews\n\nLabels reviews of films.\n\nMore.\n")
    (reviews / "prompt.j2").write_text("Review: {{ text }}\n")
    (reviews / "job.yaml").write_text(
        "model:\n  path: 1e5\n"
        "prompt:\n  template_file: prompt.j2\n  answer_column: no\n"
        'sampling:\n  stop: ["\\n\\n"]\n  max_tokens: 4\n'
        "pool:\n  num_blocks: 9\n  block_size: 32\n"
    )
    other = folder / "letters"
    other.mkdir()
    (other / "job.yaml").write_text("sampling: {max_tokens: 77}\n")
    monkeypatch.setattr(app, "jobs_dir", lambda: folder)
    return folder


def composed_values(named: dict[str, Any]) -> dict[str, Any]:
    """All keys at their defaults but the named ones, nested as Hydra composes them."""
    result: dict[str, Any] = {}
    for name, key in declared_keys().items():
        *groups, leaf = name.split(".")
        place = result
        for group in groups:
            place = place.setdefault(group, {})
        place[leaf] = copy.copy({**MANDATORY, **named}.get(name, key.default))
    return result


@pytest.fixture
def composed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts given jobs in Hydra's place, which takes half a second for each command."""

    def put(*jobs: dict[str, Any]) -> None:
        values = [composed_values(named) for named in jobs]
        monkeypatch.setattr(app, "compose", lambda *_: values)

    return put


@pytest.fixture(scope="session")
def nested() -> Callable[..., dict[str, Any]]:
    """The composed values of one job, by full names of keys."""
    return lambda **named: composed_values(named)
