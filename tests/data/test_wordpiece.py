"""The trained tokenizer behaves like BERT's and has the token ids that NeoBERT expects."""

import json

import pytest
from transformers import AutoTokenizer

from neobert_hf.data.wordpiece import train_wordpiece


def test_padding_has_id_zero_and_special_tokens_surround_the_text(tokenizer):
    assert tokenizer.pad_token_id == 0
    ids = tokenizer("the Fox")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["[CLS]", "the", "fox", "[SEP]"]
    assert tokenizer.model_input_names == ["input_ids", "attention_mask"]


def test_a_separator_token_stands_between_the_texts_of_a_pair(tokenizer):
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("fox", "dog")["input_ids"])
    assert tokens == ["[CLS]", "fox", "[SEP]", "dog", "[SEP]"]


def test_a_vocabulary_size_that_is_impossible_is_refused():
    with pytest.raises(ValueError, match="vocab_size=8 is too small"):
        train_wordpiece(["abcdefghij"], vocab_size=8)
    for vocab_size in (-1, 0, 5, 10**9):  # the trainer allocates memory for all tokens at the start
        with pytest.raises(ValueError, match=f"vocab_size={vocab_size} is out of bounds; choose 6 to 1000000"):
            train_wordpiece(["abcdefghij"], vocab_size)
    with pytest.raises(ValueError, match="model_max_length=0 leaves no token"):
        train_wordpiece(["abcdefghij"], 96, 0)


@pytest.mark.compat
def test_the_saved_tokenizer_class_exists_in_transformers_4_and_5(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["tokenizer_class"] == "BertTokenizer"
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again("the fox")["input_ids"] == tokenizer("the fox")["input_ids"]
    assert again.model_max_length == 64
