"""A GGUF file's tokenizer makes the tokens of the tokenizer that it was written from."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from batchgen.config import ModelConfig
from batchgen.job.front import ModelFront
from tests.support import tiny_tokenizers

_NORMAL, _CONTROL = 1, 3
TEXTS = [
    "12 345.6 and 7",
    "  two   spaces\n\ttabs ",
    "a<|im_end|>b <s>",
    "\u65e5\u672c\u8a9e caf\u00e9 cafe\u0301 \U0001f336\ufe0f",
]


def _write(path: Path, tokenizer: Any) -> None:
    """Write a model of one tensor with a tokenizer."""
    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    special = {token.content for token in tokenizer.added_tokens_decoder.values()}
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(48)
    writer.add_block_count(1)
    writer.add_feed_forward_length(96)
    writer.add_head_count(6)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([_CONTROL if token in special else _NORMAL for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_chat_template(tokenizer.chat_template)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 48), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> ModelFront:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    _write(path, tiny_tokenizers.make())
    return ModelFront.load(ModelConfig(path=str(path)))


def test_n22_a_gguf_file_gives_the_same_ids(front: ModelFront) -> None:
    original, read = tiny_tokenizers.make(), front.tokenizer
    assert read is not None
    for text in TEXTS:
        assert read(text)["input_ids"] == original(text)["input_ids"]
        chat = [{"role": "user", "content": text}]
        theirs, ours = (each.apply_chat_template(chat)["input_ids"] for each in (original, read))
        assert ours == theirs


def test_n22_and_the_same_ends_and_limits(front: ModelFront) -> None:
    original = tiny_tokenizers.make()
    assert front.eos_token_ids == {original.eos_token_id}
    assert (front.limits.max_model_len, front.limits.vocab_size) == (512, len(original))
