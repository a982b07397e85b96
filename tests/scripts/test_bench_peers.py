"""Peers get the same rows as everyone, and their answers count as anyone's."""

import importlib
import os
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from bench_parts.peers import PEERS_DIR, Peer
from job_rows import compose_job, open_rows

from batchgen.errors import EngineError, UsageError
from tests.scripts.bench_job import OUTPUTS, make_job

ECHO = """
from peer_files import Answer, serve

def prepare(request):
    print("ready")
    assert request.longest == max(map(sum, zip(map(len, request.prompts), request.max_tokens)))
    assert request.device == "cpu"
    runs = iter(range(1, 9))
    outputs = [[count] * count for count in request.max_tokens]
    return lambda: Answer(outputs, 2.5 * next(runs), "echo 1 " + request.variant)

serve(prepare, variants=("loud",))
"""


@pytest.fixture
def peers(tmp_path):
    """A directory with one peer, which answers with the number of tokens."""
    shutil.copy(PEERS_DIR / "peer_files.py", tmp_path)
    (tmp_path / "run_echo.py").write_text(ECHO)
    return tmp_path


@pytest.fixture
def start(peers, tmp_path_factory):
    """Start the peer over the rows of a small job."""
    config = compose_job(make_job(tmp_path_factory.mktemp("job")))
    with open_rows(config) as rows, ExitStack() as held:
        yield lambda text: held.enter_context(Peer.parse(text, peers).start(rows, config))


def test_a_peer_runs_the_rows_by_its_own_interpreter(start, capfd):
    run = start(f"echo:loud={sys.executable}").run()
    assert run.outputs == {row: [count] * count for row, count in enumerate(OUTPUTS)}
    assert run.seconds == 2.5
    assert run.version == "echo 1 loud"
    assert run.peak_memory_bytes > 1 << 20
    said = capfd.readouterr()
    assert "ready" in said.err
    assert "ready" not in said.out


def test_a_peer_is_made_ready_once_and_stands_still_between_its_runs(start, capfd):
    peer = start(f"echo={sys.executable}")
    for seconds in (2.5, 5.0, 7.5):
        assert peer.run().seconds == seconds
        # T: stopped by a signal (proc_pid_stat(5)).
        state = Path(f"/proc/{peer._process.pid}/stat").read_text().rpartition(")")[2].split()[0]
        assert state == "T"
    assert capfd.readouterr().err.count("ready") == 1


@pytest.mark.parametrize("text", ["echo", "echo=", "other=/usr/bin/python3"])
def test_a_peer_that_is_not_there_is_refused(peers, text):
    with pytest.raises(UsageError, match="one of echo"):
        Peer.parse(text, peers)


@pytest.mark.parametrize("text", ["echo:quiet={python}", "echo=/nowhere/python"])
def test_a_peer_that_fails_says_so(start, text):
    with pytest.raises(EngineError, match="the peer echo"):
        start(text.format(python=sys.executable))


def test_vllm_and_openvino_are_there():
    assert Peer.parse("vllm=python").script.is_file()
    assert Peer.parse("openvino:primed=python").variant == "primed"


@pytest.fixture
def load(monkeypatch):
    """Import a peer's script, as its interpreter would."""
    monkeypatch.syspath_prepend(str(PEERS_DIR))
    return importlib.import_module


def _request(load, **changes):
    given = {"model": "/m/tiny", "dtype": "float32", "device": "cpu", "threads": 1, "variant": ""}
    rows = {"prompts": [[5] * 4, [6], [7, 8]], "max_tokens": [2, 3, 1]}
    return load("peer_files").Request(**(given | rows | changes))


def test_vllm_gets_token_ids_and_lengths_and_an_empty_cache(load, monkeypatch):
    calls = []

    class Engine:
        def __init__(self, **keywords):
            calls.append(keywords)

        def generate(self, prompts, params, use_tqdm):
            ids = [prompt["prompt_token_ids"] for prompt in prompts]
            calls.append(list(zip(ids, params, strict=True)))
            outputs = [SimpleNamespace(token_ids=[p["max_tokens"]]) for p in params]
            return [SimpleNamespace(outputs=[each]) for each in outputs]

        def reset_prefix_cache(self):
            calls.append("empty")

    stub = SimpleNamespace(LLM=Engine, SamplingParams=dict, __version__="9")
    monkeypatch.setitem(sys.modules, "vllm", stub)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    run = load("run_vllm").prepare(_request(load))
    for _ in range(2):
        answer = run()
        assert (answer.outputs, answer.version) == ([[2], [3], [1]], "vllm 9")
    settings, _, emptied, rows, emptied_again, rows_again = calls
    assert settings["enable_prefix_caching"] is True
    assert settings["max_model_len"] == 6
    assert settings["dtype"] == "float32"
    assert emptied == emptied_again == "empty"
    assert rows == rows_again
    assert [ids for ids, _ in rows] == [[5] * 4, [6], [7, 8]]
    assert all(params["ignore_eos"] and params["temperature"] == 0 for _, params in rows)


def test_vllm_starts_again_with_its_environment(load, monkeypatch):
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    started = []
    monkeypatch.setattr(os, "execv", lambda path, arguments: started.append(arguments))
    load("run_vllm")._prepare_cpu(threads=1)
    assert started == [[sys.executable, *sys.argv]]
    assert os.environ["VLLM_CPU_KVCACHE_SPACE"] == "4"
    assert len(os.environ["VLLM_CPU_OMP_THREADS_BIND"].split(",")) == 1


@pytest.mark.parametrize(
    ("variant", "calls"),
    [
        ("", [(0, 16), (16, 32), (32, 33)]),
        ("one_call", [(0, 33)]),
        ("primed", [(0, 1), (1, 33)]),
    ],
)
def test_openvino_gets_its_rows_in_calls(load, variant, calls):
    request = _request(load, variant=variant, prompts=[[1]] * 33, max_tokens=[1] * 33)
    given = [(rows.start, rows.stop) for rows in load("run_openvino")._calls(request)]
    assert given == calls


def test_openvino_exports_the_model_once(load, monkeypatch, tmp_path):
    module, commands = load("run_openvino"), []

    def export(command, check, env):
        assert env["HF_HUB_OFFLINE"] == "1"
        commands.append(command)
        os.mkdir(command[-1])  # noqa: PTH102 -- as another program would

    monkeypatch.setattr(module.subprocess, "run", export)
    request = _request(load, model=str(tmp_path / "tiny"))
    assert module._exported(request) == module._exported(request)
    assert module._exported(request).name == "tiny-openvino-fp32"
    (command,) = commands
    assert command[command.index("--weight-format") + 1] == "fp32"
