import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from batchgen.cli.jobs import JOB_FILE, available_jobs, list_jobs, read_job
from batchgen.cli.resources import conf_dir, jobs_dir
from batchgen.keys import declared_keys, sections

PACKAGE = Path(sys.modules["batchgen"].__file__).parent


def test_every_preset_holds_declared_keys_only():
    presets = sorted(conf_dir().glob("*/*.yaml"))
    assert presets
    for preset in presets:
        assert preset.parent.name in sections()
        names = yaml.safe_load(preset.read_text(encoding="utf-8"))
        assert {f"{preset.parent.name}.{name}" for name in names} <= set(declared_keys())


def test_every_job_folder_can_be_read_and_says_what_it_does():
    names = available_jobs([jobs_dir()])
    for name in names:
        read_job(jobs_dir() / name / JOB_FILE, name)
    if names:
        assert all(len(line.split()) > 2 for line in list_jobs([jobs_dir()]).splitlines())


@pytest.fixture
def installed(tmp_path, jobs):
    """The package as a wheel lays it out: conf and jobs inside it."""
    package = tmp_path / "site" / "batchgen"
    skip = shutil.ignore_patterns("__pycache__")
    shutil.copytree(PACKAGE, package, ignore=skip)
    shutil.copytree(conf_dir(), package / "conf", dirs_exist_ok=True)
    shutil.rmtree(package / "jobs", ignore_errors=True)
    shutil.copytree(jobs, package / "jobs")
    return package


def test_conf_and_jobs_are_found_inside_an_installed_package(installed, tmp_path, monkeypatch):
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(installed.parent))
    for arguments, shown in (
        (["mode=jobs"], "reviews  Labels reviews of films."),
        (["--cfg", "job", "job=reviews", "pool=small"], f"{installed}/jobs/reviews/prompt.j2"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "batchgen", *arguments],
            cwd=empty,
            capture_output=True,
            text=True,
            check=True,
        )
        assert shown in done.stdout
    assert list(empty.iterdir()) == []
