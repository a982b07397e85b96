"""The sweep over shared prefixes: both layouts it times give the same attention."""

import sys

import pytest
import sweep_shared_prefix as sweep
import torch

from batchgen.kernels.cascade import cascade_attention
from batchgen.runtime.shared_prefixes import SharedPrefix, cascade_layout


def test_on_has_a_segment_off_has_none_and_both_give_the_same() -> None:
    plan = sweep.decode_step(rows=3, shared=32, own=20)
    torch.manual_seed(0)
    query, pool = torch.randn(3, 9, 64), torch.randn(2 + 3 * 2, 16, 3, 64)
    outs = {}
    for mode in (SharedPrefix.ON, SharedPrefix.OFF):
        layout = cascade_layout(plan, sweep.BLOCK_SIZE, torch.from_numpy, mode)
        assert len(layout.segments) == (mode is SharedPrefix.ON)
        outs[mode] = cascade_attention(query, pool, pool, layout, scale=0.125)
    torch.testing.assert_close(*outs.values())


def test_break_even_is_the_least_product_behind_the_last_loss() -> None:
    assert sweep.break_even({32: [0.5], 64: [1.2, 0.9], 128: [1.1], 256: [2.0]}) == 128
    assert sweep.break_even({32: [1.5], 64: [1.2]}) == 32
    assert sweep.break_even({32: [0.5]}) is None


def test_the_table_has_a_line_for_each_number_of_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sweep, "ROWS", (2, 3))
    monkeypatch.setattr(sweep, "SHARED", (16, 32))
    monkeypatch.setattr(sys, "argv", ["sweep_shared_prefix.py", "--own-tokens", "5"])
    sweep.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:4]] == ["2", "3"]
    assert lines[4].startswith("sharing pays from ")
