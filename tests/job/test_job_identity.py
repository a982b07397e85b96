"""What makes two commands the same job: what their keys come to, and every byte they read."""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from batchgen.data import digest as digest_module
from batchgen.data.digest import DigestBook, file_digest
from batchgen.data.input.source import discover
from batchgen.job.identity_v1 import sampled_digest
from tests.job.harness import Job

ROWS = [{"prompt": f"the quick fox {i}"} for i in range(4)]
BIG = 70 << 20


def finished(job: Job, *arguments: str) -> None:
    """Run a job, and take one part away so that a resume has work."""
    job.write(ROWS)
    job.given["output.rows_per_part"] = "2"
    assert job(*arguments) == 0
    job.parts[1].unlink()


def tokenizer_link(job: Job) -> str:
    link = job.folder / "linked"
    link.symlink_to(job.given["model.path"])
    return f"model.tokenizer={link}"


SAME: dict[str, Callable[[Job], str]] = {
    "dtype": lambda job: "model.dtype=float32",
    "device": lambda job: "model.device=cpu",
    "tokenizer": lambda job: f"model.tokenizer={job.given['model.path']}",
    "tokenizer by a link": tokenizer_link,
    "limit at the rows": lambda job: "input.limit=4",
    "limit above the rows": lambda job: "input.limit=5000",
    "attention": lambda job: "engine.attention=native",
    "pool": lambda job: "pool.kv_dtype=float32",
    "column": lambda job: "prompt.column=prompt",
    "top_k": lambda job: "sampling.top_k=-1",
    "length": lambda job: f"model.max_model_len={model_len(job)}",
    "revision": lambda job: "model.revision=main",
}


def model_len(job: Job) -> int:
    config = json.loads((Path(job.given["model.path"]) / "config.json").read_text())
    return int(config["max_position_embeddings"])


@pytest.mark.parametrize("case", SAME)
def test_t14_a_key_that_says_what_was_so_anyway_is_the_same_job(job: Job, case: str) -> None:
    finished(job)
    expected = job.json("_manifest.json")["fingerprint"]
    assert job(SAME[case](job)) == 0
    assert len(job.rows()) == len(ROWS)
    # And the other way round.
    shutil.rmtree(job.out)
    assert job(SAME[case](job) if case != "tokenizer by a link" else "log.every_s=5") == 0
    assert job.json("_manifest.json")["fingerprint"] == expected


def test_t14_what_auto_comes_to_is_stored(job: Job) -> None:
    finished(job, "prompt.template='{{ prompt }}'")
    stored = job.json("_manifest.json")["fingerprint"]
    assert stored["model"]["dtype"] == stored["pool"]["kv_dtype"] == "float32"
    assert stored["engine"]["attention"] == "native"
    assert stored["prompt"]["format"] == "chat"
    assert stored["input"]["limit"] is None
    for arguments in ("prompt.format=chat", "log.every_s=5"):
        assert job("prompt.template='{{ prompt }}'", arguments) == 0
        job.parts[1].unlink()
    assert job("prompt.template='{{ prompt }}'", "prompt.format=plain") == 2
    assert job("prompt.template='{{ prompt }}'", "engine.attention=torch") == 2


def test_t14_attention_that_auto_cannot_have_any_more_is_another_job(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    finished(job)
    monkeypatch.setattr(
        "batchgen.runtime.backends._prepare_native", lambda needs: "there is no C compiler"
    )
    assert job() == 2
    assert 'engine.attention: "native" then, "torch" now' in capsys.readouterr().err


def test_t14_weights_that_are_not_loaded_count_for_nothing(
    job: Job, copied_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = load_file(copied_model / "model.safetensors")
    names = sorted(weights)
    files = {"one.safetensors": names[:5], "two.safetensors": names[5:]}
    for file, part in files.items():
        save_file({name: weights[name] for name in part}, copied_model / file, {"format": "pt"})
    index = {name: file for file, part in files.items() for name in part}
    (copied_model / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )
    (copied_model / "model.safetensors").unlink()
    finished(job)
    for foreign in ("consolidated.safetensors", "pytorch_model.bin", "training_args.bin"):
        (copied_model / foreign).write_bytes(b"another form of the weights")
    assert job() == 0
    job.parts[1].unlink()
    weights[names[0]][0] += 1
    save_file({name: weights[name] for name in names[:5]}, copied_model / "one.safetensors")
    assert job() == 2
    assert "model.files.one.safetensors: its content has changed" in capsys.readouterr().err


def test_t14_a_tokenizers_directory_counts_without_the_weights_in_it(
    job: Job, tmp_path: Path
) -> None:
    other = tmp_path / "tokenizer"
    shutil.copytree(job.given["model.path"], other)
    finished(job, f"model.tokenizer={other}")
    (other / "model.safetensors").write_bytes(b"")
    assert job(f"model.tokenizer={other}") == 0
    job.parts[1].unlink()
    (other / "merges.txt").write_text("a b")
    assert job(f"model.tokenizer={other}") == 2


@pytest.mark.parametrize("change", ["nothing", "weights", "input", "dtype"])
def test_t14_an_output_begun_with_an_older_manifest_goes_on_with_the_command_that_began_it(
    job: Job,
    copied_model: Path,
    change: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("batchgen.job.identity_v1._WHOLE_FILE_BYTES", 1000)
    monkeypatch.setattr("batchgen.job.identity_v1._CHUNK_BYTES", 50)
    finished(job, "sampling.top_k=-1")
    path = job.out / "_manifest.json"
    manifest = json.loads(path.read_text())
    manifest["schema_version"] = 1
    made = manifest["fingerprint"]
    made["model"]["dtype"] = made["engine"]["attention"] = made["pool"]["kv_dtype"] = "auto"
    made["prompt"] |= {"column": None, "format": "auto"}
    made["sampling"]["top_k"] = -1
    files = {file.name: sampled_digest(file) for file in sorted(copied_model.iterdir())}
    made["model"]["files"] = files
    made["input"]["files"]["input.parquet"]["digest"] = sampled_digest(job.input)
    path.write_text(json.dumps(manifest))
    if change == "weights":
        (copied_model / "model.safetensors").write_bytes(b"x")
    elif change == "input":
        job.write(ROWS[::-1])
    same = change == "nothing"
    asked = "model.dtype=bfloat16" if change == "dtype" else "log.every_s=5"
    assert job("sampling.top_k=-1", asked) == (0 if same else 2)
    assert len(list(job.out.glob("part-*"))) == (2 if same else 1)


@pytest.fixture
def remembers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """A book of its own that remembers small files too; what was read, in order."""
    read: list[Path] = []
    hashed = digest_module._hash

    def noted(path: Path) -> str:
        read.append(path)
        return hashed(path)

    book = tmp_path / "digests.jsonl"
    monkeypatch.setattr(digest_module, "_hash", noted)
    monkeypatch.setattr(digest_module, "_REMEMBERED_BYTES", 1000)
    monkeypatch.setattr(digest_module, "_SETTLED_NS", 50_000_000)
    monkeypatch.setattr(DigestBook, "of_user", staticmethod(lambda: DigestBook(book)))
    return read


def test_t19_every_tensors_bytes_count(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({f"layer{i}": torch.zeros(1 << 16) for i in range(272)}, path)
    assert path.stat().st_size > 64 << 20
    seen = {file_digest(path)}
    with path.open("r+b") as file:
        for i in range(272):
            file.seek(-(i * (4 << 16)) - 777, os.SEEK_END)
            file.write(b"\x01")
            file.flush()
            seen.add(file_digest(path))
    assert len(seen) == 273


def test_t19_a_large_file_is_read_once_and_again_after_any_write(
    tmp_path: Path, remembers: list[Path]
) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(5000))
    times = path.stat()
    time.sleep(0.1)
    first = file_digest(path)
    assert file_digest(path) == first
    (tmp_path / "link").symlink_to(path)
    assert file_digest(tmp_path / "link") == first
    assert len(remembers) == 1
    # The size is the same, and somebody puts the time back.
    path.write_bytes(bytes(4999) + b"x")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert file_digest(path) != first
    time.sleep(0.1)
    second = file_digest(path)
    assert second not in {first, None}
    assert len(remembers) == 3
    # Another file under the name.
    other = tmp_path / "other"
    other.write_bytes(bytes(5000))
    time.sleep(0.1)
    other.replace(path)
    assert file_digest(path) == first


def test_t19_a_file_that_was_written_just_now_is_not_remembered(
    tmp_path: Path, remembers: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest_module, "_SETTLED_NS", 3_600_000_000_000)
    path = tmp_path / "weights"
    path.write_bytes(bytes(5000))
    assert file_digest(path) == file_digest(path)
    assert len(remembers) == 2


@pytest.mark.parametrize("content", [b"", b"\xff\x00", b"[1]\nnull\n{}\n" * 9, None])
def test_t19_a_book_that_cannot_be_read_is_an_empty_one(
    tmp_path: Path, remembers: list[Path], content: bytes | None
) -> None:
    book, path = tmp_path / "digests.jsonl", tmp_path / "weights"
    book.mkdir() if content is None else book.write_bytes(content)
    path.write_bytes(bytes(5000))
    time.sleep(0.1)
    assert file_digest(path) == file_digest(path)
    assert len(remembers) == (2 if content is None else 1)


def test_t19_a_long_book_is_shortened(
    tmp_path: Path, remembers: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digest_module, "_KEPT_LINES", 3)
    book = tmp_path / "digests.jsonl"
    for number in range(8):
        DigestBook(book).add(tmp_path / f"{number}", (1, 2, 3, 4, 5), f"{number}")
    assert len(book.read_text().splitlines()) < 7
    assert DigestBook(book).get(tmp_path / "7", (1, 2, 3, 4, 5)) == "7"
    assert DigestBook(book).get(tmp_path / "7", (1, 2, 3, 4, 6)) is None


def test_t27_a_row_edited_anywhere_in_a_large_input_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "input.parquet"
    texts = np.random.default_rng(0).bytes(BIG)
    rows = [texts[i : i + (1 << 16)] for i in range(0, BIG, 1 << 16)]
    pq.write_table(pa.table({"prompt": pa.array(rows)}), path, compression="none")
    assert path.stat().st_size > 64 << 20

    def digest() -> object:
        return discover(str(path)).identity()[0]["digest"]

    seen = {digest()}
    for number in range(9):
        with path.open("r+b") as file:
            file.seek((number + 1) * 7_000_001)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))
        seen.add(digest())
    assert len(seen) == 10
