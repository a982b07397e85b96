"""The drawing shows what the scheduler held at that step, and only that."""

import re
from collections import Counter
from xml.etree import ElementTree

import pytest
from draw_step import Snapshot, Table, Trace, TreeLine, choose, draw, run_trace

from tests.support.killed_job import make_model


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    model = make_model(tmp_path_factory.mktemp("model"))
    # A token a byte: longer prompts than with the demo's model.
    keys = [f"model.path={model}", "pool.num_blocks=90", "engine.attention=torch"]
    return run_trace([*keys, "engine.max_num_batched_tokens=400", "input.limit=8"])


def test_every_block_of_every_step_is_free_cached_or_counted_once_for_each_table(
    trace: Trace,
) -> None:
    assert len(trace.shots) > 10
    for shot in trace.shots:
        owners = Counter(block for table in shot.tables for block in table.blocks)
        assert shot.ref_counts == [owners[block] for block in range(90)]
        assert sorted([*owners, *shot.free, *shot.cached]) == list(range(90))
        assert {line.block for line in shot.tree} >= set(shot.cached)


def test_the_step_drawn_by_itself_has_rows_and_blocks_of_every_kind(trace: Trace) -> None:
    shown = choose(trace.shots, None)
    assert shown.shows_everything
    assert shown.waiting + shown.ended + len(shown.tables) == 8


def test_a_step_that_was_none_is_refused(trace: Trace) -> None:
    assert choose(trace.shots, 3).step == 3
    for step in (0, len(trace.shots) + 1):
        with pytest.raises(SystemExit, match="the run has the steps 1 to"):
            choose(trace.shots, step)


def test_the_drawing_is_well_formed_and_names_rows_blocks_and_lists(trace: Trace) -> None:
    shown = choose(trace.shots, None)
    svg = draw(trace.shots, shown, trace.block_size)
    root = ElementTree.fromstring(svg)
    texts = ["".join(each.itertext()) for each in root.iter() if each.tag.endswith("}text")]
    for table in shown.tables:
        assert any(text.startswith(f"{table.name}: {table.prompt_tokens} + ") for text in texts)
    listed = next(text for text in texts if text.startswith("Free list"))
    assert [int(n) for n in re.findall(r"\d+", listed)] == shown.free[:14]
    assert f"step {shown.step}" in texts
    boxes = [each for each in root.iter() if each.get("class") == "shared" and each.get("rx")]
    drawn = [block for table in shown.tables for block in table.blocks]
    drawn += [*range(len(shown.ref_counts)), *(line.block for line in shown.tree)]
    assert len(boxes) == sum(shown.ref_counts[block] > 1 for block in drawn)


def test_text_of_rows_is_escaped() -> None:
    table, line = Table("id <b>", [0], 3, 3), TreeLine(0, 0, "<script> & more")
    shot = Snapshot(1, [table], 0, 0, [1], [], [], [line])
    svg = draw([shot], shot, 8)
    assert "&lt;script&gt; &amp; more" in svg
    ElementTree.fromstring(svg)
