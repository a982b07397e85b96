"""A package is taken only with the hash written down for it."""

import hashlib
import subprocess

import pytest
from pypi import Package, download


@pytest.fixture
def local_index(built_wheel, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(built_wheel.parent))
    return built_wheel


def test_a_package_with_the_right_hash_is_downloaded(local_index, tmp_path):
    digest = hashlib.sha256(local_index.read_bytes()).hexdigest()
    file = download(Package("batchgen", "0.1.0", digest), tmp_path)
    assert list(tmp_path.iterdir()) == [file]
    assert file.read_bytes() == local_index.read_bytes()


def test_a_package_with_another_hash_is_refused_and_leaves_nothing(local_index, tmp_path):
    with pytest.raises(subprocess.CalledProcessError):
        download(Package("batchgen", "0.1.0", "0" * 64), tmp_path)
    assert not list(tmp_path.iterdir())
