"""The memory comparison obeys arithmetic, and its contiguous memory behaves as memory did."""

import json

import compare_memory
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from memory_machines import ModelMachine, SimulatedMachine
from memory_managers import ContiguousSlots
from memory_rows import Row, Shape, make_rows, random_stream
from memory_runs import VARIANTS, Figures, Limits, compare, run_variant

from batchgen.errors import UsageError
from batchgen.runtime.model import ModelSource, load_model
from tests.support.tiny_models import save

STEP_S, TOKEN_S = 0.5, 0.001


def _rows(*lengths: tuple[int, int], shared: int = 0) -> list[Row]:
    """Rows of (prompt, output) tokens with random ids, the first ones alike in all of them."""
    rng = np.random.default_rng(0)
    prefix = rng.integers(0, 199, shared)
    endings = [rng.integers(0, 199, prompt - shared) for prompt, _ in lengths]
    return [
        Row(np.concatenate((prefix, ending)).astype(np.int32), output)
        for ending, (_, output) in zip(endings, lengths, strict=True)
    ]


def _limits(num_blocks: int, block_size: int, max_tokens: int, longest: int = 0) -> Limits:
    return Limits(block_size, num_blocks, 64, 256, max_tokens, longest)


def _run(variant: str, rows: list[Row], limits: Limits) -> Figures:
    machine = SimulatedMachine(step_s=STEP_S, token_s=TOKEN_S)
    return run_variant(variant, rows, limits, machine, 0)[0]


# -- contiguous memory


class _Cells:
    """First fit, slot by slot."""

    def __init__(self, capacity: int) -> None:
        self.taken = [False] * capacity

    def runs(self) -> list[int]:
        text = "".join("x" if taken else "." for taken in self.taken)
        return [len(run) for run in text.split("x")]

    def allocate(self, size: int) -> int | None:
        for start in range(len(self.taken) - size + 1):
            if not any(self.taken[start : start + size]):
                self.taken[start : start + size] = [True] * size
                return start
        return None

    def release(self, start: int, size: int) -> None:
        assert all(self.taken[start : start + size])
        self.taken[start : start + size] = [False] * size


@given(st.data(), st.integers(1, 40))
def test_first_fit_gives_the_runs_that_a_search_slot_by_slot_finds(data, capacity):
    slots, cells, runs = ContiguousSlots(capacity), _Cells(capacity), []
    for _ in range(data.draw(st.integers(0, 40))):
        if runs and data.draw(st.booleans()):
            run = runs.pop(data.draw(st.integers(0, len(runs) - 1)))
            slots.release(*run)
            cells.release(*run)
        else:
            size = data.draw(st.integers(1, 12))
            start = slots.allocate(size)
            assert start == cells.allocate(size)
            runs += [(start, size)] if start is not None else []
        assert slots.num_free == cells.taken.count(False)
        assert slots.largest_hole == max(cells.runs())


def test_a_row_is_refused_while_free_memory_is_in_pieces():
    # 24 slots hold three runs of 8. The first and the last are back after two steps; the
    # row of 16 has to wait for the one between them, which takes six.
    rows = _rows((6, 2), (2, 6), (6, 2), (12, 4))
    fit = _run("contiguous_fit", rows, _limits(6, 4, max_tokens=6))
    assert (fit.refusals, fit.refused_rows) == (4, 1)
    assert (fit.free_at_refusal, fit.hole_at_refusal) == (16, 8)
    assert fit.peak_rows == 3
    assert fit.steps == 6 + 4
    paged = _run("paged", rows, _limits(6, 4, max_tokens=6))
    assert paged.refusals == 0
    assert paged.steps < fit.steps


def test_preallocation_runs_as_many_rows_as_the_longest_fits():
    rows = _rows(*[(5, 3)] * 9)
    assert _run("contiguous_max", rows, _limits(10, 4, 3, longest=13)).peak_rows == 40 // 13
    assert _run("contiguous_fit", rows, _limits(10, 4, 3, longest=13)).peak_rows == 40 // 8
    assert _run("paged", rows, _limits(10, 4, 3)).peak_rows == 10 // 2


# -- what is counted


def test_unused_slots_are_those_counted_by_hand():
    # 5 tokens of prompt, then 6 and 7 are in memory: two blocks of 4 leave 3, 2 and 1.
    rows = _rows((5, 3))
    limits = _limits(10, 4, 3, longest=10)
    assert _run("paged", rows, limits).unused_share == (3 + 2 + 1) / (3 * 8)
    assert _run("contiguous_fit", rows, limits).unused_share == (3 + 2 + 1) / (3 * 8)
    assert _run("contiguous_max", rows, limits).unused_share == (5 + 4 + 3) / (3 * 10)


def test_simulated_time_is_the_sum_of_steps_and_tokens():
    figures = _run("paged", _rows((5, 3)), _limits(10, 4, 3))
    assert figures.seconds == pytest.approx(3 * STEP_S + 7 * TOKEN_S)
    assert figures.ttft_p50_ms == pytest.approx(1000 * (STEP_S + 5 * TOKEN_S))
    assert figures.output_tokens_per_s == pytest.approx(3 / figures.seconds)
    assert figures.peak_kv_bytes == 8 * SimulatedMachine().bytes_per_token


def test_blocks_are_shared_whole_or_by_the_token():
    rows, limits = _rows((17, 2), (17, 2), shared=14), _limits(10, 8, 2)
    assert _run("paged", rows, limits).prefill_tokens == 17 + 17
    assert _run("paged_prefix", rows, limits).prefill_tokens == 17 + 9
    assert _run("ours", rows, limits).prefill_tokens == 17 + 3


def test_a_budget_below_the_longest_row_is_refused():
    with pytest.raises(UsageError, match="33 tokens"):
        compare(_rows((30, 1)), _limits(8, 4, 3), SimulatedMachine())


def test_rows_are_cut_from_the_text_and_share_their_group_s_prefix():
    shape = Shape(12, 3, prompt_tokens=20, shared_tokens=8, output_tokens=6, spread=0.5)
    rows = make_rows(shape, np.arange(1000, dtype=np.int32))
    prefixes = {tuple(row.prompt[:8].tolist()) for row in rows}
    assert len(prefixes) == 3
    endings = [token for row in rows for token in row.prompt[8:].tolist()]
    assert len(set(endings)) == len(endings)
    assert {8 + 6 <= len(row.prompt) <= 8 + 18 for row in rows} == {True}
    assert {3 <= row.output_tokens <= 6 for row in rows} == {True}
    with pytest.raises(UsageError, match="tokens of text"):
        make_rows(shape, np.arange(100, dtype=np.int32))


# -- the whole comparison


def test_large_shapes_run_as_many_rows_as_the_arithmetic_says(tmp_path, capsys):
    # 4,096 tokens take 256 blocks; 205 of them are the shared 80%, held once.
    arguments = ["--no-model", "--rows=80", "--prompt-tokens=4064", "--output-tokens=32"]
    assert compare_memory.main([*arguments, f"--out={tmp_path}"]) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    peaks = {(each["shared_tokens"], each["variant"]): each["peak_rows"] for each in figures}
    assert {peaks[0, variant] for variant in VARIANTS} == {4096 // 256} == {16}
    assert peaks[3280, "paged"] == peaks[3280, "contiguous_max"] == 16
    assert peaks[3280, "paged_prefix"] == peaks[3280, "ours"] == (4096 - 205) // (256 - 205) == 76
    assert pq.read_table(tmp_path / "figures.parquet").to_pylist() == figures
    assert (tmp_path / "figures.png").read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert "simulated: a step takes 8 ms and 80 us a token" in said
    for title in VARIANTS.values():
        assert said.count(f"\n{title} ") == 2


def test_with_a_model_all_make_the_same_tokens_and_ours_computes_each_prefix_once(tmp_path, capsys):
    model = save("llama", tmp_path / "model")
    sizes = ["--rows=16", "--groups=2", "--prompt-tokens=40", "--shared-tokens=30"]
    more = ["--output-tokens=6", "--num-blocks=32", "--block-size=8", f"--out={tmp_path / 'out'}"]
    assert compare_memory.main([*sizes, *more, f"model.path={model}"]) == 0
    figures = {
        each["variant"]: each
        for each in json.loads((tmp_path / "out" / "figures.json").read_text())
    }
    assert {each["equal_outputs"] for each in figures.values()} == {16}
    assert not any(each["simulated"] for each in figures.values())
    assert "the same tokens in all" in capsys.readouterr().out
    shape = Shape(16, 2, 40, 30, 6, 0.5)
    rows = make_rows(shape, random_stream(shape, 199))
    seen = {tuple(row.prompt[:end].tolist()) for row in rows for end in range(1, 99)}
    whole = sum(len(row.prompt) for row in rows)
    # Rows of a group differ from their second token on, where one of them begins alike.
    assert len(seen) <= figures["ours"]["prefill_tokens"] < len(seen) + 16
    assert figures["ours"]["prefill_tokens"] < figures["paged_prefix"]["prefill_tokens"]
    for variant in ("contiguous_max", "contiguous_fit", "paged"):
        assert figures[variant]["prefill_tokens"] == whole
    longest = max(len(row.prompt) for row in rows) + 6
    assert figures["contiguous_max"]["peak_rows"] == 32 * 8 // longest
    peaks = [figures[variant]["peak_rows"] for variant in ("contiguous_max", "paged", "ours")]
    assert peaks == sorted(peaks)
    assert peaks[0] < peaks[2]
    loaded = load_model(
        ModelSource(str(model)), dtype="float32", device=torch.device("cpu"), max_model_len=None
    )
    per_token = ModelMachine(loaded).bytes_per_token
    assert all(each["peak_kv_bytes"] <= 256 * per_token for each in figures.values())


def test_only_the_model_s_path_is_taken_as_a_key(capsys):
    with pytest.raises(SystemExit):
        compare_memory.main(["pool.block_size=8"])
    assert "only model.path=DIR" in capsys.readouterr().err
