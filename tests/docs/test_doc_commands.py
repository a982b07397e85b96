"""Every command in the README and in docs/ runs, in a folder that looks like the checkout.

A tiny model with the real tokenizer stands where the demo's model would, and a few real rows
where the data would. Commands of batchgen and of our scripts run in this process, everything
else in bash, page by page in the order in which they stand.
"""

import functools
import json
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq
import pytest
import torch
from prepare_data import prepare_data
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from batchgen.cli import app
from batchgen.job import front
from batchgen.prompts.tokenizer import load_tokenizer
from tests.docs.fences import Fence, fences
from tests.support.realdata import ROOT

ROWS = 24
# Set-up, and measurements that take minutes: what a command begins with, and why it is left out.
LEFT_OUT = {
    "bash scripts/demo.sh": "makes the environment that these tests run in",
    "bash scripts/test.sh": "runs these tests",
    "python3 -m venv .venv": "makes the environment that these tests run in",
    "source .venv/bin/activate": "enters the environment that these tests run in",
    "python scripts/bench.py": "measures for minutes; tests/scripts/test_bench.py runs it small",
    "python scripts/bench_plan.py": "a million rows; tests/scripts/test_bench_plan.py runs fewer",
    "python scripts/bench_scheduler.py": "measures; tests/scripts/test_bench_scheduler.py runs it",
    "python scripts/profile_step.py": "measures; tests/scripts/test_bench_profile.py runs it",
    "python -m tests.stress.torture": "kills for a minute, as tests/job/test_job_faults.py does",
}
# Pages whose commands other tests run, in surroundings of their own.
ELSEWHERE = {"operations.md", "stores.md", "gpu.md", "device.md", "kernels.md"}
PAGES = [
    ROOT / "README.md",
    *sorted(page for page in (ROOT / "docs").glob("*.md") if page.name not in ELSEWHERE),
]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, smollm2_dir: Path) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        # With heads of 8, a pool of the default size would take a second to list its blocks.
        head_dim=256,
        max_position_embeddings=2048,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def load_tokenizer_once() -> Callable[..., Any]:
    """Loads the real tokenizer, which takes most of a small run, for the first command only."""
    load = functools.cache(load_tokenizer)
    return lambda path, **options: load(str(Path(path).resolve()), **options)


@pytest.fixture
def checkout(
    tmp_path: Path,
    tiny_model: Path,
    load_tokenizer_once: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """A folder with the checkout's names in it; the working directory."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "smollm2-135m-instruct").symlink_to(tiny_model)
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    (tmp_path / "data").mkdir()
    for path in prepare_data().glob("*.parquet"):
        pq.write_table(pq.read_table(path).slice(0, ROWS), tmp_path / "data" / path.name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(front, "load_tokenizer", load_tokenizer_once)
    # The native kernels would be built for this model's shapes.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_of_the_page_runs(page: Path, checkout: Path) -> None:
    for fence in fences(page.read_text("utf-8")):
        where = f"{page.name}, line {fence.line}"
        if fence.language == "bash":
            for command in commands(fence):
                _run(command, checkout, where)
        elif fence.language == "sql":
            assert duckdb.sql(fence.text).fetchall(), where
        elif fence.language == "python":
            exec(compile(fence.text, where, "exec"), {"__name__": "docs"})


def test_the_output_reference_names_every_figure_of_a_run_and_no_other(checkout: Path) -> None:
    assert app.main(["job=sentiment", "input.limit=4"]) == 0
    out = checkout / "out" / "sentiment"
    summary = json.loads((out / "_summary.json").read_text())
    # Only where labels were calibrated.
    assert names("`_summary.json`") - {"score_calibration"} == set(summary)
    sample = json.loads((out / "_metrics.jsonl").read_text().splitlines()[0])
    assert names("`_metrics.jsonl`") == set(sample)


def names(title: str) -> set[str]:
    """Names in code marks in the first cells of the table below a title of docs/output.md."""
    page = (ROOT / "docs" / "output.md").read_text("utf-8")
    table = page.partition(f"## {title}\n")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


def test_nothing_that_looks_like_a_command_stands_outside_a_block_that_is_run() -> None:
    for page in PAGES:
        for fence in fences(page.read_text("utf-8")):
            if fence.language != "bash":
                starts = ("python -m batchgen", "python scripts/", "bash scripts/", "pip ")
                lines = [line for line in fence.text.splitlines() if line.startswith(starts)]
                assert not lines, f"{page.name}, line {fence.line}"


def test_what_is_left_out_is_there() -> None:
    every = [
        command
        for page in PAGES
        for fence in fences(page.read_text("utf-8"))
        if fence.language == "bash"
        for command in commands(fence)
    ]
    for start in LEFT_OUT:
        assert any(command.startswith(start) for command in every), start
    assert len([each for each in every if each.startswith("python -m batchgen")]) > 20


def commands(fence: Fence) -> Iterator[str]:
    """Give the commands of a block: lines, joined where they are continued or quote a text."""
    lines = iter(fence.text.splitlines())
    for line in lines:
        command = line
        while command.endswith("\\"):
            command = command[:-1] + next(lines).strip()
        if "<<" in command:
            end = command.rpartition("<<")[2].strip().strip("'\"")
            for inner in lines:
                command += f"\n{inner}"
                if inner == end:
                    break
        if command.strip() and not command.startswith("#"):
            yield command


def _run(command: str, folder: Path, where: str) -> None:
    if any(command.startswith(start) for start in LEFT_OUT):
        return
    words = shlex.split(command, comments=True)
    if words[:3] == ["python", "-m", "batchgen"]:
        assert app.main(words[3:]) == 0, f"{where}: {command}"
    elif words[0] == "python" and words[1].startswith("scripts/"):
        _run_script(words[1:])
    else:
        done = subprocess.run(
            ["bash", "-e", "-c", command], cwd=folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{where}: {command}\n{done.stderr}"


def _run_script(words: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", words)
        try:
            runpy.run_path(words[0], run_name="__main__")
        except SystemExit as stop:
            assert not stop.code, shlex.join(words)
