"""The deliberately messy set: its frames differ in spelling only, and the figures say so."""

import json
import unicodedata
from pathlib import Path
from typing import Any

import messy_prompts
import pytest


def letters(text: str) -> str:
    return "".join(unicodedata.normalize("NFC", text).split())


def test_frames_are_messy_in_spelling_and_order_and_nothing_else() -> None:
    rows = messy_prompts.messy_rows([f"sentence {n}" for n in range(50)])
    frames = {row["frame"] for row in rows}
    assert len(frames) > 10
    assert {letters(frame) for frame in frames} == {letters(messy_prompts.FRAME)}
    orders = {tuple(letters(shot["text"]) for shot in row["shots"]) for row in rows}
    assert len(orders) > 10
    assert len({tuple(sorted(order)) for order in orders}) == 1
    assert [row["text"] for row in rows] == [f"sentence {n}" for n in range(50)]


def test_hits_grow_with_normalisation_and_again_with_the_advice(
    smollm2_dir: Path, review_rows: list[dict[str, Any]], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(messy_prompts, "MODEL", smollm2_dir)
    messy_prompts.main(["--rows", "40", "--out", str(tmp_path)])
    plans = [
        json.loads((tmp_path / name / "_plan.json").read_text())
        for name in ("as-it-comes", "normalised", "advised")
    ]
    shares = [1 - plan["prefill_tokens_floor"] / plan["request_tokens"] for plan in plans]
    assert shares[0] < 0.1
    assert shares[2] > 0.7
    # What stands in front of all hides what normalisation has aligned; the plan says which.
    assert plans[1]["advice"]["columns"] == ["now"]
    assert plans[1]["normalized"]["shots_order"]["rows"] > 30
    assert set(plans[1]["normalized"]) >= {"line_ends", "trailing_space"}
    assert "advised" in capsys.readouterr().out
