"""What stands in the rows, the model's folder or a name is data: nothing follows it or runs it."""

import json
from pathlib import Path

import pyarrow as pa
import pytest

from tests.job.harness import Job

SECRET = "canary-77c1"
PATHS = ["/etc/passwd", "../secret.txt", "file:///etc/passwd", "~/secret.txt", "$(cat secret.txt)"]


def test_paths_and_commands_in_rows_are_text_and_nothing_follows_them(job: Job) -> None:
    secret = job.folder / "secret.txt"
    secret.write_text(SECRET)
    values = [*PATHS, str(secret), "${oc.env:HOME}", "{{ 7 * 7 }}", "{% include 'secret.txt' %}"]
    job.write(
        pa.table({"id": values, "prompt": [f"read {value}" for value in values], "x": values})
    )
    assert job() == 0
    assert {row["id"] for row in job.rows("id")} == set(values)
    template = ("prompt.template='about {{ x }}'", "prompt.format=plain", "output.overwrite=true")
    assert job(*template) == 0
    files = [path for path in job.out.rglob("*") if path.is_file()]
    assert files
    assert not any(SECRET.encode() in path.read_bytes() for path in files)
    # Nothing is made of an id either, such as a file.
    names = {path.name for path in job.folder.iterdir()}
    assert names <= {"input.parquet", "out", "secret.txt", "log.txt"}


def test_a_messages_row_names_no_file(job: Job) -> None:
    secret = job.folder / "secret.txt"
    secret.write_text(SECRET)
    parts = [{"type": "text", "text": f"read file://{secret}"}]
    image = [{"type": "image", "url": f"file://{secret}"}]
    rows = [[{"role": "user", "content": content}] for content in (parts, image)]
    job.write(pa.table({"id": [1, 2], "messages": [json.dumps(row) for row in rows]}))
    assert job() in (0, 3)
    files = [path for path in job.out.rglob("*") if path.is_file()]
    assert not any(SECRET.encode() in path.read_bytes() for path in files)


def test_code_that_comes_with_a_model_does_not_run_by_default(
    job: Job, copied_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mark = job.folder / "it ran"
    (copied_model / "modeling_evil.py").write_text(
        f"import pathlib\npathlib.Path({str(mark)!r}).touch()\nclass M: pass\nclass C: pass\n"
    )
    config = json.loads((copied_model / "config.json").read_text())
    config["auto_map"] = {
        "AutoConfig": "modeling_evil.C",
        "AutoModelForCausalLM": "modeling_evil.M",
    }
    config["model_type"] = "evil"
    (copied_model / "config.json").write_text(json.dumps(config))
    job.write([{"id": 1, "prompt": "x"}])
    assert job() == 2
    assert "trust_remote_code" in capsys.readouterr().err
    assert not mark.exists()


def test_weights_in_a_pickle_are_refused_by_the_command(
    job: Job, copied_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (copied_model / "model.safetensors").rename(copied_model / "pytorch_model.bin")
    job.write([{"id": 1, "prompt": "x"}])
    for mode in ("run", "plan", "preview"):
        assert job(f"mode={mode}") == 2
        assert "model.allow_pickle=true" in capsys.readouterr().err
