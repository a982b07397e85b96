import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.job.harness import Job
from tests.support import tiny_models, tiny_tokenizers
from tests.support.command_server import CommandServer
from tests.support.killed_job import make_model


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return tiny_tokenizers.make()


@pytest.fixture(scope="session")
def base_tokenizer() -> Any:
    """The same without a chat template."""
    return tiny_tokenizers.make(chat=False)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """A random llama with the tokenizer's vocabulary, and the tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    config = tiny_models.FAMILIES["llama"]()
    config.vocab_size = len(tokenizer)
    config.bos_token_id = tokenizer.bos_token_id
    config.eos_token_id = tokenizer.eos_token_id
    tiny_models.build(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def job(tmp_path: Path, model_dir: Path) -> Job:
    return Job(tmp_path, model_dir)


@pytest.fixture
def copied_model(job: Job, tmp_path: Path) -> Path:
    """A copy of the model that the test may change; the job uses it."""
    folder = tmp_path / "model"
    shutil.copytree(job.given["model.path"], folder)
    job.given["model.path"] = str(folder)
    return folder


@pytest.fixture(scope="session")
def torture_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smallest model with text."""
    return make_model(tmp_path_factory.mktemp("torture"))


@pytest.fixture(scope="session")
def command_server(torture_model: Path) -> Iterator[CommandServer]:
    """Starts runs with that model to be killed by the hundred."""
    with CommandServer(torture_model, "tests.support.s3_times:quick") as command_server:
        yield command_server


@pytest.fixture(scope="session", autouse=True)
def children_are_forked(fork_server: None) -> None:
    """The commands in processes of their own."""


@pytest.fixture(scope="session")
def generate(model_dir: Path) -> Callable[..., list[int]]:
    """Greedy tokens after a prompt, by transformers' own ``generate``."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()

    def tokens(prompt: list[int], max_new_tokens: int = 8, **options: Any) -> list[int]:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=max_new_tokens,
                pad_token_id=0,
                **options,
            )
        return out[0, len(prompt) :].tolist()

    return tokens
