"""The tokenizer is BERT's kind, with the ids that NeoBERT expects."""

import pytest

from neobert_hf.wordpiece import train_wordpiece


def test_padding_is_zero_and_special_tokens_surround_the_text(tokenizer):
    assert tokenizer.pad_token_id == 0
    ids = tokenizer("the Fox")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["[CLS]", "the", "fox", "[SEP]"]
    assert tokenizer.model_input_names == ["input_ids", "attention_mask"]


def test_a_pair_is_separated(tokenizer):
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("fox", "dog")["input_ids"])
    assert tokens == ["[CLS]", "fox", "[SEP]", "dog", "[SEP]"]


def test_a_vocabulary_that_cannot_hold_the_characters_is_refused():
    with pytest.raises(ValueError, match="vocab_size=8 is too small"):
        train_wordpiece(["abcdefghij"], vocab_size=8)
