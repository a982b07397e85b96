"""The worked examples of docs/prompts.md are what the code does."""

import pyarrow as pa
import pytest
from transformers import AutoTokenizer

from batchgen.prompts.render import Renderer
from batchgen.prompts.source import PromptSpec
from tests.support.realdata import ROOT

PAGE = (ROOT / "docs" / "prompts.md").read_text("utf-8")
SHOTS = [{"text": "nothing but hassle.", "answer": "negative"}]
TEMPLATE = "Review: {{ text }}\nSentiment:\n"


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir):
    return AutoTokenizer.from_pretrained(smollm2_dir)


def _prompt(spec, column, value, tokenizer):
    table = pa.table({column: [value]})
    (prompt,) = Renderer(spec, table.schema, tokenizer).render(table.to_batches()[0])
    return prompt


def _rendered(chat, tokenizer):
    return tokenizer.apply_chat_template(chat.messages, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize("prompt_format", ["plain", "chat", "auto"])
def test_the_template_example_renders_as_shown(prompt_format, tokenizer):
    spec = PromptSpec(
        template=TEMPLATE, format=prompt_format, system="Label each review.", shots=SHOTS
    )
    prompt = _prompt(spec, "text", "works as promised.", tokenizer)
    is_plain = prompt_format == "plain"
    text = prompt.text if is_plain else _rendered(prompt, tokenizer)
    assert f"```\n{text.rstrip()}\n```" in PAGE


def test_the_messages_example_renders_as_shown(tokenizer):
    messages = [{"role": "user", "content": "Name a river in France."}]
    prompt = _prompt(PromptSpec(), "messages", messages, tokenizer)
    assert f"\n\n{_rendered(prompt, tokenizer).rstrip()}\n```" in PAGE


def test_the_token_ids_are_those_of_the_prompt_example(tokenizer):
    ids = tokenizer("The capital of France is")["input_ids"]
    assert f'"prompt_token_ids": {ids}' in PAGE
