"""Labelled rows: class names and ids as a reader of the file expects them, and errors that name file and line."""

import json

import pytest

pytest.importorskip("datasets", reason="labelled rows need datasets (pip install -e .[train])")

import datasets
import numpy as np

from neobert_hf.finetuning import labelled
from neobert_hf.finetuning.labelled import LabelledDataArguments
from neobert_hf.finetuning.labelled_texts import LabelledTextArguments, read_texts


def lines(folder, name, rows):
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / name)


def texts_of(folder, train, validation=None, seed=0, **kwargs):
    files = {"train_file": lines(folder, "train.jsonl", train)}
    if validation is not None:
        files["validation_file"] = lines(folder, "dev.jsonl", validation)
    return read_texts(LabelledTextArguments(**files, **kwargs), seed).data


def rows(*labels):
    return [{"text": f"text {i}", "label": label} for i, label in enumerate(labels)]


@pytest.mark.parametrize(
    "labels, names",
    [
        (["b", "a", "b"], ["a", "b"]),
        ([10, 9, 10], ["9", "10"]),
        ([True, False, True], ["False", "True"]),
        ([-1, 1, 0, 1, 0, -1], ["-1", "0", "1"]),
    ],
)
def test_classes_are_sorted_by_number_or_name_and_ids_point_to_them(tmp_path, labels, names):
    data = texts_of(tmp_path, rows(*labels), rows(labels[0], labels[1]))
    assert data["train"].features["label"].names == names
    assert [names[i] for i in data["train"]["label"]] == list(map(str, labels))
    assert [names[i] for i in data["validation"]["label"]] == list(map(str, labels[:2]))


def test_without_validation_rows_a_tenth_of_the_training_rows_is_held_out_by_the_seed(tmp_path):
    def held_out(seed):
        data = texts_of(tmp_path, rows(*"ab" * 50), seed=seed)
        assert len(data["train"]) == 90
        assert set(data["train"]["text"]).isdisjoint(data["validation"]["text"])
        return list(data["validation"]["text"])

    assert len(held_out(0)) == 10
    assert held_out(0) == held_out(0) != held_out(1)


def test_a_class_of_one_row_is_a_class_wherever_its_row_goes(tmp_path):
    for seed in range(5):
        data = texts_of(tmp_path, rows(*"aabbaabbaac"), seed=seed)
        assert data["train"].features["label"].names == ["a", "b", "c"]


def test_pairs_keep_both_columns(tmp_path):
    train = [{"one": "a", "two": "b", "gold": i % 2, "other": 0} for i in range(4)]
    data = texts_of(tmp_path, train, train, text_columns=["one", "two"], label_column="gold")
    assert data["train"].column_names == ["one", "two", "label"]


@pytest.mark.parametrize(
    "row, message",
    [
        ({"text": "a"}, "line 2: no column 'label' among text"),
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
        texts_of(tmp_path, [{"text": "a", "label": "a"}, row])


def test_a_label_that_no_training_row_has_is_refused_with_its_line(tmp_path):
    with pytest.raises(ValueError, match=r"dev\.jsonl, line 2: the label 'c' is in no training row; they have a, b"):
        texts_of(tmp_path, rows("a", "b"), rows("a", "c"))


def test_one_class_or_one_row_is_refused(tmp_path):
    with pytest.raises(ValueError, match="all training rows have the label 'a'"):
        texts_of(tmp_path, rows("a", "a"), rows("a", "a"))
    with pytest.raises(ValueError, match=r"train\.jsonl: 1 training rows; give at least two"):
        texts_of(tmp_path, rows("a"))
    with pytest.raises(ValueError, match=r"dev\.jsonl: 0 validation rows; give at least two"):
        texts_of(tmp_path, rows("a", "b"), [])


def test_a_label_that_only_resembles_a_number_is_a_text(tmp_path):
    labels = ["10", "-2", "--5", "9"] * 2
    data = texts_of(tmp_path, rows(*labels), rows(*labels))
    assert data["train"].features["label"].names == ["-2", "9", "10", "--5"]


def test_numbers_to_predict_are_not_taken_for_classes(tmp_path):
    with pytest.raises(ValueError, match=r"30 classes for 30 labels, such as '1' and '30'; .* --problem_type regr"):
        texts_of(tmp_path, rows(*range(1, 31)))
    texts_of(tmp_path, rows(*"aabbcccd"))  # a rare class


@pytest.mark.parametrize("names", [{"text_columns": ["label"], "label_column": "kind"}, {"label_column": "text"}])
def test_a_column_cannot_be_text_and_label(tmp_path, names):
    with pytest.raises(ValueError, match="a column of texts cannot be that of the labels"):
        texts_of(tmp_path, [{"text": "a", "label": "a", "kind": "a"}] * 2, **names)


def hub(monkeypatch, splits, names):
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=names)})
    data = {
        split: datasets.Dataset.from_list([{"text": "a", "label": label} for label in labels], features=features)
        for split, labels in splits.items()
    }
    monkeypatch.setattr(labelled, "load_dataset", lambda *a: datasets.DatasetDict(data))
    return LabelledTextArguments(dataset_name="some/dataset")


def test_a_dataset_of_the_hub_keeps_the_order_of_its_classes(monkeypatch):
    arguments = hub(monkeypatch, {"train": [1, 0, 0], "validation": [0, 1]}, ["good", "bad"])
    data = read_texts(arguments, 0).data
    assert data["train"].features["label"].names == ["good", "bad"]
    assert list(data["train"]["label"]) == [1, 0, 0]


def test_a_row_of_the_hub_without_label_is_refused_with_its_number(monkeypatch):
    arguments = hub(monkeypatch, {"train": [1, None, 0], "validation": [0, 1]}, ["good", "bad"])
    with pytest.raises(ValueError, match="train, row 1: the label is missing"):
        read_texts(arguments, 0)


def test_a_dataset_of_the_hub_without_validation_rows_gives_a_tenth_of_the_training_rows(monkeypatch):
    data = read_texts(hub(monkeypatch, {"train": [1, 0] * 10, "test": [0, 1]}, ["good", "bad"]), 0).data
    assert [len(data["train"]), len(data["validation"])] == [18, 2]
    assert data["validation"].features["label"].names == ["good", "bad"]


def test_a_dataset_that_is_a_script_is_refused_with_the_way_out(monkeypatch):
    def load_dataset(*_):
        raise RuntimeError("Dataset scripts are no longer supported")

    monkeypatch.setattr(labelled, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match=r"some/dataset cannot be loaded .Dataset scripts .* copy of it in Parquet"):
        read_texts(LabelledTextArguments(dataset_name="some/dataset"), 0)


def test_labels_that_are_one_number_in_two_spellings_have_one_order(tmp_path):
    rows = [{"text": "a", "label": label} for label in ("01", "1", "2", "001") * 2]
    data = texts_of(tmp_path, rows, rows[:2])
    assert data["train"].features["label"].names == ["001", "01", "1", "2"]


def test_a_dataset_of_the_hub_without_labels_or_training_rows_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="validation, row 1: the label is missing"):
        read_texts(hub(monkeypatch, {"train": [1, 0], "validation": [0, -1]}, ["a", "b"]), 0)
    with pytest.raises(ValueError, match="has the splits validation and no train"):
        read_texts(hub(monkeypatch, {"validation": [1, 0]}, ["a", "b"]), 0)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({}, "give --train_file or --dataset_name to train, or --test_file alone"),
        ({"train_file": "a", "dataset_name": "b"}, "exactly one of"),
        ({"validation_file": "a", "dataset_name": "b"}, "belongs to --train_file"),
        ({"test_file": "a", "validation_file": "b"}, "belongs to --train_file"),
        ({"train_file": "a", "predictions_file": "b.csv"}, "belongs to --test_file"),
        ({"test_file": "a", "predictions_file": "b.xlsx"}, "none of the suffixes .csv, .jsonl, .parquet"),
        ({"train_file": "a", "max_train_rows": 1}, "max_train_rows=1; give 2 or more"),
        ({"train_file": "a", "max_seq_length": 2}, "max_seq_length=2 leaves no token beside"),
    ],
)
def test_arguments_without_effect_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        LabelledDataArguments(**arguments)


def test_all_faulty_rows_are_in_one_message_of_one_line(tmp_path):
    bad = [{"text": "a"}, {"text": "", "label": "a"}, ["a"], {"text": 3, "label": "b"}] * 5
    file = lines(tmp_path, "train.jsonl", [*rows(*"abababab"), *bad])
    with open(file, "a") as stream:
        stream.write("{broken\n")
    with pytest.raises(
        ValueError, match=r"^21 of 29 rows have faults: .*line 9: no column 'label'.*line 10: 'text' is empty"
    ) as caught:
        read_texts(LabelledTextArguments(train_file=file), 0)
    message = str(caught.value)
    assert message.count("train.jsonl, line") == 10 and "\n" not in message
    assert message.endswith("; ...; correct or remove them, or leave them out by --skip_bad_rows")


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl"])
def test_faulty_rows_are_left_out_with_their_number_if_asked_for(tmp_path, capsys, suffix):
    content = {
        ".csv": 'text,label\none,a\ntwo,b,c\n"three" x,a\nfour,b\n,a\n',
        ".tsv": "text\tlabel\none\ta\ntwo\nx\ty\tz\nfour\tb\n\ta\n",
        ".jsonl": '{"text": "one", "label": "a"}\n{\n[1]\n{"text": "four", "label": "b"}\n{"text": "", "label": "a"}\n',
    }[suffix]
    (tmp_path / f"train{suffix}").write_text(content)
    file = str(tmp_path / f"train{suffix}")
    data = read_texts(LabelledTextArguments(file, file, skip_bad_rows=True), 0).data
    assert data["train"]["text"] == data["validation"]["text"] == ["one", "four"]
    assert f"left out 6 of 10 rows: {file}, line " in capsys.readouterr().out


def test_each_class_has_its_share_of_the_held_out_rows(tmp_path):
    labels = [*"a" * 700, *"b" * 200, *"c" * 100]
    data = texts_of(tmp_path, rows(*np.random.default_rng(0).permutation(labels)))
    counts = [data["validation"]["label"].count(i) for i in range(3)]
    assert all(abs(count - expected) <= 1 for count, expected in zip(counts, (70, 20, 10)))


def test_a_class_of_four_rows_keeps_them_all_for_training(tmp_path):
    """A tenth of 4 is nearer to 0 than to 1, and a tenth of 16 is nearer to 2."""
    data = texts_of(tmp_path, rows(*"aaaa", *"b" * 16))
    assert [data["validation"]["label"].count(i) for i in range(2)] == [0, 2]


def test_classes_with_few_rows_are_named(tmp_path, capsys):
    texts_of(tmp_path, rows(*"aaaaabbbbbccccd"))
    assert "classes with fewer than 5 training rows, hard to learn: c (4), d (1)" in capsys.readouterr().out


def test_the_training_rows_are_drawn_from_the_whole_file(tmp_path):
    train = rows(*"a" * 50, *"b" * 50)
    data = texts_of(tmp_path, train, train, max_train_rows=40)
    assert len(data["train"]) == 40 and len(data["validation"]) == 100
    assert len(set(data["train"]["text"])) == 40 and set(data["train"]["label"]) == {0, 1}
