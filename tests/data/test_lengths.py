"""Texts of other people lose what controls a terminal, and nothing else; of a long text as much is read as is kept."""

import pytest
from conftest import SENTENCE
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from neobert_hf import MINI_MODEL_PATH
from neobert_hf.data.lengths import beginning
from neobert_hf.files.terminal import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, Größe 漢字 \U0001f600 e\u0301 \u05d0\u200f", "plain, Größe 漢字 \U0001f600 e\u0301 \u05d0\u200f"),
        ("a\tb\nc\r\nd\re\u2028f\x85g", "a b c d e f g"),
        ("a \x1b[31mred\x1b[0m b\x1b[2J\x1b[1;1H\x1b[?25l", "a red b"),  # colour, clear, move, hide the cursor
        ("a\x9b31mb", "ab"),  # the same by one C1 character
        ("a\x1b]0;PWNED\x07b", "ab"),  # title of the window, ended by BEL
        ("a\x1b]52;c;cm0gLXJm\x1b\\b", "ab"),  # clipboard, ended by ST
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\ b", "link b"),
        ("a\x9d0;PWNED\x9cb", "ab"),
        ("a\x1bPq#0\x1b\\b\x1b_app\x1b\\c\x1b^pm\x9cd", "abcd"),  # DCS, APC, PM
        ("a\x1bcb\x1b(0c\x1b7d", "abcd"),  # reset, character set, save the cursor
        ("a\x1b]0;no end", "a0;no end"),  # the rest of the document is not hidden
        ("a\x1b[31", "a31"),
        ("a\x1b\x1b[31mb\x1b", "ab"),
        ("a\x1b\x00[31mb", "a[31mb"),
        ("a\x1b[3\x001mb", "a31mb"),
        ("a\x00\x07\x08\x0e\x7f\x80\x9fb", "ab"),
        ("user\u202egpj.exe\u202c \u2066a\u2069", "usergpj.exe a"),
        ("file \udc9b31m \ud800", "file \ufffd31m \ufffd"),  # names that are not UTF-8
        ("", ""),
    ],
)
def test_a_text_loses_its_control_sequences_and_nothing_else(text, shown):
    assert printable(text) == shown


@given(st.text(st.sampled_from("\x1b[]0;m\x07\\\x9b\x9c\x9d\x90P^_ \n\u202eab\ud800")))
def test_no_control_character_survives_and_the_result_is_stable(text):
    shown = printable(text)
    assert shown.isprintable()
    assert printable(shown) == shown


def bpe():
    """Byte-level BPE, whose tokens begin with the space before a word."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return tokenizer, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)


def unigram():
    """Unigram with the normalizer and the word boundaries of SentencePiece: white space collapses into one mark."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(r"\s+"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=120, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    return tokenizer, trainer


@pytest.fixture(scope="module", params=[None, bpe, unigram], ids=["wordpiece", "bpe", "unigram"])
def any_tokenizer(request):
    """The tokenizer of the mini model, which cuts at 6 tokens, or one that is trained here."""
    if request.param is None:
        return AutoTokenizer.from_pretrained(MINI_MODEL_PATH, model_max_length=6)
    tokenizer, trainer = request.param()
    tokenizer.train_from_iterator([f"{SENTENCE} {SENTENCE.upper()}! don't, 32 words; é über 漢字"] * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=6)


ODD = "don't", "IntervalArray", "漢字かな交じり文", "e\u0301u\u0308", "\U0001f600\u200d\U0001f525"
words = st.one_of(
    st.sampled_from([*SENTENCE.split(), *ODD]),
    st.integers(20, 400).map(lambda number: "word" * number),  # WordPiece makes one [UNK] of it
    st.text(st.sampled_from("a=-#.!\u0301\u00a0\x1c\x85\u2003\u3000漢é[SEP]\U0001f469"), max_size=9),
)
blanks = st.one_of(
    st.sampled_from([" ", " ", "\n\n", "\r\n", "\t", "\u00a0", "\x85", ""]),
    st.integers(2, 400).map(lambda n: " \n" * n),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(words, blanks), min_size=1, max_size=12), st.integers(1, 20))
def test_the_beginning_of_a_long_text_has_the_ids_of_the_whole_text(any_tokenizer, parts, times):
    text = "".join(word + blank for word, blank in parts) * times
    part = beginning(text, any_tokenizer)
    found, wanted = any_tokenizer([part, text], truncation=True)["input_ids"]
    assert found == wanted and text.startswith(part)
    if part != text:
        assert len(text) > 4 * 32 * 6 and any_tokenizer(part, truncation=True).encodings[0].overflowing


def test_the_beginning_is_near_the_number_of_tokens_that_is_kept_and_the_end_is_not_cut_for_it(any_tokenizer):
    text = "the quick brown fox jumps " * 10**4
    assert len(beginning(text, any_tokenizer)) < 32 * 6
    assert beginning(text, any_tokenizer, 10**4) == text
    any_tokenizer.truncation_side = "left"
    assert beginning(text, any_tokenizer) == text
    any_tokenizer.truncation_side = "right"
