import pytest

from batchgen.errors import UsageError
from batchgen.prompts.tokenizer import added_bos, has_chat_template, load_tokenizer


def test_a_tokenizer_directory_loads_with_its_chat_template(tmp_path, bos_tokenizer):
    bos_tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert loaded("the fox")["input_ids"] == bos_tokenizer("the fox")["input_ids"]
    assert has_chat_template(loaded)


def test_a_directory_without_tokenizer_files_gives_none(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert load_tokenizer(str(tmp_path)) is None


def test_files_that_cannot_be_loaded_are_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{broken")
    with pytest.raises(UsageError, match=r"model\.tokenizer="):
        load_tokenizer(str(tmp_path))
    with pytest.raises(UsageError, match=r"absent\.gguf"):
        load_tokenizer(str(tmp_path / "absent.gguf"))


def test_the_bos_that_a_tokenizer_adds_by_itself_is_found(tokenizer, bos_tokenizer):
    assert added_bos(tokenizer) is None
    assert added_bos(bos_tokenizer) == bos_tokenizer.bos_token_id
