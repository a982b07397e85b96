"""With engine.deterministic no bit of a result depends on the rest of the batch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpu_check_parts.batches import Batch
from triton.runtime.interpreter import InterpreterBuilder

from batchgen.kernels.reference import AttentionOptions
from batchgen.kernels.triton.batch import KVScales, PagedRows, SharedSegments
from batchgen.kernels.triton.prefix_attention import fixed_order_attention
from batchgen.kernels.triton.tiles import AttentionTile
from batchgen.runtime import triton_attention
from batchgen.runtime.backends import AttentionName
from batchgen.runtime.model import LoadedModel, ModelSource, load_model
from batchgen.runtime.shared_prefixes import SharedPrefix
from batchgen.sampling import SamplingParams
from tests.support.drive import make_attention, make_engine, make_requests, make_scheduler
from tests.support.fast_interpreter import product_row_by_row
from tests.support.logits_recorder import LogitsRecorder
from tests.support.paged_batch import draw_batch, in_fp8
from tests.support.tiny_models import save

TILE = AttentionTile(16, 16, 4, 1)
SHARED = 32


@pytest.fixture(autouse=True)
def _products_like_a_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InterpreterBuilder, "create_dot", product_row_by_row)


def _attend(
    batch: Batch,
    options: AttentionOptions,
    segments: SharedSegments | None,
    scales: KVScales | None = None,
    **rows: Any,
) -> torch.Tensor:
    paged = PagedRows(batch.query_starts, batch.context_lens, batch.max_query_len, **rows)
    return fixed_order_attention(
        batch.query, batch.key_cache, batch.value_cache, batch.block_tables, paged, segments,
        options, TILE, scales=scales,
    )  # fmt: skip


def _options(kind: str) -> AttentionOptions:
    sinks = torch.tensor([-1.0, 0.0, 0.5, 2.0]) if kind == "sinks" else None
    return AttentionOptions(
        0.25, window=11 if kind == "window" else None, softcap=2.0 if kind == "cap" else None,
        sinks=sinks,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["plain", "cap", "sinks", "window"])
def test_a_query_has_the_same_bits_alone_in_a_chunk_and_in_any_batch(kind: str) -> None:
    rows = [(40, 9), (5, 5), (33, 1), (61, 4)]
    batch = draw_batch(1, rows, padding=3)
    options = _options(kind)
    whole = _attend(batch, options, None)
    expected = batch.expected(options)
    torch.testing.assert_close(whole.double(), expected, atol=1e-5, rtol=1e-5)
    for row, (context, n) in enumerate(rows):
        start = int(batch.query_starts[row])
        # Its first queries in a chunk that ends earlier, and each of its last ones alone.
        cuts = {(0, n - n // 2), (n - 1, n), (n // 2, n)}
        for first, end in cuts:
            alone = fixed_order_attention(
                batch.query[start + first : start + end], batch.key_cache, batch.value_cache,
                batch.block_tables[row : row + 1],
                PagedRows(
                    torch.tensor([0, end - first]), torch.tensor([context - n + end]), end - first
                ),
                None, options, TILE,
            )  # fmt: skip
            assert torch.equal(alone, whole[start + first : start + end]), (row, first, end)


@pytest.mark.parametrize("kind", ["plain", "cap", "sinks", "fp8"])
def test_sharing_a_prefix_changes_no_bit(kind: str) -> None:
    rows = [(SHARED + 3, 1), (SHARED + 9, 5), (SHARED + 1, 1), (SHARED + 20, 2)]
    batch, scales = draw_batch(2, rows, shared=SHARED), None
    if kind == "fp8":
        batch, scales = in_fp8(batch, 0.5, 0.0625)
    options = _options(kind)
    # The first three rows share; the last goes over the same blocks by itself.
    num_shared = int(batch.query_starts[3])
    places = torch.full((len(batch.query), 1), -1)
    places[:num_shared, 0] = torch.arange(num_shared)
    segments = SharedSegments(
        place_starts=torch.tensor([0, num_shared]), first_tokens=torch.tensor([0]),
        table_rows=torch.tensor([1]), key_starts=torch.tensor([0]),
        key_ends=torch.tensor([SHARED]), token_places=places, num_places=num_shared + 2,
        max_query_len=num_shared,
    )  # fmt: skip
    starts = torch.tensor([SHARED, SHARED, SHARED, 0])
    shared = _attend(batch, options, segments, scales, key_starts=starts)
    assert torch.equal(shared, _attend(batch, options, None, scales))
    torch.testing.assert_close(shared.double(), batch.expected(options), atol=1e-5, rtol=1e-5)


SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {
        "block_size": 16, "budget": 90, "max_num_seqs": 1, "prefix_caching": False,
        "sharing": SharedPrefix.OFF,
    },
)  # fmt: skip


def _logits(
    loaded: LoadedModel,
    prompts: list[list[int]],
    *,
    block_size: int = 4,
    sharing: SharedPrefix = SharedPrefix.ON,
    **given: Any,
) -> dict[tuple[int, ...], torch.Tensor]:
    scheduler = make_scheduler(300 // block_size, block_size, **({"budget": 40} | given))
    attention = make_attention(loaded, AttentionName.TRITON, sharing=sharing, deterministic=True)
    engine = make_engine(loaded, scheduler, attention)
    engine._executor = recorder = LogitsRecorder(engine)
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    for _ in engine.run(make_requests(prompts, params)):
        pass
    return {tuple(tokens): logits for tokens, logits in recorder.records}


def test_logits_are_equal_to_the_bit_in_any_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The interpreter's tiles have 32 keys: a short prefix is enough to share.
    monkeypatch.setattr(triton_attention, "MOST_KEYS", 32)
    loaded = load_model(
        ModelSource(str(save("llama", tmp_path, num_layers=1))),
        dtype="float32",
        device=torch.device("cpu"),
        max_model_len=None,
    )
    rng = np.random.default_rng(0)
    prefix = rng.integers(3, 199, 33).tolist()
    prompts = [prefix + rng.integers(3, 199, n).tolist() for n in (3, 6)]
    runs = [_logits(loaded, prompts, **setting) for setting in SETTINGS]
    assert len(runs[0]) == 4
    for run in runs[1:]:
        assert run.keys() == runs[0].keys()
        assert all(torch.equal(run[tokens], runs[0][tokens]) for tokens in run)
