"""The whole of gpu_check.py on a CPU, as on a machine with nothing but torch and its like."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
PARTS = (
    "compiling", "kernels", "rates", "equality", "determinism", "syncs", "throughput", "memory",
)  # fmt: skip

# Hides all that a bare GPU image lacks, then runs a script.
BARE = """
import os, runpy, sys
from importlib.machinery import PathFinder


ABSENT = {"pyarrow", "omegaconf", "hydra", "duckdb", "pynvml", "matplotlib", "pytest",
          "llguidance", "gguf", "accelerate", "hypothesis"}

class WithoutAbsent(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            return None
        return super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutAbsent
sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def _run_bare(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BARE, *arguments]
    # From elsewhere, and without the checkout on the path.
    return subprocess.run(
        command, cwd="/", env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict]:
    path = tmp_path_factory.mktemp("gpu_check") / "figures.json"
    # Time enough, however busy the machine is.
    arguments = ("--dry-run", "--seed", "7", "--budget-s", "3000", "--json", str(path))
    done = _run_bare(str(SCRIPTS / "gpu_check.py"), *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads(path.read_text())


def test_every_part_comes_to_its_end_and_leaves_nothing_out(dry_run: tuple[str, dict]) -> None:
    content = dry_run[1]
    assert [part["part"] for part in content["parts"]] == list(PARTS)
    for part in content["parts"]:
        assert all(check["passed"] for check in part["checks"])
        assert not part["left_out"]
        assert part["checks"] or part["figures"]


def test_what_is_timed_is_compiled_before(dry_run: tuple[str, dict]) -> None:
    names = {check["name"] for check in dry_run[1]["parts"][0]["checks"]}
    for model in ("1B", "8B", "7B", "small, float32", "small, bfloat16"):
        assert f"{model}: attend_kernel compiles" in names


def test_each_kernel_is_checked_and_timed(dry_run: tuple[str, dict]) -> None:
    kernels, rates = dry_run[1]["parts"][1:3]
    names = {check["name"] for check in kernels["checks"]}
    assert {"store_kv: float8_e4m3fn pool", "copies of blocks", "decode: fp8 pool"} <= names
    for kind, least in (("prefill: ", 4), ("decode: ", 5), ("shared prefixes: ", 3)):
        assert sum(name.startswith(kind) for name in names) >= least
    timed = [figure for figure in rates["figures"] if figure["predicted"] is not None]
    assert len(timed) >= 8
    assert all(figure["value"] > 0 and figure["predicted"] > 0 for figure in timed)


def test_preemption_and_swap_really_happened(dry_run: tuple[str, dict]) -> None:
    details = {check["name"]: check["detail"] for check in dry_run[1]["parts"][3]["checks"]}
    for family in ("llama", "mistral", "gemma2", "gpt_oss", "qwen3", "phi3", "gpt2"):
        assert " 0 preemptions" not in details[f"{family}, fp32, swap forced"]
        assert " 0 blocks swapped in" not in details[f"{family}, fp32, swap forced"]
        assert " 0 preemptions" not in details[f"{family}, fp32, recompute forced"]
        assert f"{family}, bf16, distributions" in details


def test_rows_keep_their_bits_in_every_company(dry_run: tuple[str, dict]) -> None:
    names = {check["name"] for check in dry_run[1]["parts"][4]["checks"]}
    for company in (
        "one row at a time", "another order", "smaller steps", "larger steps", "no prefix cache",
        "cascade on", "cascade off", "swap forced", "recompute forced", "overlap on, swap forced",
    ):  # fmt: skip
        assert f"fp32, engine.deterministic: {company}" in names


def test_a_decode_step_is_measured_with_and_without_overlap_and_graphs(
    dry_run: tuple[str, dict],
) -> None:
    syncs = dry_run[1]["parts"][5]
    for mode in ("overlap on", "overlap off", "graphs off"):
        assert f"waits in the decode loop, {mode}" in {check["name"] for check in syncs["checks"]}
        assert f"decode step, {mode}" in {figure["name"] for figure in syncs["figures"]}


def test_throughput_has_every_engine_and_workload(dry_run: tuple[str, dict]) -> None:
    names = {figure["name"] for figure in dry_run[1]["parts"][6]["figures"]}
    for model in ("1B", "8B"):
        assert f"{model}, few_shot, transformers continuous" in names
        assert f"{model}, few_shot, no cascade" in names
        assert {f"{model}, {each}, batchgen" for each in ("few_shot", "sharegpt", "unshared")} <= (
            names
        )


def test_the_table_stands_last(dry_run: tuple[str, dict]) -> None:
    table = dry_run[0].rpartition("\n\n| part | figure ")[2]
    assert table.count("\n|") > 30
    assert "| memory | 4 of 4 |" in table


def test_a_tile_is_chosen_in_a_dry_run() -> None:
    arguments = ("--dry-run", "--bytes", "4", "--size", "64")
    done = _run_bare(str(SCRIPTS / "tune_tiles.py"), *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("    (0, 4, 64): (AttentionTile(")
    assert done.stdout.count("AttentionTile(") == 2
