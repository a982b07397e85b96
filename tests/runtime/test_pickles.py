"""Weights come from safetensors; a pickle is loaded only where the user says so."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from batchgen.errors import UsageError
from batchgen.runtime.model import ModelSource, load_config, load_model
from tests.support.tiny_models import save


class Bomb:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (str(self.path),)


def load(folder: Path, *, allow_pickle: bool) -> torch.nn.Module:
    source = ModelSource(str(folder), allow_pickle=allow_pickle)
    cpu = torch.device("cpu")
    return load_model(source, dtype="float32", device=cpu, max_model_len=None).model


@pytest.fixture
def pickled(tmp_path: Path) -> Path:
    """A checkpoint whose weights are a pickle."""
    save("llama", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(weights, tmp_path / "pytorch_model.bin")
    return tmp_path


def test_a_pickle_is_refused_before_anything_is_loaded(pickled: Path) -> None:
    for look in (
        lambda: load_config(ModelSource(str(pickled))),
        lambda: load(pickled, allow_pickle=False),
    ):
        with pytest.raises(UsageError, match=r"pytorch_model\.bin.*model\.allow_pickle=true"):
            look()


def test_a_pickle_is_loaded_where_that_is_asked_for(pickled: Path) -> None:
    weights = torch.load(pickled / "pytorch_model.bin", weights_only=True)
    model = load(pickled, allow_pickle=True)
    embedding = model.get_input_embeddings().weight
    assert torch.equal(embedding.data, weights["model.embed_tokens.weight"])


def test_safetensors_beside_a_pickle_are_taken(tmp_path: Path) -> None:
    save("llama", tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"no pickle at all")
    load(tmp_path, allow_pickle=False)


def test_not_even_an_allowed_pickle_runs_code(pickled: Path) -> None:
    mark = pickled / "it ran"
    torch.save({"model.embed_tokens.weight": Bomb(mark)}, pickled / "pytorch_model.bin")
    with pytest.raises(UsageError):
        load(pickled, allow_pickle=True)
    assert not mark.exists()
