"""The page on running unattended and its examples, run as far as that goes without a cluster."""

import ast
import configparser
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from batchgen.data.failpoints import VARIABLE
from batchgen.data.output.writer import PartLimits, PartWriter
from batchgen.engine.core import EngineCore
from batchgen.errors import ExitCode
from batchgen.keys import declared_keys
from batchgen.report.json_log import EVENTS
from batchgen.report.metrics import MOST_LINES
from batchgen.report.prometheus import METRICS
from tests.support.killed_job import make_input, make_model
from tests.support.realdata import ROOT

PAGE = (ROOT / "docs" / "operations.md").read_text("utf-8")
EXAMPLES = ROOT / "docs" / "operations"
DEADLINE_S = 120
ROWS = 48
# The job stands still once its first part is there, until it is told to go on.
STANDS = "part.durable:stop"

Start = Callable[..., subprocess.Popen[str]]


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def first_cells(text: str) -> list[str]:
    """The first column of the tables in a text, without their heads."""
    rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")]
    return [cell for cell in rows if cell not in ("code", "event", "metric", "between", "---")]


def test_every_exit_code_is_explained() -> None:
    assert first_cells(section("Exit codes")) == [str(int(code)) for code in ExitCode]


def test_every_metric_is_explained() -> None:
    named = {name for cell in first_cells(section("Metrics")) for name in re.findall(r"\w+", cell)}
    assert named == set(METRICS)


def test_every_event_is_explained() -> None:
    assert [cell.strip("`") for cell in first_cells(section("Logs"))] == list(EVENTS)


def test_the_bounds_are_those_of_the_code() -> None:
    bounds = section("What a long run holds")
    limits = PartLimits()
    defaults = PartWriter.__init__.__kwdefaults__
    assert f"{defaults['queue_rows']:,} rows in the queue" in bounds
    assert f"a part of {limits.rows:,} rows or {limits.size_bytes >> 20} MiB" in bounds
    assert f"{EngineCore.__init__.__kwdefaults__['lookahead']:,} requests" in bounds
    assert f"{MOST_LINES:,} lines" in bounds
    assert f"the last {limits.age_s:.0f} seconds" in PAGE


def test_the_page_and_its_files_agree() -> None:
    linked = set(re.findall(r"\]\(operations/([\w.]+)\)", PAGE))
    assert linked == {path.name for path in EXAMPLES.iterdir()}


def test_every_key_in_the_examples_is_declared() -> None:
    texts = [PAGE, *(path.read_text() for path in EXAMPLES.iterdir())]
    groups = {name.split(".")[0] for name in declared_keys() if "." in name}
    named = {
        key
        for text in texts
        for key in re.findall(r"(?<![\w./])([a-z_]+\.[a-z_]+)=", text)
        if key.split(".")[0] in groups
    }
    assert named
    assert named <= set(declared_keys()), named - set(declared_keys())


@pytest.mark.parametrize("name", ["nightly.sh", "slurm.sbatch"])
def test_a_script_has_no_syntax_errors(name: str) -> None:
    subprocess.run(["bash", "-n", str(EXAMPLES / name)], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "--shell=bash", str(EXAMPLES / name)], check=True)


def test_the_dag_compiles_and_its_retries_share_an_output() -> None:
    tree = ast.parse((EXAMPLES / "airflow_dag.py").read_text())
    compile(tree, "airflow_dag.py", "exec")
    (command,) = (
        node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    )
    assert "output.dir=/data/out/{{ ds }}" in command
    subprocess.run(["bash", "-n", "-c", command], check=True)


def test_the_kubernetes_job_treats_each_exit_code_as_documented() -> None:
    (job,) = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    rules = job["spec"]["podFailurePolicy"]["rules"]
    by_code = {
        code: rule["action"]
        for rule in rules
        for code in rule.get("onExitCodes", {}).get("values", [])
    }
    assert by_code == {2: "FailJob", 3: "FailJob", 75: "Ignore"}
    pod = job["spec"]["template"]["spec"]
    # A podFailurePolicy is refused with any other policy.
    assert pod["restartPolicy"] == "Never"
    (container,) = pod["containers"]
    assert {rule["onExitCodes"]["containerName"] for rule in rules if "onExitCodes" in rule} == {
        container["name"]
    }
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes


def test_the_units_are_accepted_by_systemd(tmp_path: Path) -> None:
    service = (EXAMPLES / "batchgen.service").read_text()
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(service)
    assert parser["Service"]["RestartForceExitStatus"] == "75"
    assert parser["Service"]["RestartPreventExitStatus"] == "2 3"
    if not shutil.which("systemd-analyze"):
        return
    python = "/opt/batchgen/.venv/bin/python"
    assert f"ExecStart={python} " in service
    # In quotes: a checkout's path may hold a space.
    (tmp_path / "batchgen.service").write_text(service.replace(python, f'"{sys.executable}"'))
    shutil.copy(EXAMPLES / "batchgen.timer", tmp_path)
    done = subprocess.run(
        ["systemd-analyze", "verify", *map(str, sorted(tmp_path.iterdir()))],
        capture_output=True,
        text=True,
        check=False,
    )
    ours = [line for line in done.stderr.splitlines() if "batchgen." in line]
    assert not ours, ours


def test_the_alerts_are_over_metrics_there_are() -> None:
    (group,) = yaml.safe_load((EXAMPLES / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]:
        assert set(re.findall(r"batchgen_\w+", rule["expr"])) <= set(METRICS)
        assert rule["annotations"]["summary"]


def test_the_image_has_what_the_wheel_is_built_from() -> None:
    lines = (ROOT / "Containerfile").read_text().splitlines()
    copied = {name for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]}
    assert all((ROOT / name).exists() for name in copied)
    assert {"pyproject.toml", "README.md", "batchgen", "conf", "jobs"} <= copied
    assert 'ENTRYPOINT ["python", "-m", "batchgen"]' in lines


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and an input of several parts."""
    folder = tmp_path_factory.mktemp("operations")
    make_model(folder / "model")
    make_input(folder / "in.parquet", ROWS)
    return folder


def arguments(place: Path) -> list[str]:
    return [
        f"model.path={place / 'model'}",
        f"input.path={place / 'in.parquet'}",
        *("sampling.max_tokens=4", "sampling.ignore_eos=true", "pool.num_blocks=64"),
        *("engine.max_num_seqs=4", "output.rows_per_part=16", "log.every_s=0.05"),
        # The rows of the torture job are there to fail, too.
        f"log.prometheus_file={place / 'job.prom'}",
    ]


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """What a test starts, each in a group of its own; none of it outlives the test."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture
def start(started: list[subprocess.Popen[str]], place: Path) -> Start:
    """Starts a script of the page over the input."""

    def start(script: str, out: Path, **more: str) -> subprocess.Popen[str]:
        environment = {
            **os.environ,
            **{"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            **{"RETRY_S": "0", "TOKENIZERS_PARALLELISM": "false"},
            **more,
        }
        command = ["bash", str(EXAMPLES / script), str(out), *arguments(place)]
        given = {"env": environment, "stderr": subprocess.PIPE, "cwd": place}
        started.append(subprocess.Popen(command, text=True, start_new_session=True, **given))
        return started[-1]

    return start


def events(log: Path) -> list[dict[str, Any]]:
    lines = log.read_text().splitlines() if log.exists() else []
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]


def wait_until_it_stands(script: subprocess.Popen[str]) -> int:
    """Wait for the job that a script has started to stand still; its process id."""
    children = Path(f"/proc/{script.pid}/task/{script.pid}/children")
    deadline = time.monotonic() + DEADLINE_S
    while True:
        assert script.poll() is None, script.stderr and script.stderr.read()
        assert time.monotonic() < deadline
        for pid in children.read_text().split():
            with contextlib.suppress(OSError):
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                if state == "T":
                    return int(pid)
        time.sleep(0.01)


def terminate(script: subprocess.Popen[str], job: int) -> int:
    """Ask a script to stop whose job stands still, and let the job go on; the exit code."""
    script.send_signal(signal.SIGTERM)
    os.kill(job, signal.SIGCONT)
    return script.wait(DEADLINE_S)


def test_the_cron_script_is_stopped_and_goes_on_at_its_next_tick(place: Path, start: Start) -> None:
    out = place / "cron"
    first = start("nightly.sh", out, **{VARIABLE: STANDS})
    job = wait_until_it_stands(first)
    # A tick beside it has nothing to do.
    assert start("nightly.sh", out).wait(DEADLINE_S) == 0
    assert terminate(first, job) == 75
    kept = pq.read_table(out).num_rows
    assert 0 < kept < ROWS
    assert start("nightly.sh", out).wait(DEADLINE_S) == 0
    table = pq.read_table(out, columns=["id", "sample_index"])
    keys = list(zip(*table.to_pydict().values(), strict=True))
    assert len(keys) == len(set(keys)) > kept
    assert len(set(table.column("id").to_pylist())) == ROWS
    log = place / "cron.log"
    lines = log.read_text().splitlines()
    assert [line for line in lines if not line.startswith("{")] == ["failpoint part.durable: stop"]
    ended = [event["exit_code"] for event in events(log) if event["event"] == "job_ended"]
    assert ended == [75, 0]
    assert "batchgen_exit_code" in (place / "job.prom").read_text()


def test_the_slurm_script_asks_to_be_requeued_when_its_time_is_over(
    place: Path, tmp_path: Path, start: Start
) -> None:
    tool = tmp_path / "scontrol"
    tool.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    tool.chmod(0o755)
    path, out = f"{tmp_path}:{os.environ['PATH']}", place / "slurm"
    end = str(int(time.time()) + 3600)
    given = {"PATH": path, "SLURM_JOB_ID": "42", "SLURM_JOB_END_TIME": end, VARIABLE: STANDS}
    first = start("slurm.sbatch", out, **given)
    assert terminate(first, wait_until_it_stands(first)) == 75
    assert (tmp_path / "calls").read_text() == "requeue 42\n"
    assert first.stderr is not None
    said = next(line for line in first.stderr.read().splitlines() if "job_started" in line)
    assert re.search(r"budget\.wall_time_s=34\d\d", said)
