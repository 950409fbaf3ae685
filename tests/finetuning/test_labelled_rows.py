"""Labelled rows: class names as a reader of the file expects them, errors with file and line, and a tenth held out."""

import re

import datasets
import numpy as np
import pytest
from conftest import json_lines

from neobert_hf.finetuning import LabelledDataArguments, LabelledTextArguments, read_labelled_texts


def read(folder, train, validation=None, seed=0, **kwargs):
    files = {"train_file": str(json_lines(folder / "train.jsonl", train))}
    if validation is not None:
        files["validation_file"] = str(json_lines(folder / "dev.jsonl", validation))
    return read_labelled_texts(LabelledTextArguments(**files, **kwargs), seed, None)


def rows(*labels):
    return [{"text": f"text {i}", "label": label} for i, label in enumerate(labels)]


@pytest.mark.parametrize(
    "labels, names",
    [
        (["b", "a", "b"], ["a", "b"]),
        ([10, 9, 10], ["9", "10"]),
        ([True, False, True], ["False", "True"]),
        ([-1, 1, 0, 1, 0, -1], ["-1", "0", "1"]),
        (["10", "-2", "--5", "9"] * 2, ["-2", "9", "10", "--5"]),
        (["01", "1", "2", "001"] * 2, ["001", "01", "1", "2"]),
    ],
)
def test_classes_are_sorted_by_number_or_name(tmp_path, labels, names):
    found = read(tmp_path, rows(*labels), rows(labels[0], labels[1]))
    assert found.classes == names
    assert found.train[1] == list(map(str, labels)) and found.validation[1] == list(map(str, labels[:2]))


def test_without_validation_rows_a_tenth_of_the_training_rows_is_held_out_by_the_seed(tmp_path):
    def held_out(seed):
        found = read(tmp_path, rows(*"ab" * 50), seed=seed)
        assert len(found.train[0]) == 90 and set(found.train[0]).isdisjoint(found.validation[0])
        return found.validation[0]

    assert len(held_out(0)) == 10
    assert held_out(0) == held_out(0) != held_out(1)


def test_a_class_of_one_row_is_a_class_wherever_its_row_goes(tmp_path):
    for seed in range(5):
        assert read(tmp_path, rows(*"aabbaabbaac"), seed=seed).classes == ["a", "b", "c"]


def test_each_class_has_its_share_of_the_held_out_rows(tmp_path):
    labels = np.random.default_rng(0).permutation([*"a" * 700, *"b" * 200, *"c" * 100])
    counts = [read(tmp_path, rows(*labels)).validation[1].count(name) for name in "abc"]
    assert all(abs(count - expected) <= 1 for count, expected in zip(counts, (70, 20, 10)))


def test_a_class_of_four_rows_keeps_them_all_for_training(tmp_path):
    """A tenth of 4 is nearer to 0 than to 1, and a tenth of 16 is nearer to 2."""
    held_out = read(tmp_path, rows(*"aaaa", *"b" * 16)).validation[1]
    assert held_out == ["b", "b"]


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_spaces_and_invisible_characters_around_labels_are_removed(tmp_path, suffix):
    labels = ["a b", " a b", "a b ", "\u200ba b", "\ufeffc", "c\xa0", "c\u3000", "c"]
    file = tmp_path / f"a{suffix}"
    if suffix == ".parquet":
        datasets.Dataset.from_list(rows(*labels)).to_parquet(file)
    elif suffix == ".jsonl":
        json_lines(file, rows(*labels))
    else:
        separator = {".csv": ",", ".tsv": "\t"}[suffix]
        table = [("text", "label"), *((f"text {i}", label) for i, label in enumerate(labels))]
        file.write_text("".join(f"{text}{separator}{label}\n" for text, label in table))
    found = read_labelled_texts(LabelledTextArguments(*[str(file)] * 3), 0, None)
    assert found.classes == ["a b", "c"] and found.train[1] == found.test[1] == ["a b"] * 4 + ["c"] * 4


def test_classes_that_differ_only_by_case_or_spaces_are_named(tmp_path, capsys):
    read(tmp_path, rows(*["Bug"] * 5, *["bug"] * 6, *["STRASSE", "stra\xdfe", "on time", "on  time", "ontime"] * 7))
    out = capsys.readouterr().out
    assert "'Bug' (5) and 'bug' (6), 'STRASSE' (7) and 'stra\xdfe' (7), " in out
    assert "'on time' (7) and 'on  time' (7); write each in" in out


def test_classes_with_few_rows_are_named(tmp_path, capsys):
    read(tmp_path, rows(*"aaaaabbbbbccccd"))
    assert "classes with fewer than 5 training rows, hard to learn: c (4), d (1)" in capsys.readouterr().out


def test_the_training_rows_are_drawn_from_the_whole_file(tmp_path):
    train = rows(*"a" * 50, *"b" * 50)
    found = read(tmp_path, train, train, max_train_rows=40)
    assert len(found.train[0]) == len(set(found.train[0])) == 40 and len(found.validation[0]) == 100
    assert set(found.train[1]) == {"a", "b"}


@pytest.mark.parametrize(
    "row, message",
    [
        ({"text": "a"}, "line 2: this row has no 'label'"),
        ({"label": "a"}, "line 2: this row has no 'text'"),
        ({"text": "", "label": "a"}, "line 2: 'text' is empty"),
        ({"text": 3, "label": "a"}, "line 2: 'text' is 3, a int"),
        ({"text": "a", "label": None}, "line 2: the label is missing"),
        ({"text": "a", "label": " "}, "line 2: the label is missing"),
        ({"text": "a", "label": {}}, "line 2: the label {} is a dict, not a string or a number"),
        (["a"], "line 2: the row is a list, not an object; write one JSON object on each line"),
    ],
)
def test_a_row_without_text_or_label_is_refused_with_its_line(tmp_path, row, message):
    with pytest.raises(ValueError, match=message):
        read(tmp_path, [{"text": "a", "label": "a"}, row])


UNUSABLE = [
    (rows("a", "b"), rows("a", "c"), r"dev\.jsonl, line 2: unknown class 'c'; the classes are a, b"),
    (rows("a", "a"), rows("a", "a"), "all training rows have the label 'a'"),
    (rows("a"), None, r"train\.jsonl: 1 train rows with a text; give at least 2"),
    (rows("a", "b"), [], r"dev\.jsonl: 0 validation rows with a text; give at least 2"),
    (rows(*range(1, 31)), None, r"30 classes for 30 labels, such as '1' and '30'; .*3.5, .*problem_type=regression"),
]


@pytest.mark.parametrize("train, validation, message", UNUSABLE)
def test_rows_from_which_nothing_can_be_learned_are_refused(tmp_path, train, validation, message):
    with pytest.raises(ValueError, match=message):
        read(tmp_path, train, validation)


def hub(monkeypatch, splits, names=("good", "bad")):
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=list(names))})
    data = {
        split: datasets.Dataset.from_list([{"text": "a", "label": label} for label in labels], features=features)
        for split, labels in splits.items()
    }
    monkeypatch.setattr(datasets, "load_dataset", lambda *a: datasets.DatasetDict(data))
    return read_labelled_texts(LabelledTextArguments(dataset_name="some/dataset"), 0, None)


def test_a_dataset_of_the_hub_keeps_the_order_of_its_classes(monkeypatch):
    found = hub(monkeypatch, {"train": [1, 0, 0], "validation": [0, 1]})
    assert found.classes == ["good", "bad"] and found.train[1] == ["bad", "good", "good"]
    assert found.dataset == "some/dataset" == found.names["train"] == found.names["validation"]


def test_a_dataset_of_the_hub_without_validation_rows_gives_a_tenth_of_the_training_rows(monkeypatch):
    found = hub(monkeypatch, {"train": [1, 0] * 10, "test": [0, 1]})
    assert [len(found.train[0]), len(found.validation[0])] == [18, 2] and found.test is None


@pytest.mark.parametrize(
    "splits, message",
    [
        ({"train": [1, None, 0], "validation": [0, 1]}, "train, row 1: the label is missing"),
        ({"train": [1, 0], "validation": [0, -1]}, "validation, row 1: the label is missing"),
        ({"validation": [1, 0]}, "has the splits validation and no train"),
    ],
)
def test_a_dataset_of_the_hub_without_labels_or_training_rows_is_refused(monkeypatch, splits, message):
    with pytest.raises(ValueError, match=message):
        hub(monkeypatch, splits)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({}, "give train_file or dataset_name to train, or test_file alone"),
        ({"train_file": "a", "dataset_name": "b"}, "exactly one of"),
        ({"train_file": "a", "predictions_file": "b.csv"}, "belongs to test_file"),
        ({"test_file": "a", "predictions_file": "b.xlsx"}, "none of the suffixes .csv, .jsonl, .parquet"),
    ],
)
def test_arguments_without_effect_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        LabelledDataArguments(**arguments)


def test_all_faulty_rows_are_in_one_message_of_one_line(tmp_path):
    bad = [{"text": "a"}, {"text": "", "label": "a"}, ["a"], {"text": 3, "label": "b"}] * 5
    file = json_lines(tmp_path / "train.jsonl", [*rows(*"abababab"), *bad])
    with open(file, "a") as stream:
        stream.write("{broken\n")
    pattern = r"^faults in 21 of 29 rows: .*line 9: this row has no 'label'.*line 10: 'text' is empty"
    with pytest.raises(ValueError, match=pattern) as caught:
        read_labelled_texts(LabelledTextArguments(train_file=file), 0, None)
    message = str(caught.value)
    assert message.count("train.jsonl, line") == 10 and "\n" not in message
    assert message.endswith("; and 11 more; correct or remove them, or leave them out by skip_bad_rows")


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl"])
def test_faulty_rows_are_left_out_with_their_number_if_asked_for(tmp_path, capsys, suffix):
    content = {
        ".csv": 'text,label\none,a\ntwo,b,c\n"three" x,a\nfour,b\n,a\n',
        ".tsv": "text\tlabel\none\ta\ntwo\nx\ty\tz\nfour\tb\n\ta\n",
        ".jsonl": '{"text": "one", "label": "a"}\n{\n[1]\n{"text": "four", "label": "b"}\n{"text": "", "label": "a"}\n',
    }[suffix]
    (tmp_path / f"train{suffix}").write_text(content)
    file = str(tmp_path / f"train{suffix}")
    found = read_labelled_texts(LabelledTextArguments(file, file, skip_bad_rows=True), 0, None)
    assert found.train[0] == found.validation[0] == ["one", "four"]
    assert f"left out 6 of 10 rows: {file}, line " in capsys.readouterr().out


def test_an_unclosed_quotation_mark_is_named_with_the_lines_that_it_took(tmp_path, capsys):
    good = "".join(f"text {i},{'ab'[i % 2]}\n" for i in range(50))
    (tmp_path / "a.csv").write_text(f'text,label\n{good}"never closed,a\n{good}')
    read_labelled_texts(LabelledTextArguments(str(tmp_path / "a.csv"), skip_bad_rows=True), 0, None)
    out = capsys.readouterr().out
    assert re.search(r"left out 1 of 51 rows: .*a\.csv, line 52: this is not CSV .* in 51 lines", out)


@pytest.mark.parametrize("rows", [rows("a", "b"), [{"label": "a"}, *rows("a", "b")]])
def test_a_column_that_no_row_has_is_named_with_the_option_that_names_it(tmp_path, rows):
    for option, columns in (("label_column", "'intents'"), ("text_columns", "'body'")):
        names = {"label_column": "intents"} if option == "label_column" else {"text_columns": ["text", "body"]}
        with pytest.raises(ValueError, match=rf"line 1: no column {columns} among .*; name it by .*{option}"):
            read(tmp_path, rows, **names)
