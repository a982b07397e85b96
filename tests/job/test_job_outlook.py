"""``mode=plan`` as a whole: its text, its file and its picture say the same."""

import re
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.job.harness import Job

HEAD = "The quick brown fox jumps over the lazy dog. " * 3
WORDS = ["yes", "no", "end", "story", "movie"]
ROWS: list[dict[str, Any]] = [
    {"id": f"r{n}", "text": f"{WORDS[n % 5]} <{n % 30}> & 'more'"} for n in range(40)
] + [{"id": "none", "text": None}, {"id": "long", "text": "fox " * 2000}]
TEMPLATE = f'prompt.template="{HEAD}{{{{ text }}}}"'


@pytest.fixture
def told(job: Job, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str, str]:
    """``_plan.json``, what was printed, and the picture."""
    job.write(ROWS)
    keys = ["prompt.format=plain", "model.max_model_len=500", "pool.block_size=7"]
    assert job("mode=plan", TEMPLATE, *keys) == 0
    said = capsys.readouterr().out
    return job.json("_plan.json"), said, (job.out / "_plan.svg").read_text()


def test_the_plan_says_which_rows_fail_and_which_repeat(told: tuple[Any, str, str]) -> None:
    plan, said, picture = told
    failing = {each["error_type"]: each for each in plan["failing"]}
    assert set(failing) == {"template_error", "prompt_too_long"}
    assert failing["template_error"]["examples"][0]["id"] == "none"
    assert "1 prompt_too_long (rows 41)" in said
    assert "1 prompt_too_long (rows 41)" in picture
    assert plan["duplicates"] == 10
    assert plan["repeated"][0]["copies"] == 1
    assert plan["repeated"][0]["text"].startswith("The quick brown fox")


def test_groups_show_their_text_and_what_ends_them_on_a_blocks_edge(
    told: tuple[Any, str, str],
) -> None:
    plan, said, _ = told
    group = plan["groups"][0]
    assert group["rows"] == 30
    assert group["text"].startswith("The quick brown fox jumps over the lazy dog.")
    assert group["text"] in said
    fix = group["remedy"]
    assert (group["tokens"] - fix["shorten_by"]) % plan["block_size"] == 0
    assert f"{fix['lengthen_by']} more of shared text" in said


def test_alternatives_are_what_such_a_plan_says_itself(
    job: Job, told: tuple[Any, str, str]
) -> None:
    plan, _, _ = told
    ways = {each["change"]: each for each in plan["alternatives"]}
    arguments = ["mode=plan", TEMPLATE, "prompt.format=plain", "model.max_model_len=500"]
    assert job(*arguments, "pool.prefix_caching=false") == 0
    alone = job.json("_plan.json")["expected_prefill_tokens"]
    assert ways["pool.prefix_caching=false"]["prefill_tokens_low"] == alone
    unsorted = ways["schedule.order=input"]
    assert plan["prefill_tokens_floor"] == unsorted["prefill_tokens_low"]
    assert unsorted["prefill_tokens_low"] <= unsorted["prefill_tokens_high"] <= alone
    for cost in plan["block_sizes"]:
        assert job(*arguments, f"pool.block_size={cost['block_size']}") == 0
        other = job.json("_plan.json")
        assert other["prefill_tokens_floor_block"] == cost["prefill_tokens"]


def test_the_memory_figures_add_up(told: tuple[Any, str, str]) -> None:
    plan, said, _ = told
    memory = plan["memory"]
    assert memory["num_blocks"] == 512
    assert memory["pool_bytes"] == 512 * 7 * memory["kv_bytes_per_token"]
    blocks_of_a_row = -(-plan["request_tokens_p95"] // 7)
    assert memory["rows_at_once_unshared"]["p95"] == 512 // blocks_of_a_row
    # The pool has room for more rows than there are.
    assert memory["rows_at_once"] == memory["rows_wanted"] == plan["requests"] == 30
    assert f"rows at once: {memory['rows_at_once']:,}" in said


def test_the_picture_is_one_well_formed_file_that_needs_nothing_else(
    told: tuple[Any, str, str],
) -> None:
    plan, _, picture = told
    root = ElementTree.fromstring(picture)
    texts = [each.text or "" for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert not re.search(r"href|url\(|@import|<script|<image", picture)
    assert f"{plan['prefill_tokens_floor']:,}" in texts
    width, height = (float(root.attrib[name]) for name in ("width", "height"))
    for each in root.iter("{http://www.w3.org/2000/svg}rect"):
        if each.attrib["width"] == "100%":
            continue
        right = float(each.attrib["x"]) + float(each.attrib["width"])
        bottom = float(each.attrib["y"]) + float(each.attrib["height"])
        assert 0 <= right <= width
        assert 0 <= bottom <= height


def test_bins_of_the_histogram_follow_each_other_and_hold_all_requests(
    told: tuple[Any, str, str],
) -> None:
    lengths, requests = told[0]["lengths"], told[0]["requests"]
    assert all(low < high for low, high in pairwise(lengths["edges"]))
    assert sum(lengths["counts"]) == requests


def test_a_shared_text_that_ends_inside_a_token_is_told_with_a_better_end(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write([{"id": n, "text": WORDS[n % 5]} for n in range(20)])
    template = 'prompt.template="A review of the movie: {{ text }}"'
    for kind in ("plain", "chat"):
        assert job("mode=plan", template, f"prompt.format={kind}") == 0
        end = job.json("_plan.json")["merged_end"]
        assert (end["merged"], end["tokens_lost"], end["edit"]) == (" ", 1, "\n")
        assert "note: the shared text ends inside a token" in capsys.readouterr().out
    assert job("mode=plan", template.replace(": {{", ":\\n{{"), "prompt.format=plain") == 0
    assert job.json("_plan.json")["merged_end"] is None
