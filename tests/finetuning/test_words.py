"""Tagged words: CoNLL files as people have them, recognised columns, and faults with file and line."""

from types import SimpleNamespace

import datasets
import pytest
import seqeval.scheme
from conftest import json_lines
from hypothesis import given, settings
from hypothesis import strategies as st
from seqeval.metrics.sequence_labeling import get_entities
from seqeval.scheme import Entities

from neobert_hf.finetuning import TaggedWordArguments, read_tagged_words
from neobert_hf.finetuning.schemes import SCHEMES, from_iob2, to_iob2

ADA = {"words": ["Ada", "codes"], "tags": ["PERSON", "O"]}


def read(file, **options):
    return read_tagged_words(TaggedWordArguments(train_file=str(file), validation_file=str(file), **options), 0, None)


def pairs(found):
    return [list(zip(*row)) for row in zip(*found.train)]


def test_tags_belong_to_words(tmp_path):
    found = read(json_lines(tmp_path / "train.jsonl", [ADA, {"words": ["Hi"], "tags": [" O\u200b"]}]))
    assert found.classes == ["O", "PERSON"]
    assert pairs(found) == [[("Ada", "PERSON"), ("codes", "O")], [("Hi", "O")]]


CONLL = [[("U.N.", "B-ORG"), ("official", "O")], [("#", "O"), ("New York", "B-LOC")], [("東京", "O"), ("the", "O")]]


@pytest.mark.parametrize("suffix", ["conll", "txt", "iob", "bio", "tsv"])
def test_conll_files_are_read_as_people_have_them(tmp_path, suffix):
    """Blanks or tabs, a byte order mark, Windows line ends, documents, comments, several columns and empty lines."""
    blanks = "\ufeff-DOCSTART- -X- O\n\nU.N.  NNP B-ORG\r\nofficial NN O \n\n\n# id 7 domain=en\n# X O\n"
    blanks += "NewYork NNP B-LOC\n\n東京 X O\nthe X O"
    (tmp_path / f"a.{suffix}").write_text(blanks, "utf-8")
    expected = [*CONLL[:1], [("#", "O"), ("NewYork", "B-LOC")], *CONLL[2:]]
    assert pairs(read(tmp_path / f"a.{suffix}")) == expected
    tabs = "-DOCSTART- O\n\n# a\n# b\nU.N.\tB-ORG\nofficial\tO\n\n#\tO\nNew York\tB-LOC\n\t\n東京\tO\nthe\tO\n\n"
    (tmp_path / f"b.{suffix}").write_text(tabs, "utf-8")
    assert pairs(read(tmp_path / f"b.{suffix}")) == CONLL


def test_numbers_choose_the_columns_of_conll(tmp_path):
    (tmp_path / "a.conll").write_text("1 Ada PROPN _\n2 codes VERB _\n\n1 Hi PROPN _\n")
    found = read(tmp_path / "a.conll", word_column="2", tag_column="3")
    assert pairs(found)[0] == [("Ada", "PROPN"), ("codes", "VERB")]
    with pytest.raises(ValueError, match="numbers from 1 to 4, not 7"):
        read(tmp_path / "a.conll", tag_column="7")
    with pytest.raises(ValueError, match="word_column and tag_column of CoNLL are numbers from 1 to 4, not tags"):
        read(tmp_path / "a.conll", tag_column="tags")


def test_a_comment_in_a_file_with_tabs_may_have_as_many_words_as_there_are_columns(tmp_path):
    (tmp_path / "a.conll").write_text("# text = Ada\n1\tAda\tPROPN\t_\n2\tcodes\tVERB\t_\n\n1\tHi\tPROPN\t_\n")
    assert pairs(read(tmp_path / "a.conll", word_column="2", tag_column="3"))[0][0] == ("Ada", "PROPN")


def test_a_training_file_of_one_column_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("Ada\ncodes\n\nHi\n")
    with pytest.raises(ValueError, match=r"a\.txt has one column; write on each line a word, a tab or a blank, and"):
        read(tmp_path / "a.txt")


def test_a_line_with_another_number_of_columns_is_a_fault_with_its_line_and_can_be_skipped(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("Ada B-P\ncodes O\n\nHi O\nx\n\nBob B-P\n")
    with pytest.raises(ValueError, match=r"2 of 6 rows: .*a\.txt, line 5: 1 columns, but the first word has 2"):
        read(tmp_path / "a.txt")
    assert len(pairs(read(tmp_path / "a.txt", skip_bad_rows=True))) == 2
    assert "left out" in capsys.readouterr().out


def test_a_kind_of_entity_with_the_tag_of_a_first_word_has_that_of_the_others(tmp_path):
    (tmp_path / "a.conll").write_text("Ada B-P\ncodes O\n\nHi O\n")
    assert read(tmp_path / "a.conll").classes == ["B-P", "O", "I-P"]


def test_tags_of_last_and_single_words_are_read_as_they_are_and_the_classes_are_those_of_pipelines(tmp_path, capsys):
    (tmp_path / "a.conll").write_text("Ada B-P\nof I-P\nB E-P\nin O\nParis S-L\n\nin O\nB S-L\nA B-P\nC E-P\n")
    found = read(tmp_path / "a.conll")
    assert found.train[1] == [["B-P", "I-P", "E-P", "O", "S-L"], ["O", "S-L", "B-P", "E-P"]]
    assert found.classes == ["B-L", "B-P", "I-P", "O", "I-L"]
    assert "predictions are IOBES" in capsys.readouterr().out
    plain = [{"words": ["a", "b"], "tags": ["S-Bahn", "train"]}] * 2
    assert read(json_lines(tmp_path / "plain.jsonl", plain)).classes == ["S-Bahn", "train"]


TAG_ROWS = st.lists(st.lists(st.sampled_from(["O", "B-A", "I-A", "B-B-2", "I-B-2"]), min_size=1), min_size=1)


@pytest.mark.parametrize("scheme", SCHEMES)
@settings(deadline=None)
@given(rows=TAG_ROWS)
def test_a_conversion_of_any_tags_keeps_the_entities_of_seqeval(scheme, rows):
    """Also of I- after O, or after a word of another kind, as a model may predict them."""
    found = from_iob2(rows, scheme)
    entities = Entities(found, getattr(seqeval.scheme, scheme)).entities
    expected = [get_entities(row) for row in rows]
    ends = [[(kind, start, end + 1) for kind, start, end in row] for row in expected]
    assert [[entity.to_tuple()[1:] for entity in row] for row in entities] == ends
    assert [*map(get_entities, to_iob2(found, ["O", "B-A", "I-A", "B-B-2", "I-B-2"]))] == expected


def test_tokens_and_ner_tags_are_recognised_and_other_names_need_the_option(tmp_path):
    rows = [{"id": 0, "tokens": ["Ada", "codes"], "ner_tags": [1, 0]}] * 2
    assert pairs(read(json_lines(tmp_path / "a.jsonl", rows)))[0] == [("Ada", "1"), ("codes", "0")]
    other = json_lines(tmp_path / "b.jsonl", [{"mots": ["Ada", "b"], "tags": ["P", "O"]}] * 2)
    with pytest.raises(ValueError, match="no column 'words' or 'tokens' among mots, tags; name it by word_column"):
        read(other)
    assert pairs(read(other, word_column="mots"))[0][0] == ("Ada", "P")


@pytest.mark.parametrize(
    "row, message",
    [
        ({"words": ["a", "b"], "tags": ["O"]}, "2 words and 1 tags"),
        ({"words": "a b", "tags": ["O"]}, "give a list of words"),
        ({"words": ["a"], "tags": "O"}, "give a list of tags"),
        ({"words": [], "tags": []}, "give one at least"),
        ({"words": [" ", ""], "tags": ["O", "O"]}, "give one at least"),
        ({"words": ["a", 3], "tags": ["O", "O"]}, "word 2 is 3, a int; every text must be a string"),
        ({"tags": ["O"]}, "this row has no 'words' or 'tokens'"),
        ({"words": ["a"], "tags": [None]}, "the label is missing"),
    ],
)
def test_a_row_with_a_fault_is_refused_with_its_line(tmp_path, row, message):
    with pytest.raises(ValueError, match=f"line 2: .*{message}"):
        read(json_lines(tmp_path / "train.jsonl", [ADA, row, ADA]))


def test_numbers_are_not_taken_for_tags(tmp_path):
    train = [{"words": ["a", "b"], "tags": [f"{i}.5", f"{i}.25"]} for i in range(9)]
    with pytest.raises(ValueError, match=r"18 classes for 18 labels, .* give tags .tag_column"):
        read(json_lines(tmp_path / "tags.jsonl", train))


def test_test_rows_may_have_no_tags_and_keep_all_columns(tmp_path):
    trained = SimpleNamespace(classes_=["O", "P"])
    (tmp_path / "test.conll").write_text("Ada\ncodes\n\nHi\n")
    test = json_lines(tmp_path / "test.jsonl", [{"words": ["Bob"], "id": 7}])
    for file, row in ((tmp_path / "test.conll", {"words": ["Ada", "codes"]}), (test, {"words": ["Bob"], "id": 7})):
        found = read_tagged_words(TaggedWordArguments(test_file=str(file)), 0, trained)
        assert found.test_rows[0] == row and found.test[0][0] == row["words"] and found.test[1] is None
    arguments = TaggedWordArguments(test_file=str(json_lines(tmp_path / "tagged.jsonl", [ADA])))
    found = read_tagged_words(arguments, 0, trained)
    assert found.test == ([ADA["words"]], None) and found.test_faults == [("line 1", "unknown class 'PERSON'")]


def test_a_test_row_without_words_keeps_its_place_and_one_with_wrong_tags_costs_the_metric(tmp_path):
    rows = [{"words": [], "tags": []}, ADA, {"words": ["Bob"], "tags": ["O", "O"]}]
    rows += [{"words": ["", "Eve"], "tags": None}]
    arguments = TaggedWordArguments(test_file=str(json_lines(tmp_path / "test.jsonl", rows)))
    found = read_tagged_words(arguments, 0, SimpleNamespace(classes_=["O", "PERSON"]))
    assert found.test == ([row["words"] for row in rows[1:]], [ADA["tags"], None, None])
    assert found.test_rows == rows and found.test_places == [1, 2, 3]
    assert found.test_faults == [("line 3", "1 words and 2 tags; every word needs one tag")]


def test_a_dataset_of_the_hub_keeps_the_names_of_its_classes(monkeypatch):
    kind = datasets.List(datasets.ClassLabel(names=["O", "B-PER", "I-PER"]))
    features = datasets.Features({"tokens": datasets.List(datasets.Value("string")), "ner_tags": kind})
    rows = datasets.Dataset.from_list([{"tokens": ["Ada", "codes"], "ner_tags": [1, 0]}] * 4, features=features)
    monkeypatch.setattr(datasets, "load_dataset", lambda *a: datasets.DatasetDict(train=rows, validation=rows))
    found = read_tagged_words(TaggedWordArguments(dataset_name="some/dataset"), 0, None)
    assert found.classes == ["O", "B-PER", "I-PER"]
    assert pairs(found)[0] == [("Ada", "B-PER"), ("codes", "O")]
