"""The trained tokenizer splits identifiers, else behaves like BERT's, and has the token ids that NeoBERT expects."""

import json
import re
import string
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer
from transformers import PreTrainedTokenizerFast as StockTokenizer

from neobert_hf.checkpoints.tokenizer import load_tokenizer
from neobert_hf.data import wordpiece
from neobert_hf.data.wordpiece import SPECIAL_TOKENS, tokenizer_hash, train_wordpiece, write_wordpiece

CHARACTERS = " ".join(string.printable.split()[0])
WORDS = "interval array http server file name getfilename float b64 encode b64encode intervalarray float32"
IDENTIFIERS = {
    "IntervalArray": "interval array", "HTTPServer": "http server", "getFileName": "get file name", "NaN": "na n",
    "get_file_name": "get _ file _ name", "UPPER_CASE": "upper _ case",
    "float32": "float 32", "b64encode": "b64 encode", "x2y": "x2y", "iPhone4": "i phone 4",
}  # fmt: skip


def test_padding_has_id_zero_and_special_tokens_surround_one_text_and_a_pair(tokenizer):
    assert tokenizer.pad_token_id == 0 and tokenizer.model_input_names == ["input_ids", "attention_mask"]
    for texts, tokens in ((["the Fox"], "[CLS] the fox [SEP]"), (["fox", "dog"], "[CLS] fox [SEP] dog [SEP]")):
        assert tokenizer.convert_ids_to_tokens(tokenizer(*texts)["input_ids"]) == tokens.split()


@pytest.mark.parametrize("vocab_size", [-1, 0, 8, 10**9])  # the trainer allocates memory for all tokens at the start
def test_a_vocabulary_size_that_is_impossible_is_refused(vocab_size):
    with pytest.raises(ValueError, match=f"vocab_size={vocab_size} is out of bounds; choose 24 .* to 1,000,000"):
        train_wordpiece(["abcdefghij"], vocab_size)


@pytest.fixture(scope="module")
def splitter():
    """A tokenizer whose vocabulary has all printable ASCII characters and some words of several parts."""
    return train_wordpiece([f"{CHARACTERS} {CHARACTERS.replace(' ', '')} {WORDS}"] * 9, vocab_size=400)


def words_of(tokenizer, text):
    backend = tokenizer.backend_tokenizer
    return [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(backend.normalizer.normalize_str(text))]


@pytest.mark.parametrize(("identifier", "words"), IDENTIFIERS.items())
def test_an_identifier_has_the_tokens_of_its_words(splitter, identifier, words):
    assert words_of(splitter, identifier) == words.split()
    assert splitter(identifier)["input_ids"] == splitter(words)["input_ids"]


@pytest.mark.parametrize("ruler", ["----", "=" * 70, "~~~~~~~", "+---+----+", "____", "^^^^^^"])
def test_a_ruler_of_any_length_has_three_tokens(splitter, ruler):
    assert splitter(f"a {ruler} b")["input_ids"] == splitter("a --- b")["input_ids"]
    assert splitter("a -- b")["input_ids"] != splitter("a --- b")["input_ids"]


@given(st.text(string.ascii_letters + string.digits + "_.- ", max_size=40))
def test_no_token_crosses_the_end_of_a_word_in_an_identifier(splitter, text):
    """The rule is written again, for pairs of neighbours instead of a regular expression."""

    def is_end(i):
        before, after, two_before, two_after = text[i - 1], text[i], text[max(0, i - 2) : i], text[i : i + 2]
        return (
            (after.isupper() and (before.islower() or before.isdigit()))
            or (before.isupper() and len(two_after) == 2 and after.isupper() and two_after[1].islower())
            or (after.isdigit() and len(two_before) == 2 and two_before.isalpha())
            or (before.isdigit() and len(two_after) == 2 and two_after.isalpha())
        )

    encoded = splitter(text, return_offsets_mapping=True, add_special_tokens=False)
    ends = {i for i in range(1, len(text)) if is_end(i)}
    for start, end in encoded["offset_mapping"]:
        assert not ends & set(range(start + 1, end)), text[start:end]


# BERT's normalizer removes control characters, also the two that Python counts as spaces.
@given(st.text(string.printable.replace("\x0b", "").replace("\x0c", ""), max_size=40))
def test_offsets_point_to_the_characters_of_each_token_in_the_original_text(splitter, text):
    encoded = splitter(text, return_offsets_mapping=True, add_special_tokens=False)
    spans = encoded["offset_mapping"]
    for token, (start, end) in zip(splitter.convert_ids_to_tokens(encoded["input_ids"]), spans):
        dividers = (match.span() for match in re.finditer(wordpiece.DIVIDER, text))
        is_in_divider = token == "-" and any(first <= start < last for first, last in dividers)
        assert text[start:end].lower() == token.removeprefix("##").lower() or is_in_divider or token == "[UNK]"
    assert spans == sorted(spans)
    shorter = re.sub(wordpiece.DIVIDER, "", text)
    found = "".join(text[start:end] for start, end in spans if text[start:end] not in "-=~*#^_+")
    assert found == "".join(each for each in "".join(shorter.split()) if each not in "-=~*#^_+")


TEXTS = [f"{a}{b}{c} {c}{a}{b}" for a in "abcdefghij" for b in "klmnopq" for c in "rstuvw"]
TEXTS.append(" ".join(map(chr, range(0x4E00, 0x4E00 + 2 * wordpiece.MAX_CHARACTERS))))


def test_the_same_texts_give_the_same_tokenizer_at_every_call():
    """Each training has hash tables of another order, which decides between equally frequent pairs and characters."""
    assert len({tokenizer_hash(train_wordpiece(TEXTS, 600)) for _ in range(3)}) == 1


NOT_ASCII = ["été ﬁn “quoted—dash” a©b a+b foo_bar\u3000x\u2028y\x85z 漢字かな x… «mot» İstanbul ½ q\u200bq \ufffd"]
NOT_ASCII.append(NOT_ASCII[0].replace(" ", ""))


def test_counted_words_give_the_vocabulary_that_the_library_learns_from_the_texts():
    texts = [*TEXTS[:40], *NOT_ASCII, CHARACTERS.replace(" ", ""), ""] * 2
    tokenizer = train_wordpiece(iter(texts), 250)
    normalized = [tokenizer.backend_tokenizer.normalizer.normalize_str(text) for text in texts]
    vocab = tokenizer.get_vocab()
    given = [token for token in vocab if token in SPECIAL_TOKENS.values() or len(token.removeprefix("##")) == 1]
    alphabet = [token for token in given if len(token) == 1]
    assert len(vocab) == 250
    assert wordpiece._train(normalized, 250, sorted(given, key=vocab.get), alphabet) == vocab


def test_texts_are_not_kept():
    text = f"{'x' * 500} " * 200
    tracemalloc.start()
    train_wordpiece((text.upper() for _ in range(20)), 64)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 6 * len(text)  # the text, its normalized copy and its words


def test_a_word_beyond_the_bound_is_not_learned(monkeypatch):
    monkeypatch.setattr(wordpiece, "MAX_WORDS", 2)
    assert {"fox", "dog"} <= train_wordpiece(["fox dog fox dog cat"], 64).get_vocab().keys() - {"cat"}
    assert "cat" not in train_wordpiece(["fox dog fox dog cat"], 64).get_vocab()


def test_a_tokenizer_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    folder = tmp_path / "new" / "tokenizer"
    written = write_wordpiece(TEXTS, folder, 400, model_max_length=99)
    again = load_tokenizer(str(folder))
    assert tokenizer_hash(again) == tokenizer_hash(written) and again.model_max_length == 99
    with pytest.raises(FileExistsError, match=r"holds tokenizer.*\.json; choose a new or empty folder"):
        write_wordpiece(iter([None]), folder, 400)  # before it reads a text
    for texts, size, line in ((["", " \n"], 400, "the texts hold no word"), (TEXTS, 5, "vocab_size=5 is out of")):
        with pytest.raises(ValueError, match=line):
            write_wordpiece(texts, tmp_path / "refused", size)

    def fail(folder):
        (folder.mkdir(exist_ok=True), (folder / "tokenizer.json").write_text("{"))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(wordpiece.PreTrainedTokenizerFast, "save_pretrained", lambda self, folder: fail(folder))
    with pytest.raises(OSError, match=r"refused cannot be written \(.*No space left on device"):
        write_wordpiece(TEXTS, tmp_path / "refused", 400)
    assert [*tmp_path.iterdir()] == [folder.parent] and [*folder.parent.iterdir()] == [folder]


def test_the_alphabet_is_bounded_and_its_rarest_characters_are_unknown():
    common = [chr(0x4E00 + i) for i in range(wordpiece.MAX_CHARACTERS)]
    tokenizer = train_wordpiece([" ".join(common)] * 2 + ["z"], vocab_size=1000)
    assert len(tokenizer) == 5 + wordpiece.MAX_CHARACTERS
    assert tokenizer.unk_token_id in tokenizer("z")["input_ids"]
    assert tokenizer.unk_token_id not in tokenizer("".join(common))["input_ids"]


@pytest.mark.compat
def test_a_tokenizer_that_the_auto_class_saved_gets_the_portable_name_and_stays_the_same(splitter, tmp_path):
    options = {"model_max_length": 99, "padding_side": "left", "chat_template": "{{ messages }}", "pad_token": "[PAD]"}
    tokenizer = StockTokenizer(tokenizer_object=splitter.backend_tokenizer, **options)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(tmp_path)
    again = load_tokenizer(str(tmp_path))
    again.save_pretrained(tmp_path / "again")
    settings = json.loads((tmp_path / "again/tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"  # in transformers 4 and 5
    last = AutoTokenizer.from_pretrained(tmp_path / "again")
    texts = {"text": ["the <new> float32", "a"], "padding": True, "truncation": True, "max_length": 6}
    for each in (again, last):
        assert tokenizer_hash(each) == tokenizer_hash(tokenizer) and each(**texts) == tokenizer(**texts)
        for name in (*options, "model_input_names", "special_tokens_map", "all_special_ids"):
            assert getattr(each, name) == getattr(tokenizer, name), name
