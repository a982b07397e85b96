"""Tiny tokenizers, trained here: nothing is downloaded."""

import json
from functools import cache
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "A review of the movie: good acting, bad story, and a fine end.",
    "Answer: yes\n\nAnswer: no\n\nThe answer is in the end of the story.",
    "user asks, assistant answers, system says how | < > im start end eos",
    "caf\u00e9 cafe\u0301 na\u00efve",
] * 3


@cache
def trained(kind: str) -> str:
    """A tokenizer without special tokens, as JSON."""
    if kind == "metaspace":
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token=None))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = decoders.Sequence(
            [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")]
        )
        alphabet = [chr(code) for code in range(33, 127)]
        bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(
            vocab_size=600, initial_alphabet=alphabet, special_tokens=bytes_, show_progress=False
        )
    else:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=400,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
    if kind == "nfc":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.train_from_iterator(SENTENCES, trainer)
    text: str = tokenizer.to_str()
    if kind == "metaspace":
        # The byte tokens belong to the model, not to the special tokens.
        description = json.loads(text)
        description["added_tokens"] = []
        text = json.dumps(description)
    return text


def chat_template(start: str, end: str) -> str:
    return (
        "{{ bos_token }}{% for message in messages %}"
        "{% if message['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
        "{{ '" + start + "' + message['role'] + '\n' + message['content'] + '" + end + "\n' }}"
        "{% if message.tool_calls is defined %}CALLS {{ message.tool_calls }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '" + start + "assistant\n' }}{% endif %}"
    )


def make(
    kind: str = "bytes",
    *,
    specials: tuple[str, str, str] = ("<s>", "<|im_start|>", "<|im_end|>"),
    adds_bos: bool = False,
    chat: bool = True,
    rstrip: bool = False,
) -> Any:
    """A fast tokenizer with the special tokens (bos, start, end)."""
    backend = Tokenizer.from_str(trained(kind))
    backend.add_special_tokens(
        [AddedToken(each, rstrip=rstrip, special=True, normalized=False) for each in specials]
    )
    bos, start, end = specials
    if adds_bos:
        backend.post_processor = TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos, eos_token=end, additional_special_tokens=[start]
    )
    if chat:
        tokenizer.chat_template = chat_template(start, end)
    return tokenizer
