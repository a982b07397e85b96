"""Real prompts as token ids, with shared prefixes and with lengths at the edges of blocks."""

import json
from itertools import cycle, islice
from typing import Any

import pyarrow.parquet as pq
from prepare_data import ROOT, prepare_data

LONGEST_TOKENS = 1_500


def real_prompt_ids(
    tokenizer: Any, count: int = 64, block_size: int = 16, longest_tokens: int = LONGEST_TOKENS
) -> list[list[int]]:
    """Return real prompts for SmolLM2, the same ones on every call.

    A third are review sentences under one of two few-shot headers. The others are
    conversations through the chat template, cut after each message of the user, so that one
    prompt is the beginning of the next. The first six are beginnings of the longest text
    with 1, B - 1, B, B + 1, 2B and the most tokens.

    Args:
        tokenizer: SmolLM2's.
        count: how many; at least 6.
        block_size: B, in tokens.
        longest_tokens: the most tokens of a prompt.
    """
    longest = _joined_reviews(tokenizer)
    lengths = (1, block_size - 1, block_size, block_size + 1, 2 * block_size, longest_tokens)
    edges = [longest[:length] for length in lengths]
    rest = count - len(edges)
    few_shot = list(islice(_few_shot(tokenizer), rest // 3))
    growing = list(islice(_growing(tokenizer, longest_tokens), rest - len(few_shot)))
    return [*edges, *few_shot, *growing]


def _few_shot(tokenizer: Any) -> Any:
    rows = pq.read_table(prepare_data() / "reviews.parquet").to_pylist()
    job = ROOT / "jobs" / "sentiment"
    shots = [json.loads(line) for line in (job / "shots.jsonl").read_text("utf-8").splitlines()]
    headers = [_header(shots), _header(shots[:3])]
    for header, row in zip(cycle(headers), rows, strict=False):
        yield _encode(tokenizer, f"{header}Review: {row['text']}\nSentiment:")


def _header(shots: list[dict[str, str]]) -> str:
    return "".join(f"Review: {shot['text']}\nSentiment: {shot['answer']}\n\n" for shot in shots)


def _growing(tokenizer: Any, longest_tokens: int) -> Any:
    rows = pq.read_table(prepare_data() / "conversations.parquet").to_pylist()
    for row in rows:
        for end in range(1, len(row["messages"]), 2):
            text = tokenizer.apply_chat_template(
                row["messages"][:end], tokenize=False, add_generation_prompt=True
            )
            ids = _encode(tokenizer, text)
            if len(ids) > longest_tokens:
                break
            yield ids


def _joined_reviews(tokenizer: Any) -> list[int]:
    """All the reviews' sentences in a row, as people wrote them one after the other."""
    texts = pq.read_table(prepare_data() / "reviews.parquet", columns=["text"])["text"]
    return _encode(tokenizer, "\n".join(texts.slice(0, 200).to_pylist()))


def _encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]
