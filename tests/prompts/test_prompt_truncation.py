"""Truncation: what is cut, what stays, and that the prompt fits afterwards."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.prompts.limits import Limits
from batchgen.prompts.render import Renderer
from batchgen.prompts.source import PromptSpec
from batchgen.prompts.tokenize import tokenize_batches
from batchgen.prompts.truncation import SIDES, Truncation, _cut_longest_run
from batchgen.sampling import SamplingParams
from tests.support.tiny_tokenizers import make

LONG = " ".join(f"word{i} story caf\u00e9 \U0001f600" for i in range(60))


def _run(batch_of, tokenizer, rows, side, spec=PromptSpec(), *, limit=100, sampling=None):  # noqa: B008
    batch = batch_of(rows)
    sampling = sampling or SamplingParams(max_tokens=10)
    limits = Limits(limit, 1000)
    renderer = Renderer(spec, batch.table.schema, tokenizer)
    truncation = Truncation(
        side, renderer, tokenizer, limits, sampling, lambda params: params.max_tokens
    )
    (out,) = tokenize_batches([batch], renderer, tokenizer, limits, sampling, truncation=truncation)
    return out.to_pylist()


def _side_of(kept: str, whole: str) -> str:
    if whole.startswith(kept):
        return "right"
    return "left" if whole.endswith(kept) else "middle"


@settings(max_examples=200, deadline=None)
@given(
    ids=st.lists(st.integers(0, 9), min_size=1, max_size=20),
    over=st.integers(1, 20),
    side=st.sampled_from(sorted(SIDES.values())),
)
def test_special_tokens_stay_and_the_longest_run_between_them_is_cut(ids, over, side):
    array = np.array(ids, np.int32)
    cut = _cut_longest_run(array, array < 3, over, side)
    runs, at = [[]], 0
    for token in ids:
        if token < 3:
            runs.append([])
        else:
            runs[-1].append(token)
    longest = max(range(len(runs)), key=lambda i: len(runs[i]))
    keep = len(runs[longest]) - over
    if keep < 1:
        assert cut is None
        return
    head, tail = -(-keep // 2), keep // 2
    run = runs[longest]
    runs[longest] = {"left": run[over:], "right": run[:keep],
                     "middle": run[:head] + run[len(run) - tail :]}[side]  # fmt: skip
    specials = iter([token for token in ids if token < 3])
    expected = [*runs[0]]
    for run in runs[1:]:
        expected += [next(specials), *run]
    assert cut.tolist() == expected
    assert at == 0


@pytest.mark.parametrize("side", sorted(SIDES.values()))
def test_a_text_keeps_its_frame_and_loses_the_rest_by_the_token(batch_of, bos_tokenizer, side):
    tokenizer = bos_tokenizer
    whole = tokenizer(LONG)["input_ids"]
    text = f"<|im_start|>user\n{LONG}<|im_end|>\n<|im_start|>assistant\n"
    plain, framed, short = _run(
        batch_of, tokenizer, [{"prompt": LONG}, {"prompt": text}, {"prompt": "the end"}], side
    )
    assert len(plain["token_ids"]) == 90
    assert plain["cut_tokens"] == len(whole) - 90
    assert plain["token_ids"][0] == tokenizer.bos_token_id
    expected = {"left": whole[-89:], "right": whole[1:90],
                "middle": whole[1:46] + whole[-44:]}[side]  # fmt: skip
    assert plain["token_ids"][1:] == expected
    rendered = tokenizer.decode(framed["token_ids"])
    assert len(framed["token_ids"]) == 90
    assert rendered.startswith("<s><|im_start|>" if side == "left" else "<s><|im_start|>user\n")
    assert rendered.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert short["cut_tokens"] == 0
    assert short["token_ids"] == tokenizer("the end")["input_ids"]


@pytest.mark.parametrize("side", sorted(SIDES.values()))
@pytest.mark.parametrize("kind", ["bytes", "metaspace"])
@pytest.mark.parametrize("shape", ["chat", "plain"])
def test_of_a_template_only_the_longest_column_is_cut(batch_of, side, kind, shape):
    tokenizer = make(kind)
    spec = PromptSpec(
        template="Title {{ title }} Review {{ text }} Answer", format=shape, system="be fair"
    )
    rows = [{"title": "the fox", "text": LONG, "number": 7}]
    (row,) = _run(batch_of, tokenizer, rows, side, spec)
    text = tokenizer.decode(row["token_ids"])
    assert 80 < len(row["token_ids"]) <= 90
    head, kept = text.split("Title the fox Review ")
    kept, tail = kept.split(" Answer")
    assert head.endswith("user\n" if shape == "chat" else "be fair\n\n")
    assert "be fair" in head
    assert tail == ("<|im_end|>\n<|im_start|>assistant\n" if shape == "chat" else "")
    assert _side_of(kept, LONG) == side
    whole = Renderer(spec, batch_of(rows).table.schema, tokenizer)
    renders = whole.render(batch_of(rows).table)
    assert renders
    assert row["cut_tokens"] > 300


@pytest.mark.parametrize("side", sorted(SIDES.values()))
def test_of_messages_the_longest_content_that_is_not_the_system_s_is_cut(batch_of, tokenizer, side):
    messages = [
        {"role": "system", "content": "fair " * 30},
        {"role": "user", "content": "a question"},
        {"role": "assistant", "content": "an answer <|im_end|>"},
        {"role": "user", "content": LONG},
    ]
    rows = [{"messages": json.dumps(messages)}]
    (row,) = _run(batch_of, tokenizer, rows, side, limit=200)
    assert 180 < len(row["token_ids"]) <= 190
    text = tokenizer.decode(row["token_ids"])
    before, kept = text.rsplit("<|im_start|>user\n", 1)
    assert before == tokenizer.apply_chat_template(messages[:3], tokenize=False)
    kept = kept.removesuffix("<|im_end|>\n<|im_start|>assistant\n")
    assert _side_of(kept, LONG) == side
    # The spelling of a special token in a content is text still.
    assert row["token_ids"].count(tokenizer.eos_token_id) == 4


def test_token_ids_are_cut_as_they_are_and_a_rows_own_max_tokens_counts(batch_of):
    own = [None, {"max_tokens": 95}, {"max_tokens": 100}, {"max_tokens": 0}]
    rows = [
        {"prompt_token_ids": list(range(300)), "sampling_params": each and json.dumps(each)}
        for each in own
    ]
    out = _run(batch_of, None, rows, "left")
    assert out[0]["token_ids"] == list(range(210, 300))
    assert out[1]["token_ids"] == list(range(295, 300))
    assert out[2]["error_type"] == "prompt_too_long"
    assert "leaves room for 0" in out[2]["error_message"]
    # Its parameters are wrong in any case; but what is wrong first is that it is too long.
    assert out[3]["error_type"] == "prompt_too_long"


def test_a_frame_that_is_too_long_by_itself_is_an_error_that_says_so(batch_of, tokenizer):
    spec = PromptSpec(template="{{ text }}" + LONG, format="plain")
    (row,) = _run(batch_of, tokenizer, [{"text": "short"}], "right", spec)
    assert row["error_type"] == "prompt_too_long"
    assert "too few even without" in row["error_message"]
    messages = [{"role": "system", "content": LONG}, {"role": "user", "content": ""}]
    (row,) = _run(batch_of, tokenizer, [{"messages": json.dumps(messages)}], "right")
    assert row["error_type"] == "prompt_too_long"


def test_a_frame_that_leaves_some_room_only_stays_whole_and_its_output_gets_that(
    batch_of, tokenizer
):
    spec = PromptSpec(template="{{ text }} the lazy dog jumps over the fox", format="plain")
    rows = [{"text": "a"}]
    (whole,) = _run(batch_of, tokenizer, rows, "right", spec)
    length = len(whole["token_ids"])
    (row,) = _run(batch_of, tokenizer, rows, "right", spec, limit=length + 3)
    assert (row["token_ids"], row["cut_tokens"]) == (whole["token_ids"], 0)


def test_rows_that_fit_and_other_errors_are_left_alone(batch_of, tokenizer):
    rows = [{"prompt": None}, {"prompt": ""}, {"prompt": "the fox"}]
    out = _run(batch_of, tokenizer, rows, "middle")
    assert [row["error_type"] for row in out] == ["null_prompt", "empty_prompt", None]
    assert [row["cut_tokens"] for row in out] == [0, 0, 0]
    assert out[2]["token_ids"] == tokenizer("the fox")["input_ids"]
