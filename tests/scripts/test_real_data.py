"""What the scripts fetch is what they say, and nothing in it is made up."""

import io
import json
from itertools import pairwise

import prepare_data
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.realdata import LONGEST_TOKENS, real_prompt_ids

ITEMS = st.lists(
    st.dictionaries(st.text(max_size=4), st.integers() | st.text(max_size=8), max_size=3),
    max_size=6,
)


@given(ITEMS, st.data(), st.integers(1, 40), st.sampled_from([None, 2]))
def test_an_array_that_breaks_off_gives_the_items_before_the_break(items, data, chunk, indent):
    text = json.dumps(items, indent=indent, ensure_ascii=False)
    cut = data.draw(st.integers(0, len(text)))
    found = list(prepare_data.whole_items(io.StringIO(text[:cut]), chunk))
    ends = []
    decoder = json.JSONDecoder()
    position = 1
    for _ in items:
        position = text.index("{", position)
        position = decoder.raw_decode(text, position)[1]
        ends.append(position)
    assert found == items[: sum(end <= cut for end in ends)]


def test_content_that_is_not_the_expected_is_refused_by_name():
    with pytest.raises(prepare_data.UnexpectedContentError, match="rows: found 3, expected 4"):
        prepare_data._expect("rows", 3, 4)


def test_every_review_has_a_clear_human_rating_and_its_label(review_rows):
    assert len(review_rows) > 2_000
    assert len({row["id"] for row in review_rows}) == len(review_rows)
    for row in review_rows:
        assert row["text"].strip()
        assert 1 <= abs(row["rating"]) <= 4
        assert row["label"] == ("positive" if row["rating"] > 0 else "negative")


def test_no_review_is_one_of_the_examples_shown_to_the_model(review_rows):
    shots = [json.loads(line) for line in prepare_data.SHOTS_FILE.read_text("utf-8").splitlines()]
    assert len(shots) == 8
    assert {shot["answer"] for shot in shots} == {"positive", "negative"}
    texts = {row["text"] for row in review_rows}
    assert not texts & {shot["text"] for shot in shots}


def test_prompts_are_one_message_of_a_person(sharegpt_rows):
    assert len(sharegpt_rows) > 2_000
    assert len({row["id"] for row in sharegpt_rows}) == len(sharegpt_rows)
    for row in sharegpt_rows:
        (message,) = row["messages"]
        assert message["role"] == "user"
        assert message["content"].strip()
        assert len(message["content"]) <= 4_000


def test_conversations_alternate(conversation_rows):
    assert len(conversation_rows) == 256
    for row in conversation_rows:
        roles = [message["role"] for message in row["messages"]]
        assert roles[0] == "user"
        assert len(roles) >= 4
        assert all(first != second for first, second in pairwise(roles))


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir):
    return AutoTokenizer.from_pretrained(smollm2_dir)


def test_the_model_continues_a_known_sentence(smollm2_dir, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir)
    ids = tokenizer("The capital of France is", return_tensors="pt")
    output = model.generate(**ids, max_new_tokens=1, do_sample=False)
    assert tokenizer.decode(output[0, -1]) == " Paris"


def test_the_checkpoint_is_plain_float32_and_ends_a_turn_with_im_end(smollm2_dir, tokenizer):
    config = json.loads((smollm2_dir / "config.json").read_text())
    generation = json.loads((smollm2_dir / "generation_config.json").read_text())
    assert config["dtype"] == "float32"
    assert "quantization_config" not in config
    assert generation["eos_token_id"] == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.eos_token == "<|im_end|>"
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_the_tokenizer_splits_digits_before_anything_else_as_in_training(tokenizer):
    ids = tokenizer("Steps:\n\n10. Go", add_special_tokens=False)["input_ids"]
    assert [tokenizer.decode(token) for token in ids[-6:]] == [":", "\n\n", "1", "0", ".", " Go"]


@pytest.mark.parametrize("block_size", [4, 16, 32])
def test_real_prompts_meet_the_edges_of_blocks_and_share_prefixes(tokenizer, block_size):
    prompts = real_prompt_ids(tokenizer, 64, block_size)
    assert len(prompts) == 64
    assert prompts == real_prompt_ids(tokenizer, 64, block_size)
    lengths = [len(prompt) for prompt in prompts]
    assert {1, block_size - 1, block_size, block_size + 1, LONGEST_TOKENS} <= set(lengths)
    assert max(lengths) == LONGEST_TOKENS
    ordered = sorted(prompts)
    shared = sum(
        next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(first))
        for first, second in pairwise(ordered)
    )
    assert shared > sum(lengths) / 3
