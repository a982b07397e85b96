"""What a sweep keeps beside its jobs' outputs, wherever they lie."""

from pathlib import Path

import pytest

from batchgen.data.stores.loose import LooseFile
from tests.support.s3_loopback import S3


@pytest.mark.parametrize("is_stored", [False, True])
def test_a_loose_file_is_read_as_it_was_written(s3: S3, tmp_path: Path, is_stored: bool) -> None:
    folder = s3.uri("sweep/a") if is_stored else str(tmp_path / "sweep" / "a")
    file = LooseFile.below(folder, "figures.json")
    file.write("{}\n")
    assert LooseFile.below(folder, "figures.json").read() == "{}\n"
    assert s3.keys() == (["sweep/a/figures.json"] if is_stored else [])
    with pytest.raises(FileNotFoundError):
        LooseFile.below(folder, "others.json").read()


def test_its_address_can_be_given_again() -> None:
    file = LooseFile.below("s3://bucket/a?endpoint_override=host:1&scheme=http", "b.json")
    assert LooseFile.of(str(file)) == file
    assert str(LooseFile.below("/out/a", "b.json")) == "/out/a/b.json"
