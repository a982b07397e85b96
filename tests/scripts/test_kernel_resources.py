"""The table of what compiled kernels take, and its place in the docs."""

from pathlib import Path

import kernel_resources as kr
import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs" / "kernels.md"


def _row(name: str, capability: int, spilled: int = 0) -> kr.Resources:
    return kr.Resources(name, capability, "64 x 32", 8, 3, 200, 4096, spilled)


def test_targets_stand_side_by_side_and_spills_stand_out() -> None:
    rows = [_row("a", 80), _row("a", 90, spilled=12), _row("b", 90)]
    header, _, first, second = kr.table(rows).splitlines()
    assert header == "| kernel | sm_80 | sm_90 |"
    fine = "64 x 32, 8 warps, 200 registers, 4 KiB"
    assert first == f"| a | {fine} | {fine}, **12 bytes spilled** |"
    assert second == f"| b |  | {fine} |"


def test_only_what_stands_between_the_markers_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{kr._BEGIN}old\n{kr._END}\nafter\n")
    for content in ("| new |\n", "| newer |\n"):
        kr.write(page, content)
        assert page.read_text() == f"before\n{kr._BEGIN}{content}{kr._END}\nafter\n"
    page.write_text("nothing\n")
    with pytest.raises(AssertionError, match="no place for the table"):
        kr.write(page, "| new |\n")


def test_the_docs_have_a_line_for_every_main_variant_with_the_tile_of_today() -> None:
    lines = DOCS.read_text(encoding="utf-8").splitlines()
    shown = {line.split("|")[1].strip(): line for line in lines if line.startswith("| ")}
    for variant in kr.variants(only=kr.SHOWN):
        cell = shown[variant.name].split("|")[2 + kr.CAPABILITIES.index(variant.capability)]
        given = variant.launch.arguments
        if "tile_rows" in given:
            tile = f"{given['tile_rows']} x {given['tile_keys']}, {variant.launch.warps} warps, "
            assert cell.strip().startswith(tile), variant.name
        assert "registers" in cell
