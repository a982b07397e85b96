"""OpenVINO GenAI on a CPU, with prefix caching, at the precision of the request.

In an environment of its own with Python 3.11:

    pip install openvino-genai==2026.4.1.0 torch==2.13.0 optimum-intel
    pip uninstall torchvision                           # built for another torch

The model is exported once, beside its directory. It finds no prefix among rows that are handed
over in one call, so by default 16 rows are; `one_call` hands over all, and `primed`, as one who
knows would, one row alone and then all others.
"""

import importlib.metadata
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peer_files import Answer, Request, Run, serve

ROWS_A_CALL = 16
ROWS_AT_ONCE = 64
KV_GIB = 4
WEIGHTS = {"float32": "fp32", "float16": "fp16"}
PRECISIONS = {"float32": "f32", "float16": "f16"}


def prepare(request: Request) -> Run:
    """Export the model; the rows then run call by call.

    A pipeline keeps its cache as long as it lives, so that each run makes one of its own,
    which is not timed.
    """
    if request.device != "cpu" or request.dtype not in PRECISIONS:
        sys.exit("this peer runs on a CPU, with model.dtype=float32 or float16")
    directory = _exported(request)
    return lambda: _run(request, directory)


def _run(request: Request, directory: Path) -> Answer:
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    pipeline = _pipeline(request, directory)
    tokenizer = pipeline.get_tokenizer()

    def generate(rows: list[list[int]], counts: list[int]) -> list[list[int]]:
        prompts = [ov.Tensor(np.array([ids], np.int64)) for ids in rows]
        configs = []
        for count in counts:
            config = genai.GenerationConfig()
            config.max_new_tokens, config.ignore_eos, config.do_sample = count, True, False
            configs.append(config)
        results = pipeline.generate(prompts, configs)
        outputs = [list(result.m_generation_ids[0]) for result in results]
        tokenizer.decode(outputs)
        return outputs

    # Backwards, as it keeps what it has computed, and no row must find its prefix there.
    generate([request.prompts[0][::-1]], [2])
    started = time.perf_counter()
    outputs = [
        ids
        for rows in _calls(request)
        for ids in generate(request.prompts[rows], request.max_tokens[rows])
    ]
    seconds = time.perf_counter() - started
    version = importlib.metadata.version("openvino-genai")
    return Answer(outputs, seconds, f"openvino-genai {version}")


def _pipeline(request: Request, directory: Path) -> Any:
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = True
    scheduler.cache_size = KV_GIB
    scheduler.max_num_seqs = ROWS_AT_ONCE
    precision = PRECISIONS[request.dtype]
    properties = {
        "INFERENCE_NUM_THREADS": request.threads,
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,
    }
    return genai.ContinuousBatchingPipeline(str(directory), scheduler, "CPU", properties)


def _calls(request: Request) -> Iterator[slice]:
    """Return which rows are handed over together."""
    count = len(request.prompts)
    if request.variant == "one_call":
        yield slice(0, count)
    elif request.variant == "primed":
        yield slice(0, 1)
        if count > 1:
            yield slice(1, count)
    else:
        for start in range(0, count, ROWS_A_CALL):
            yield slice(start, min(start + ROWS_A_CALL, count))


def _exported(request: Request) -> Path:
    """Return the exported model's directory, made by optimum-cli where it is missing."""
    source, weights = Path(request.model), WEIGHTS[request.dtype]
    target = source.with_name(f"{source.name}-openvino-{weights}")
    if not target.is_dir():
        unfinished = target.with_name(f".{target.name}")
        command = [
            *(str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino"),
            *("-m", str(source), "--task", "text-generation-with-past"),
            *("--weight-format", weights, str(unfinished)),
        ]
        subprocess.run(command, check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})
        unfinished.rename(target)
    return target


if __name__ == "__main__":
    serve(prepare, variants=("one_call", "primed"))
