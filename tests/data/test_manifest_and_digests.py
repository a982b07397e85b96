"""What makes two runs the same, and what is said when they are not."""

import json
from enum import StrEnum
from pathlib import Path

import pytest

from batchgen.data.digest import file_digest
from batchgen.data.output.manifest import (
    ABSENT,
    Difference,
    compare,
    read_manifest,
    refuse_mismatch,
    write_manifest,
)
from batchgen.errors import UsageError


class Kind(StrEnum):
    fast = "fast"


FINGERPRINT = {
    "model": {"dtype": "float32", "files": [{"name": "a", "digest": "1"}]},
    "sampling": {"temperature": 0.0, "stop": ("x",), "kind": Kind.fast},
    "template": None,
}


def test_a_stored_fingerprint_equals_the_one_it_was_made_of(tmp_path: Path) -> None:
    path = tmp_path / "_manifest.json"
    assert read_manifest(path) is None
    output_id = write_manifest(path, FINGERPRINT, {"versions": {"torch": "2"}})
    content = read_manifest(path)
    assert content == json.loads(path.read_text())
    assert compare(content["fingerprint"], FINGERPRINT) == []
    assert content["versions"] == {"torch": "2"}
    assert content["created"]
    assert content["output_id"] == output_id != write_manifest(path, FINGERPRINT, {})


def test_h06_every_differing_key_is_named_with_both_values(tmp_path: Path) -> None:
    new = {
        "model": {"dtype": "bfloat16", "files": [{"name": "a", "digest": "2"}]},
        "sampling": {"temperature": 0.5, "stop": ["x"], "seed": 1},
        "template": None,
    }
    differences = compare(FINGERPRINT, new)
    assert differences == [
        Difference("model.dtype", "float32", "bfloat16"),
        Difference("model.files[0].digest", "1", "2"),
        Difference("sampling.temperature", 0.0, 0.5),
        Difference("sampling.kind", "fast", ABSENT),
        Difference("sampling.seed", ABSENT, 1),
    ]
    with pytest.raises(UsageError) as caught:
        refuse_mismatch(tmp_path, differences)
    message = str(caught.value)
    assert 'model.dtype: "float32" then, "bfloat16" now' in message
    assert "sampling.seed: (absent) then, 1 now" in message
    assert "output.overwrite=true" in message
    refuse_mismatch(tmp_path, [])


def test_differences_bear_the_names_of_keys_and_no_null_that_came_or_went(tmp_path: Path) -> None:
    old = {"sampling": {"structured": None}, "prompt": {"shots": "a" * 32}}
    new = {
        "sampling": {"structured": {"choice": ["a"], "regex": None}, "top": None},
        "prompt": {"shots": "b" * 32},
    }
    with pytest.raises(UsageError) as caught:
        refuse_mismatch(tmp_path, compare(old, new))
    assert str(caught.value).splitlines()[1:-1] == [
        "  prompt.shots_file: its content has changed",
        '  structured.choice: (absent) then, ["a"] now',
    ]


def test_an_input_that_has_grown_is_refused_with_what_to_do_about_it(tmp_path: Path) -> None:
    old = {"input": {"files": {"a": {"rows": 1}}, "ids": "1"}, "sampling": {"seed": 0}}
    grown = {"input": {"files": {"a": {"rows": 2}}, "ids": "2"}}
    for new, is_told in (({**old, **grown}, True), ({**grown, "sampling": {"seed": 1}}, False)):
        with pytest.raises(UsageError) as caught:
            refuse_mismatch(tmp_path, compare(old, new))
        assert ("read together as one table" in str(caught.value)) == is_told


def test_a_long_list_of_differences_and_long_values_are_cut(tmp_path: Path) -> None:
    old = {f"k{i}": "a" * 500 for i in range(15)}
    with pytest.raises(UsageError) as caught:
        refuse_mismatch(tmp_path, compare(old, {}))
    assert "and 5 more" in str(caught.value)
    assert len(str(caught.value)) < 2500


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"schema_version": 99, "fingerprint": {}}']
)
def test_a_damaged_or_foreign_manifest_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "_manifest.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=r"_manifest\.json"):
        read_manifest(path)


def test_any_byte_of_a_small_file_counts(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"a" * 1000)
    before = file_digest(path)
    path.write_bytes(b"a" * 500 + b"b" + b"a" * 499)
    assert file_digest(path) != before


def test_h06_head_tail_middle_and_size_of_a_large_file_count(tmp_path: Path) -> None:
    path = tmp_path / "f"
    content = bytes(9 << 20)

    def digest(data: bytes) -> str:
        path.write_bytes(data)
        return file_digest(path)

    changed = [
        content,
        b"x" + content[1:],
        content[:-1] + b"x",
        content + b"\x00",
        content[:5_000_000] + b"x" + content[5_000_001:],
    ]
    assert len({digest(data) for data in changed}) == len(changed)
