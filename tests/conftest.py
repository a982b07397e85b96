"""The real model and the real rows that tests stand on, fetched where they are missing."""

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from fetch_model import fetch_model
from hypothesis import HealthCheck, settings
from prepare_data import prepare_data

from tests.support.notes import NOTE, Note, texts

ROOT = Path(__file__).resolve().parent.parent

# Files that take twenty seconds or more, the longest first. They are begun first, so that
# at the end no worker is alone with one of them.
LONGEST = (
    "job/test_job_faults.py",
    "acceptance/test_equality.py",
    "kernels/test_triton_interpreted.py",
    "kernels/test_compiled_sm_100.py",
    "kernels/test_compiled_sm_90.py",
    "kernels/test_compiled_sm_80.py",
    "engine/test_stateful.py",
    "docs/test_doc_commands.py",
    "job/test_job_stores.py",
    "runtime/test_model_table.py",
    "scripts/test_gpu_check_dry_run.py",
    "fuzz/test_fuzz_targets.py",
    "data/test_s3_output.py",
    "docs/test_operations.py",
    "engine/test_ahead.py",
    "scripts/test_bench.py",
    "scripts/test_bench_plan.py",
    "cli/test_compose.py",
    "job/test_job_disks.py",
)

# Left out by --quick, with the longest files: whole jobs, scripts, commands of the docs.
SLOW_FOLDERS = ("acceptance", "docs", "fuzz", "job", "kernels", "scripts")

# A busy machine is no fault of an example.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

# What runs measure and compile here is not mixed with the user's own; compiled code is kept
# from one run to the next. Set before any process of the tests is started.
_CACHE = Path(tempfile.gettempdir()) / f"batchgen-tests-{os.getuid()}"
os.environ["XDG_CACHE_HOME"] = str(_CACHE)


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The checkpoint directory of SmolLM2-135M-Instruct."""
    return fetch_model()


@pytest.fixture(scope="session")
def review_rows() -> list[dict[str, Any]]:
    """Review sentences: id, text, rating, label."""
    return pq.read_table(prepare_data() / "reviews.parquet").to_pylist()


@pytest.fixture(scope="session")
def sharegpt_rows() -> list[dict[str, Any]]:
    """First messages to an assistant: id, messages, turns."""
    return pq.read_table(prepare_data() / "prompts.parquet").to_pylist()


@pytest.fixture(scope="session")
def conversation_rows() -> list[dict[str, Any]]:
    """Conversations of several turns: id, messages."""
    return pq.read_table(prepare_data() / "conversations.parquet").to_pylist()


@pytest.fixture(scope="session")
def built_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's wheel, built from this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    subprocess.run([*command, str(ROOT)], check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="session")
def fork_server() -> None:
    """Let the imports of the child processes run beside the first tests."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.warm"])
    forkserver.ensure_running()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[Any]:
    """An S3 API on loopback; see ``s3``."""
    from tests.support.s3_loopback import serve_s3

    with serve_s3() as server:
        yield server


@pytest.fixture
def s3(s3_server: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The server with an empty bucket, and the credentials for it in the environment."""
    from tests.support.s3_loopback import ENVIRONMENT

    s3_server.clear()
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    return s3_server


@pytest.fixture
def note(record_property: Callable[[str, object], None]) -> Note:
    """Show a text at the end of the output: a worker's own output goes nowhere."""
    return partial(record_property, NOTE)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Show what tests told."""
    stats = terminalreporter.stats
    for name, text in texts([*stats.get("passed", ()), *stats.get("failed", ())]):
        terminalreporter.section(name, sep="-")
        terminalreporter.write_line(text)


def pytest_configure(config: pytest.Config) -> None:
    """Give each of several workers a core of its own, which what it starts inherits.

    Two processes whose threads share cores wait for each other in every small product.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is not None and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the longest files first, or leave out all slow ones; the others keep their order."""
    place = {ROOT / "tests" / name: number for number, name in enumerate(LONGEST)}
    gone = [str(path) for path in place if not path.is_file()]
    if gone:
        raise pytest.UsageError(f"tests/conftest.py: LONGEST names what is not there: {gone}")
    items.sort(key=lambda item: place.get(item.path, len(place)))
    if config.getoption("--quick"):
        folders = tuple(str(ROOT / "tests" / name) + "/" for name in SLOW_FOLDERS)
        slow = [i for i in items if i.path in place or str(i.path).startswith(folders)]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in set(slow)]


def pytest_addoption(parser: pytest.Parser) -> None:
    """The quick tier, and the size of the comparison with generate (tests/acceptance)."""
    parser.addoption("--quick", action="store_true", help="leave out what takes long")
    parser.addoption("--equality-rows", type=int, default=12)
    parser.addoption("--new-tokens", type=int, default=12)
    parser.addoption("--longest-prompt", type=int, default=1500)
