"""A hub that does not answer is found out in seconds, and only where it is needed."""

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import transformers as tf

from batchgen.errors import UsageError
from batchgen.runtime import hub
from batchgen.runtime.hub import require_answer
from batchgen.runtime.model import ModelSource, load_config


class Refusing(BaseHTTPRequestHandler):
    """Answers that there is no such thing."""

    def do_HEAD(self) -> None:
        self.send_error(404)

    def log_message(self, *_: object) -> None:
        """Keep quiet."""


@pytest.fixture(autouse=True)
def hub_of_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No path of ours is a name on the hub, and the hub is a port where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
        monkeypatch.setattr(hub, "_PAUSE_S", 0.0)
        monkeypatch.chdir(tmp_path)
        yield


def test_a_name_is_refused_before_the_hubs_client_begins_to_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(tf.AutoConfig, "from_pretrained", lambda **each: asked.append(each))
    with pytest.raises(UsageError) as refused:
        load_config(ModelSource("models/mine"))
    said = str(refused.value)
    begin = f"model.path=models/mine: there is no directory {tmp_path / 'models' / 'mine'}, "
    assert said.startswith(begin)
    assert "http://127.0.0.1:" in said
    assert "Connection refused" in said
    assert not asked


def test_a_hub_that_accepts_and_never_answers_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_ANSWER_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(UsageError, match=r"model\.tokenizer=a/b: .*timed out"):
            require_answer("model.tokenizer", "a/b", None)


def test_one_that_answers_anything_is_left_to_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        require_answer("model.path", "models/mine", None)
        server.shutdown()


def test_one_that_fails_once_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [OSError("a short one"), None]
    monkeypatch.setattr(hub, "_failure", lambda _: failures.pop(0))
    require_answer("model.path", "models/mine", None)
    assert not failures


@pytest.mark.parametrize("name", ["here", "/no/such/folder", "../mine", "a/b/c", "s3://b/x"])
def test_paths_are_no_names_to_ask_for(tmp_path: Path, name: str) -> None:
    (tmp_path / "here").mkdir()
    require_answer("model.path", name, None)


def test_what_was_downloaded_before_needs_no_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted: list[str] = []

    def cached_file(name: str, file: str, *, revision: str, local_files_only: bool) -> str:
        assert local_files_only
        wanted.append(f"{name}@{revision}/{file}")
        if file == "config.json":
            raise OSError("not in the cache")
        return "somewhere"

    monkeypatch.setattr(hub, "cached_file", cached_file)
    require_answer("model.path", "models/mine", "v1")
    assert wanted == ["models/mine@v1/config.json", "models/mine@v1/tokenizer_config.json"]


def test_offline_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    require_answer("model.path", "models/mine", None)
