"""``engine.cuda_graphs`` in the whole command."""

import pytest

from batchgen.job import load
from batchgen.runtime import model as model_module
from tests.job.harness import Job
from tests.support.model_device import ModelDevice, Temper
from tests.support.tensor_attention import TensorAttention

ROWS = [{"id": n, "prompt": f"A review of the movie number {n}: good acting."} for n in range(6)]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> ModelDevice:
    """A device with graphs, and attention that they can hold."""
    device = ModelDevice(Temper.LATE)
    monkeypatch.setattr(load, "device_of", lambda torch_device: device)
    monkeypatch.setattr(load, "choose_attention", lambda *_, **__: TensorAttention())
    monkeypatch.setattr(model_module, "can_fuse", lambda device, dtype: False)
    return device


def _run(job: Job, *arguments: str) -> list[str]:
    job.write(ROWS)
    keys = ("engine.max_num_seqs=4", "sampling.max_tokens=40", "sampling.ignore_eos=true")
    assert job(*keys, "output.overwrite=true", *arguments) == 0
    return [row["generated_text"] for row in job.rows()]


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_a_job_runs_its_decode_steps_as_graphs_and_counts_them(
    job: Job, device: ModelDevice, overlap: str
) -> None:
    expected = _run(job, "engine.cuda_graphs='off'")
    assert job.summary["graph_steps"] == device.replays == 0
    assert _run(job, "engine.cuda_graphs='on'", f"engine.overlap='{overlap}'") == expected
    summary = job.summary
    assert summary["graph_steps"] == device.replays > 20
    assert summary["graph_steps"] + summary["eager_steps"] == summary["steps"]


def test_graphs_are_refused_where_there_can_be_none(
    job: Job,
    device: ModelDevice,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job.write(ROWS)
    monkeypatch.setattr(TensorAttention, "over", None)
    monkeypatch.delattr(TensorAttention, "over")
    assert job("engine.cuda_graphs='on'") == 2
    assert "engine.attention=triton" in capsys.readouterr().err
    monkeypatch.undo()
    assert job("engine.cuda_graphs='on'") == 2
    said = capsys.readouterr().err
    assert "engine.cuda_graphs=on: a cpu has none; set engine.cuda_graphs=auto" in said
    assert job("engine.cuda_graphs=auto") == 0
    assert job.summary["graph_steps"] == 0
